"""The tables. Everything here means the same on SQLite and on PostgreSQL."""

from datetime import UTC, datetime
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime: stored in UTC and read back in UTC, also where the database keeps no offset."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value} has no UTC offset; the registry keeps aware times only")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


# SQLite counts up by itself only in a column that is exactly INTEGER.
RowId = BigInteger().with_variant(Integer(), "sqlite")
PolicyName = String(64)
SessionId = String(128)
EventId = String(128)
CompletionId = String(300)
KeyId = String(64)
# Text that comes from a model or a client may hold U+0000, which PostgreSQL takes in JSON but not in TEXT.
FreeText = JSON(none_as_null=True)
HELD_STATES = ("scoring", "parked")
HELD = text("state IN ('{}', '{}')".format(*HELD_STATES))


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        datetime: UtcDateTime(),
        float: Double(),
        str: Text(),
        dict[str, int]: JSON(none_as_null=True),
        dict[str, Any]: JSON(none_as_null=True),
        list[str]: JSON(none_as_null=True),
        list[dict[str, Any]]: JSON(none_as_null=True),
    }


def _policy(*, primary_key: bool = False) -> Mapped[str]:
    return mapped_column(PolicyName, ForeignKey("policies.name"), primary_key=primary_key)


class Policy(Base):
    __tablename__ = "policies"

    name: Mapped[str] = mapped_column(PolicyName, primary_key=True)
    base_model: Mapped[str]
    fingerprint: Mapped[str]
    live_version: Mapped[int]
    epoch: Mapped[int]
    learning_paused: Mapped[bool]
    reward_min: Mapped[float]
    reward_max: Mapped[float]
    created_at: Mapped[datetime]


class Version(Base):
    __tablename__ = "versions"

    policy: Mapped[str] = _policy(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    parent: Mapped[int]
    epoch: Mapped[int]
    update_count: Mapped[int]
    sha256: Mapped[str] = mapped_column(String(64))
    path: Mapped[str]
    position: Mapped[dict[str, int]]
    metrics: Mapped[dict[str, Any]]
    settings: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str | None]
    rejected_by: Mapped[str | None] = mapped_column(String(16))
    pinned: Mapped[bool]
    created_at: Mapped[datetime]
    deleted_at: Mapped[datetime | None]


class Deployment(Base):
    __tablename__ = "deployments"
    __table_args__ = (Index(None, "policy", "id"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    policy: Mapped[str] = _policy()
    at: Mapped[datetime]
    actor: Mapped[str]
    from_version: Mapped[int]
    to_version: Mapped[int]
    reason: Mapped[str]
    kind: Mapped[str] = mapped_column(String(16))
    epoch: Mapped[int]


class Feedback(Base):
    """`final_key` is the session's id on the one row that closes its rollout, and NULL on all others."""

    __tablename__ = "feedback"
    __table_args__ = (
        UniqueConstraint("policy", "key_id", "client_id"),
        UniqueConstraint("policy", "final_key"),
        Index(None, "policy", "session_id"),
    )

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    client_id: Mapped[str | None] = mapped_column(String(255))
    policy: Mapped[str] = _policy()
    session_id: Mapped[str] = mapped_column(SessionId)
    completion_id: Mapped[str | None] = mapped_column(CompletionId)
    signal: Mapped[str] = mapped_column(String(32))
    reward: Mapped[float | None]
    final: Mapped[bool]
    closes: Mapped[bool]
    final_key: Mapped[str | None] = mapped_column(SessionId)
    key_id: Mapped[str] = mapped_column(KeyId)
    comment: Mapped[str | None] = mapped_column(FreeText)
    details: Mapped[dict[str, Any] | None] = mapped_column("metadata")
    event_id: Mapped[str] = mapped_column(EventId, unique=True)
    at: Mapped[datetime]


class OutboxEntry(Base):
    __tablename__ = "outbox"
    __table_args__ = (Index(None, "policy", "at"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    event_id: Mapped[str] = mapped_column(EventId, unique=True)
    policy: Mapped[str] = _policy()
    at: Mapped[datetime]
    payload: Mapped[str]


class ApiKey(Base):
    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(KeyId, primary_key=True)
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    role: Mapped[str] = mapped_column(String(16))
    name: Mapped[str]
    created_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]
    store_content: Mapped[bool]


class LeaseEntry(Base):
    """A row stays when its lease is released (`holder` NULL), so that `token` never goes back."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    holder: Mapped[str | None]
    token: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[datetime]


class AuditEntry(Base):
    __tablename__ = "audit"
    __table_args__ = (Index(None, "policy", "id"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    at: Mapped[datetime]
    actor: Mapped[str]
    action: Mapped[str] = mapped_column(String(64))
    policy: Mapped[str | None] = mapped_column(PolicyName)
    detail: Mapped[dict[str, Any]]


class Completion(Base):
    __tablename__ = "completions"
    __table_args__ = (
        Index(None, "policy", "session_id"),
        Index(None, "policy", "rollout_update"),
        Index("ix_completions_held", "policy", "state", sqlite_where=HELD, postgresql_where=HELD),
    )

    id: Mapped[str] = mapped_column(CompletionId, primary_key=True)
    policy: Mapped[str] = _policy()
    session_id: Mapped[str] = mapped_column(SessionId)
    key_id: Mapped[str] = mapped_column(KeyId)
    version: Mapped[int]
    position: Mapped[str] = mapped_column(String(64))
    at: Mapped[datetime]
    prompt_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    finish_reason: Mapped[str] = mapped_column(String(32))
    trainable: Mapped[bool]
    reason: Mapped[str | None]
    messages: Mapped[list[dict[str, Any]] | None]
    output: Mapped[str | None] = mapped_column(FreeText)
    state: Mapped[str] = mapped_column(String(16))
    rollout_update: Mapped[int | None]
    trained_version: Mapped[int | None]


class Update(Base):
    __tablename__ = "updates"

    policy: Mapped[str] = _policy(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    epoch: Mapped[int]
    version: Mapped[int | None]
    at: Mapped[datetime]
    session_ids: Mapped[list[str]]
    metrics: Mapped[dict[str, Any]]
