"""Adapters that vLLM would misapply, ignore or die of never serve, and the serving version does not move."""

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.publishing import Publisher, save_adapter
from tests.service import MODEL, Service, eventually

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def live(publisher: Publisher) -> int:
    publisher.publish(1)
    asyncio.run(publisher.wait_live(1))
    return 1


def saved(**options: Any) -> Callable[[Path], None]:
    """Replace an adapter by a new one with these options."""

    def change(path: Path) -> None:
        shutil.rmtree(path)
        base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **{"target_modules": ["q_proj"]} | options)
        save_adapter(get_peft_model(base, config).eval(), path)

    return change


def tensors(edit: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    return lambda path: save_file(edit(load_file(path / WEIGHTS)), path / WEIGHTS, metadata={"format": "pt"})


def truncate(path: Path) -> None:
    weights = path / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1000])


def swap_layers(held: dict[str, Any]) -> dict[str, Any]:
    """Keys that all have a place in the base, but hold another layer's tensors."""
    other = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    return {re.sub(r"layers\.[01]\.", lambda found: other[found[0]], key): value for key, value in held.items()}


def zero_b(held: dict[str, Any]) -> dict[str, Any]:
    return {key: value * 0 if ".lora_B." in key else value for key, value in held.items()}


def from_another_base(path: Path) -> None:
    """An adapter that fits, trained on a base of the same shape."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.3)
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, target_modules=["q_proj"])
    shutil.rmtree(path)
    save_adapter(get_peft_model(base, config).eval(), path)


def lower_rank(path: Path) -> None:
    config = path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 2}))


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "renamed keys": (
        tensors(lambda held: {key.replace("layers.0", "layers.99"): value for key, value in held.items()}),
        "no place",
    ),
    "swapped layers": (tensors(swap_layers), "misapplies"),
    "LoRA B zero": (tensors(zero_b), "every LoRA B is zero"),
    "another base of the same shape": (from_another_base, "another base"),
    "no probe": (lambda path: (path / "probe.json").unlink(), "probe"),
    "missing tensor": (tensors(lambda held: dict(list(held.items())[1:])), "does not fit"),
    "another base": (tensors(lambda held: {k: torch.cat([v, v], 1).contiguous() for k, v in held.items()}), "not fit"),
    "NaN": (tensors(lambda held: {key: value * float("nan") for key, value in held.items()}), "not finite"),
    "rank of its own": (lower_rank, "does not fit"),
    "truncated file": (truncate, "truncated"),
    "no directory": (shutil.rmtree, "no directory"),
    "DoRA": (saved(use_dora=True), "use_dora"),
    "modules_to_save": (saved(modules_to_save=["lm_head"]), "modules_to_save"),
    "rank above the limit": (saved(r=32), "rank"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_version_is_rejected_with_the_reason(
    service: Service, publisher: Publisher, live: int, case: str
) -> None:
    """It is rejected, the live version answers on, and the engine is not hurt."""
    change, reason = CASES[case]
    number = 2 + list(CASES).index(case)

    def write(number: int) -> Path:
        path = publisher.write(number)
        change(path)
        return path

    publisher.publish(number, write=write)

    def rejected() -> str | None:
        with closing(service.registry()) as registry:
            record = registry.versions.get("riacho", number)
        return record.reason if record.state == "rejected" else None

    assert reason in (eventually(rejected, f"{case} is rejected", 30) or "")
    assert publisher.live == live
    assert service.ask()["model"] == "riacho@1"
    assert service.ready()
