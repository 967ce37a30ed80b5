"""A mixture of experts, served by the local engine and learned from."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from app.engines.base import Adapter, GenerateRequest
from app.engines.local import LocalEngine
from app.errors import AdapterRejected
from app.events.schema import CompletionEvent, Sampling
from tests.builders import completion
from tests.mixture import ATTENTION, FURTHER, write_adapter, write_mixture
from tests.scoring import worst_difference
from tests.service import Service, eventually

UPDATES = 10  # more than the slots, so that versions leave the engine


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def service(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("home"), "up", {"RIACHO_MODEL": str(mixture)}) as running:
        yield running


async def answer(engine: LocalEngine, version: int, temperature: float) -> CompletionEvent:
    """One answer of an engine, as the service would record it."""
    request = GenerateRequest(
        messages=[{"role": "user", "content": "Write a line about the sea."}],
        sampling=Sampling(temperature=temperature, max_tokens=24, seed=version),
    )
    chunks = [chunk async for chunk in engine.generate(request, version)]
    return completion(
        prompt_ids=chunks[0].prompt_ids,
        completion_ids=[token for chunk in chunks for token in chunk.token_ids],
        logprobs=[logprob for chunk in chunks for logprob in chunk.logprobs],
        temperature=temperature,
    )


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


async def test_a_version_can_leave_and_another_take_its_place(mixture: Path, tmp_path: Path) -> None:
    """Also the first one, which peft keeps as its active adapter; what the other serves is exact."""
    engine = LocalEngine(str(mixture), policy="riacho", device="cpu")
    await engine.start()
    for version in (1, 2):
        path = write_adapter(tmp_path / str(version), mixture, target_modules=ATTENTION[version:])
        await engine.load(Adapter("riacho", version, path))
        base = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, str(path)).eval()
        assert worst_difference(model, await answer(engine, version, temperature=0.7)) < 1e-4
        await engine.unload(version)
    await engine.close()


def test_the_service_learns(service: Service) -> None:
    """Answers, rewards, updates and new versions: what is trained on is what was sampled, and each version serves."""
    for number in range(UPDATES):
        answer = service.ask(f"Say {number}.", max_tokens=24, seed=number)
        assert service.judge(completion_id=answer["id"], reward=(1 + number % 2) / 2).status_code == 200
        eventually(lambda number=number: service.policy()["live_version"] == number + 1, f"version {number + 1}")
    updates = service.updates()
    assert len(updates) == UPDATES
    for update in updates:
        assert update["metrics"]["logprob_gap"] < 1e-4
        assert update["metrics"]["masked_low"] == update["metrics"]["masked_high"] == 0
    adapter = load_file(service.home / "adapters/riacho" / str(UPDATES) / "adapter_model.safetensors")
    assert all(".self_attn." in name for name in adapter)
    assert all(torch.count_nonzero(tensor) for tensor in adapter.values())
