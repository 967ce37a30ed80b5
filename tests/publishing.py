"""Publish versions without a learner: random adapters, registered as a learner would."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from app.probe import Context, Probe
from app.registry import Registry
from app.registry.records import Lease, NewVersion
from tests.service import MODEL

LEASE_S = 600
PROBE_PROMPTS = [[5, 6, 7], [301, 41, 42, 1000, 77, 2048, 9, 500]]
LIKELY = 8


def save_adapter(model: Any, path: Path, likely: int = LIKELY) -> None:
    """A peft model's adapter as a learner publishes it, with a probe of tokens among the `likely` first of both."""
    model.save_pretrained(path)
    contexts = []
    for prompt in PROBE_PROMPTS:
        with torch.no_grad():
            adapted = model(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
            with model.disable_adapter():
                base = model(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        tokens = sorted(set(adapted.topk(likely).indices.tolist()) & set(base.topk(likely).indices.tolist()))
        contexts.append(Context(prompt, tokens, adapted[tokens].tolist(), base[tokens].tolist()))
    (path / "probe.json").write_bytes(Probe(contexts).encode())


class Publisher:
    """Writes adapters that differ clearly from the base and from each other.

    Args:
        home: the home of a running service.
        database_url: its registry, if that is not in the home.
        scale: the size of LoRA B; large enough to change greedy answers.
    """

    def __init__(self, home: Path, scale: float = 0.03, database_url: str | None = None) -> None:
        self._store = home / "adapters" / "riacho"
        self._registry = Registry.open(database_url or f"sqlite:///{home / 'registry.db'}")
        self._scale = scale
        torch.manual_seed(0)  # for LoRA A
        self._model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
            LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        lease = self._registry.leases.acquire("learner:riacho", "test", LEASE_S)
        assert lease is not None
        self._lease: Lease = lease

    def write(self, number: int, directory: str | None = None) -> Path:
        """The adapter of a version, drawn from its number; in a directory of that name, or of another."""
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * self._scale)
        path = self._store / (directory or str(number))
        save_adapter(self._model, path)
        return path

    def publish(self, number: int, epoch: int = 0, write: Callable[[int], Path] | None = None) -> None:
        """Write a version and register it as a candidate."""
        path = (write or self.write)(number)
        self._registry.versions.add(
            NewVersion(
                policy="riacho",
                number=number,
                parent=number - 1,
                epoch=epoch,
                update_count=number,
                sha256=f"{number}",
                path=str(path),
                position={},
                metrics={},
                settings={},
            ),
            self._lease,
        )

    @property
    def live(self) -> int:
        return self._registry.policies.get("riacho").live_version

    @property
    def epoch(self) -> int:
        return self._registry.policies.get("riacho").epoch

    async def wait_live(self, number: int, deadline_s: float = 60) -> None:
        """Wait until a version is live; raises TimeoutError."""
        async with asyncio.timeout(deadline_s):
            while self.live != number:
                await asyncio.sleep(0.01)

    def close(self) -> None:
        self._registry.close()
