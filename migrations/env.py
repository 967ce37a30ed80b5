"""What Alembic runs: the connection, already in a transaction, comes from `app.registry.database.upgrade`."""

from alembic import context

from app.registry.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite alters a table by copying it
)
context.run_migrations()
