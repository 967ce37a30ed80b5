"""Feedback names its signal (what came before is `reward`), and completions held for scores are counted fast."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("feedback") as table:
        table.add_column(sa.Column("signal", sa.String(32), nullable=False, server_default="reward"))
    held = sa.text("state IN ('scoring', 'parked')")
    op.create_index("ix_completions_held", "completions", ["policy", "state"], sqlite_where=held, postgresql_where=held)


def downgrade() -> None:
    op.drop_index("ix_completions_held", "completions")
    with op.batch_alter_table("feedback") as table:
        table.drop_column("signal")
