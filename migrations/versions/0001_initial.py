"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Item = sa.schema.SchemaItem


def upgrade() -> None:
    _policies()
    _versions()
    _deployments()
    _feedback()
    _outbox()
    _access()
    _completions()
    _updates()


def downgrade() -> None:
    for table in (
        "updates",
        "completions",
        "audit",
        "leases",
        "api_keys",
        "outbox",
        "feedback",
        "deployments",
        "versions",
        "policies",
    ):
        op.drop_table(table)


def _time(name: str, *, nullable: bool = False) -> Item:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _json(name: str, *, nullable: bool = False) -> Item:
    return sa.Column(name, sa.JSON(none_as_null=True), nullable=nullable)


def _row_id(table: str) -> tuple[Item, Item]:
    counted = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    return sa.Column("id", counted, nullable=False), sa.PrimaryKeyConstraint("id", name=f"pk_{table}")


def _policy_of(table: str) -> tuple[Item, Item]:
    return (
        sa.Column("policy", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(["policy"], ["policies.name"], name=f"fk_{table}_policy"),
    )


def _policies() -> None:
    op.create_table(
        "policies",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("live_version", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("learning_paused", sa.Boolean(), nullable=False),
        sa.Column("reward_min", sa.Double(), nullable=False),
        sa.Column("reward_max", sa.Double(), nullable=False),
        _time("created_at"),
        sa.PrimaryKeyConstraint("name", name="pk_policies"),
    )


def _versions() -> None:
    op.create_table(
        "versions",
        *_policy_of("versions"),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("parent", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("update_count", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        _json("position"),
        _json("metrics"),
        _json("settings"),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("rejected_by", sa.String(16), nullable=True),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        _time("created_at"),
        _time("deleted_at", nullable=True),
        sa.PrimaryKeyConstraint("policy", "number", name="pk_versions"),
    )


def _deployments() -> None:
    op.create_table(
        "deployments",
        *_row_id("deployments"),
        *_policy_of("deployments"),
        _time("at"),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("from_version", sa.Integer(), nullable=False),
        sa.Column("to_version", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
    )
    op.create_index("ix_deployments_policy_id", "deployments", ["policy", "id"])


def _feedback() -> None:
    op.create_table(
        "feedback",
        *_row_id("feedback"),
        sa.Column("client_id", sa.String(255), nullable=True),
        *_policy_of("feedback"),
        sa.Column("session_id", sa.String(128), nullable=False),
        sa.Column("completion_id", sa.String(300), nullable=True),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("final", sa.Boolean(), nullable=False),
        sa.Column("closes", sa.Boolean(), nullable=False),
        sa.Column("final_key", sa.String(128), nullable=True),
        sa.Column("key_id", sa.String(64), nullable=False),
        _json("comment", nullable=True),
        _json("metadata", nullable=True),
        sa.Column("event_id", sa.String(128), nullable=False),
        _time("at"),
        sa.UniqueConstraint("policy", "key_id", "client_id", name="uq_feedback_policy_key_id_client_id"),
        sa.UniqueConstraint("policy", "final_key", name="uq_feedback_policy_final_key"),
        sa.UniqueConstraint("event_id", name="uq_feedback_event_id"),
    )
    op.create_index("ix_feedback_policy_session_id", "feedback", ["policy", "session_id"])


def _outbox() -> None:
    op.create_table(
        "outbox",
        *_row_id("outbox"),
        sa.Column("event_id", sa.String(128), nullable=False),
        *_policy_of("outbox"),
        _time("at"),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.UniqueConstraint("event_id", name="uq_outbox_event_id"),
    )
    op.create_index("ix_outbox_policy_at", "outbox", ["policy", "at"])


def _access() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        _time("created_at"),
        _time("revoked_at", nullable=True),
        sa.Column("store_content", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.UniqueConstraint("sha256", name="uq_api_keys_sha256"),
    )
    op.create_table(
        "leases",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("holder", sa.Text(), nullable=True),
        sa.Column("token", sa.BigInteger(), nullable=False),
        _time("expires_at"),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )
    op.create_table(
        "audit",
        *_row_id("audit"),
        _time("at"),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("policy", sa.String(64), nullable=True),
        _json("detail"),
    )
    op.create_index("ix_audit_policy_id", "audit", ["policy", "id"])


def _completions() -> None:
    op.create_table(
        "completions",
        sa.Column("id", sa.String(300), nullable=False),
        *_policy_of("completions"),
        sa.Column("session_id", sa.String(128), nullable=False),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("position", sa.String(64), nullable=False),
        _time("at"),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("finish_reason", sa.String(32), nullable=False),
        sa.Column("trainable", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        _json("messages", nullable=True),
        _json("output", nullable=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("rollout_update", sa.Integer(), nullable=True),
        sa.Column("trained_version", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_completions"),
    )
    op.create_index("ix_completions_policy_session_id", "completions", ["policy", "session_id"])
    op.create_index("ix_completions_policy_rollout_update", "completions", ["policy", "rollout_update"])


def _updates() -> None:
    op.create_table(
        "updates",
        *_policy_of("updates"),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=True),
        _time("at"),
        _json("session_ids"),
        _json("metrics"),
        sa.PrimaryKeyConstraint("policy", "number", name="pk_updates"),
    )
