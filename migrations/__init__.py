"""The schema of the registry, revision by revision (Alembic).

`app.registry.database.upgrade` runs them; a new one is written with the template `script.py.mako`.
"""
