"""A mixture of experts, served by the local engine and learned from."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from app.engines.base import Adapter
from app.engines.local import LocalEngine
from app.errors import AdapterRejected
from tests.mixture import ATTENTION, FURTHER, write_adapter, write_mixture
from tests.service import Service, eventually

UPDATES = 6


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def service(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("home"), "up", {"RIACHO_MODEL": str(mixture)}) as running:
        yield running


async def test_more_than_attention_is_refused(mixture: Path, tmp_path: Path) -> None:
    """By the local engine as by vLLM's, with the reason; attention alone loads afterwards."""
    engine = LocalEngine(str(mixture), policy="riacho", device="cpu")
    await engine.start()
    for number, (options, named) in enumerate(FURTHER.values(), 1):
        path = write_adapter(tmp_path / str(number), mixture, **options)
        with pytest.raises(AdapterRejected, match=f"{named}.*a mixture of experts covers attention only"):
            await engine.load(Adapter("riacho", number, path))
    path = write_adapter(tmp_path / "attention", mixture, target_modules=ATTENTION)
    await engine.load(Adapter("riacho", 99, path))
    assert engine.loaded() == {99}
    await engine.close()


def test_the_service_learns(service: Service) -> None:
    """Answers, rewards, updates and new versions: what is trained on is what was sampled, and each version serves."""
    for number in range(UPDATES):
        answer = service.ask(f"Say {number}.", max_tokens=24, seed=number)
        assert service.judge(completion_id=answer["id"], reward=number % 2).status_code == 200
        eventually(lambda number=number: service.policy()["live_version"] == number + 1, f"version {number + 1}")
    updates = service.updates()
    assert len(updates) == UPDATES
    for update in updates:
        assert update["metrics"]["logprob_gap"] < 1e-4
        assert update["metrics"]["masked_low"] == update["metrics"]["masked_high"] == 0
    adapter = load_file(service.home / "adapters/riacho" / str(UPDATES) / "adapter_model.safetensors")
    assert all(".self_attn." in name for name in adapter)
    assert all(torch.count_nonzero(tensor) for tensor in adapter.values())
