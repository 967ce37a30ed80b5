"""Publish a version: check it, write its checkpoint, register it as a candidate."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from app.registry import Registry
from app.registry.records import Lease, NewVersion
from learner import checkpoint
from learner.report import UpdateReport
from learner.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a version comes from."""

    number: int
    parent: int
    epoch: int


def reason_to_reject(adapter: Mapping[str, Tensor], report: UpdateReport, max_kl: float) -> str | None:
    """Why an adapter must not serve, or None.

    `max_kl` is in nats a token, against the estimate on the tokens of the update that made the adapter.
    """
    for name, tensor in adapter.items():
        if not bool(tensor.isfinite().all()):
            return f"{name} has numbers that are not finite"
    if not report.kl_after <= max_kl:
        return f"KL to the base is {report.kl_after:.3g} nats a token, above max_kl = {max_kl:g}"
    return None


class Publisher:
    """Writes versions of one policy into the adapter store and the registry."""

    def __init__(self, registry: Registry, policy: str, base_model: str, store: Path) -> None:
        self._registry = registry
        self._policy = policy
        self._base_model = base_model
        self._directory = store / policy

    def write_initial(self, trainer: Trainer) -> Path:
        """Keep the untrained state, so that a rollback to the base has something to restore; where it is."""
        path, _ = checkpoint.write(self._directory / "0", trainer, self._base_model, {})
        return path

    def path(self, version: int) -> Path:
        """Where the checkpoint of a registered version is; raises NotFound."""
        return self._directory / self._registry.versions.get(self._policy, version).directory

    def publish(
        self, lineage: Lineage, trainer: Trainer, report: UpdateReport, stream: Mapping[str, Any], lease: Lease
    ) -> bool:
        """Write and register a version; false if it was rejected, and then the caller restores the parent.

        Raises LeaseLost where another learner has taken over, NumberTaken where the number has another version.
        """
        reason = reason_to_reject(trainer.policy.state(), report, trainer.settings.max_kl)
        path, sha256 = checkpoint.write(self._directory / str(lineage.number), trainer, self._base_model, stream)
        self._registry.versions.add(
            NewVersion(
                policy=self._policy,
                number=lineage.number,
                parent=lineage.parent,
                epoch=lineage.epoch,
                update_count=report.number,
                sha256=sha256,
                path=str(path),
                position={str(part): offset for part, offset in stream["positions"].items()},
                metrics=report.metrics(),
                settings=trainer.settings.model_dump(mode="json"),
                state="candidate" if reason is None else "rejected",
                reason=reason,
            ),
            lease,
        )
        return reason is None
