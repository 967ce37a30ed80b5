"""`GET /v1/models`: the policy, its base and the versions in the engine."""

from typing import Any

from litestar import get

from app.api.errors import DOCUMENTED
from app.services import Services
from app.serving.versions import ModelNotFound


@get("/v1/models", tags=["serving"], responses=DOCUMENTED)
async def list_models(services: Services) -> dict[str, Any]:
    """The names that `model` takes. Older versions serve too while their files are kept."""
    return {"object": "list", "data": [_model(services, name) for name in _names(services)]}


@get("/v1/models/{name:str}", tags=["serving"], responses=DOCUMENTED)
async def get_model(name: str, services: Services) -> dict[str, Any]:
    """One of the listed models."""
    if name not in _names(services):
        raise ModelNotFound(f"model {name!r} is not served here; GET /v1/models lists those that are", param="model")
    return _model(services, name)


def _names(services: Services) -> list[str]:
    versions = services.versions
    loaded = sorted(services.engine.loaded(), reverse=True)
    return [services.settings.policy, versions.name(0), *(versions.name(version) for version in loaded)]


def _model(services: Services, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": services.started, "owned_by": "riacho"}
