"""`GET /admin/engines`."""

from dataclasses import asdict
from typing import Any

from litestar import get

from app.api.errors import DOCUMENTED
from app.security.auth import admin_only
from app.services import Services


@get("/admin/engines", guards=[admin_only], tags=["admin"], responses=DOCUMENTED)
async def list_engines(services: Services) -> dict[str, Any]:
    """Every replica: whether it serves and else why not, its requests under way and the versions that it holds."""
    return {"engines": [asdict(state) for state in services.engine.states()]}
