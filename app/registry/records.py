"""What the registry takes and gives: frozen values, never rows bound to a session.

Times are aware and in UTC. Version 0 is the base model, which has no row of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from app.events.schema import DEFAULT_SIGNAL, Event

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

VersionState = Literal["candidate", "live", "retired", "rejected", "rolled_back"]
RejectedBy = Literal["learner", "engine", "epoch"]
DeploymentKind = Literal["publish", "rollback"]
Role = Literal["client", "admin"]
CompletionState = Literal["waiting", "scoring", "parked", "trained", "dropped", "expired", "not_trainable"]


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """A policy; `epoch` counts its rollbacks, `fingerprint` names the base's config and weights."""

    name: str
    base_model: str
    fingerprint: str
    live_version: int
    epoch: int
    learning_paused: bool
    reward_min: float
    reward_max: float
    created_at: datetime


@dataclass(frozen=True, slots=True)
class NewVersion:
    """A checkpoint that the learner publishes, or (`rejected`, with the reason) keeps to go on from.

    `position` maps a partition to the offset of the first event that is not in the checkpoint.
    """

    policy: str
    number: int
    parent: int
    epoch: int
    update_count: int
    sha256: str
    path: str
    position: dict[str, int]
    metrics: dict[str, Any]
    settings: dict[str, Any]
    state: Literal["candidate", "rejected"] = "candidate"
    reason: str | None = None

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError(f"version {self.number}: numbers begin at 1; 0 is the base model")


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """A version as it stands; `deleted_at` is set once its files are gone."""

    policy: str
    number: int
    parent: int
    epoch: int
    update_count: int
    sha256: str
    path: str
    position: dict[str, int]
    metrics: dict[str, Any]
    settings: dict[str, Any]
    state: VersionState
    reason: str | None
    rejected_by: RejectedBy | None
    pinned: bool
    created_at: datetime
    deleted_at: datetime | None

    @property
    def directory(self) -> str:
        """The name of its directory in the policy's part of the adapter store, wherever that is mounted."""
        return PurePath(self.path).name


@dataclass(frozen=True, slots=True)
class DeploymentRecord:
    """One move of a policy's live pointer; `epoch` is the policy's epoch after the move."""

    id: int
    policy: str
    at: datetime
    actor: str
    from_version: int
    to_version: int
    reason: str
    kind: DeploymentKind
    epoch: int


@dataclass(frozen=True, slots=True)
class OutboxRecord:
    """An event that was promised in a transaction and may not be on the log yet; `id` is its event id."""

    id: str
    event: Event


@dataclass(frozen=True, slots=True)
class NewFeedback:
    """A judgement as a client gave it; `id` is the client's idempotency key, a close has no reward."""

    id: str | None
    policy: str
    session_id: str
    completion_id: str | None
    reward: float | None
    final: bool
    closes: bool
    key_id: str
    comment: str | None = None
    metadata: dict[str, Any] | None = None
    signal: str = DEFAULT_SIGNAL


@dataclass(frozen=True, slots=True)
class FeedbackRecord:
    """A stored judgement; `duplicate` says that this call only found it."""

    id: int
    client_id: str | None
    policy: str
    session_id: str
    completion_id: str | None
    signal: str
    reward: float | None
    final: bool
    closes: bool
    key_id: str
    comment: str | None
    metadata: dict[str, Any] | None
    event_id: str
    at: datetime
    duplicate: bool


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as its holder got it; `token` rises at each change of hands and fences the former holder."""

    name: str
    holder: str
    token: int
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An API key without the key; `store_content` allows its messages and outputs to be kept."""

    id: str
    role: Role
    name: str
    created_at: datetime
    revoked_at: datetime | None
    store_content: bool


@dataclass(frozen=True, slots=True)
class AuditRecord:
    id: int
    at: datetime
    actor: str
    action: str
    policy: str | None
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CompletionRow:
    """A completion as the learner met it on the log, and what became of it."""

    id: str
    policy: str
    session_id: str
    key_id: str
    version: int
    position: str
    at: datetime
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    trainable: bool
    reason: str | None
    messages: list[dict[str, Any]] | None
    output: str | None
    state: CompletionState
    rollout_update: int | None = None
    trained_version: int | None = None


@dataclass(frozen=True, slots=True)
class UpdateRow:
    """One update of the learner; `version` is the first version that contains it, once published."""

    policy: str
    number: int
    epoch: int
    version: int | None
    at: datetime
    session_ids: list[str]
    metrics: dict[str, Any]


R = TypeVar("R", bound="DataclassInstance")


def record_of(kind: type[R], row: object, **given: Any) -> R:
    """The record whose fields are `row`'s attributes of the same names, or `given`."""
    names = [field.name for field in fields(kind) if field.name not in given]
    return kind(**{name: getattr(row, name) for name in names}, **given)


def values_of(record: DataclassInstance) -> Mapping[str, Any]:
    """A record's fields, not copied."""
    return {field.name: getattr(record, field.name) for field in fields(record)}
