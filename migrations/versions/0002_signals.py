"""Feedback names its signal; what came before is the signal `reward`."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("feedback") as table:
        table.add_column(sa.Column("signal", sa.String(32), nullable=False, server_default="reward"))


def downgrade() -> None:
    with op.batch_alter_table("feedback") as table:
        table.drop_column("signal")
