"""A mixture of experts on a real vLLM server: adapters on attention are exact, and no other serves."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.mixture import ATTENTION, FURTHER, write_adapter, write_mixture
from tests.precision import require_another
from tests.publishing import Publisher
from tests.scoring import differences
from tests.service import Service, eventually
from tests.vllm.conftest import TOLERANCE, VllmProcess

SEEDS = range(4)
ASKED = "What is 12 + 30?"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def service(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service on a server of its own."""
    server = VllmProcess(tmp_path_factory.mktemp("vllm"), mixture)
    server.start()
    extra = {"RIACHO_ENGINE_URLS": server.url, "RIACHO_MODEL": str(mixture)}
    with Service(tmp_path_factory.mktemp("home"), extra=extra) as running:
        yield running
    server.stop()


@pytest.fixture(scope="module")
def models(service: Service, publisher: Publisher, mixture: Path) -> dict[str, Any]:
    """The base and version 1, on attention, as transformers and peft compute them; version 1 is live."""
    publish(service, publisher, mixture, 1, target_modules=ATTENTION)
    asyncio.run(publisher.wait_live(1))

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).eval()

    adapted = PeftModel.from_pretrained(base(), str(service.home / "adapters/riacho/1")).eval()
    return {"riacho@base": base(), "riacho@1": adapted}


def publish(service: Service, publisher: Publisher, mixture: Path, number: int, **options: Any) -> None:
    """Write an adapter with these options and register it."""
    store = service.home / "adapters/riacho"
    publisher.publish(number, write=lambda number: write_adapter(store / str(number), mixture, **options))


@pytest.mark.parametrize("name", ["riacho@base", "riacho@1"])
def test_attention_is_served_exactly(
    service: Service, models: dict[str, Any], mixture: Path, record_property: Any, name: str
) -> None:
    """Prompt ids are the template's, and every logprob is that of transformers and peft."""
    messages = [{"role": "user", "content": ASKED}]
    template = AutoTokenizer.from_pretrained(mixture).apply_chat_template
    prompt = template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    found: list[float] = []
    of_another: list[float] = []
    for seed in SEEDS:
        answer = service.ask(ASKED, model=name, seed=seed, max_tokens=48)
        event = service.recorded(answer["id"])
        assert event.trainable, event.not_trainable_reason
        assert list(event.prompt_ids) == prompt
        found += differences(models[name], event)
        [other] = models.keys() - {name}
        of_another += differences(models[other], event)
    record_property("worst", max(found))
    TOLERANCE.require(found)
    require_another(of_another)


@pytest.mark.parametrize("case", FURTHER)
def test_more_than_attention_is_rejected_with_the_reason(
    service: Service, publisher: Publisher, models: dict[str, Any], mixture: Path, case: str
) -> None:
    """vLLM itself loads each of these and serves it wrong by nats; the live version stays and answers."""
    options, named = FURTHER[case]
    number = 2 + list(FURTHER).index(case)
    publish(service, publisher, mixture, number, **options)

    def rejected() -> str | None:
        with closing(service.registry()) as registry:
            record = registry.versions.get("riacho", number)
        return record.reason if record.state == "rejected" else None

    reason = eventually(rejected, f"{case} is rejected", 30) or ""
    assert named in reason
    assert "a mixture of experts covers attention only" in reason
    assert publisher.live == 1
    assert service.ask()["model"] == "riacho@1"
    assert service.ready()
