"""Keeps the tables of completions and updates, a projection of the log and of the update reports.

Every write is an upsert, so that a replay after a crash repeats it.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal

from app.events.log import Position
from app.events.schema import CompletionEvent
from app.registry import Registry
from app.registry.records import CompletionRow, Lease, UpdateRow
from learner.report import UpdateReport

Outcome = Literal["waiting", "scoring", "parked", "trained", "dropped", "expired"]


class Projector:
    """Collects completion rows and writes them together, as long as `lease` is this learner's (LeaseLost)."""

    def __init__(self, registry: Registry, policy: str, lease: Lease) -> None:
        self._projections = registry.projections
        self._policy = policy
        self._lease = lease
        self._rows: list[CompletionRow] = []

    def completion(self, event: CompletionEvent, position: Position) -> None:
        self._rows.append(
            CompletionRow(
                id=event.completion_id,
                policy=self._policy,
                session_id=event.session_id,
                key_id=event.key_id,
                version=event.version,
                position=str(position),
                at=event.at,
                prompt_tokens=event.usage.prompt_tokens,
                completion_tokens=event.usage.completion_tokens,
                finish_reason=event.finish_reason,
                trainable=event.trainable,
                reason=event.not_trainable_reason,
                messages=event.messages,
                output=event.output,
                state="waiting" if event.trainable else "not_trainable",
                rollout_update=None,
                trained_version=None,
            )
        )

    def outcome(self, session_ids: Sequence[str], outcome: Outcome, update: int | None = None) -> None:
        self.flush()
        self._projections.set_outcome(self._policy, session_ids, outcome, update, self._lease)

    def update(self, report: UpdateReport, epoch: int, at: datetime, not_trained: Mapping[str, int]) -> None:
        """Show an update, with what was not trained on so far, by reason."""
        row = UpdateRow(
            policy=self._policy,
            number=report.number,
            epoch=epoch,
            version=None,
            at=at,
            session_ids=report.session_ids,
            metrics=report.metrics() | {"not_trained": dict(not_trained)},
        )
        self._projections.save(self._policy, self._rows, [row], self._lease)
        self._rows = []
        self._projections.set_outcome(self._policy, report.session_ids, "trained", report.number, self._lease)

    def resumed(self, updates: int, waiting: Sequence[str], scoring: Sequence[str], parked: Sequence[str]) -> None:
        """Show no more than the checkpoint holds: so many updates, and what waits for its end, or held for scores."""
        self._projections.take_back(self._policy, updates, waiting, self._lease)
        self._projections.hold(self._policy, scoring, "scoring", self._lease)
        self._projections.hold(self._policy, parked, "parked", self._lease)

    def published(self, updates: Sequence[int], version: int) -> None:
        self._projections.set_published(self._policy, updates, version, self._lease)

    def flush(self) -> None:
        if self._rows:
            self._projections.save(self._policy, self._rows, [], self._lease)
            self._rows = []
