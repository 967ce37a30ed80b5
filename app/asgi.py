"""create_app(settings): wiring only."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime

from anyio import to_thread
from litestar import Litestar
from litestar.datastructures import State
from litestar.di import Provide
from litestar.middleware import DefineMiddleware
from litestar.openapi import OpenAPIConfig
from litestar.plugins.pydantic import PydanticPlugin

from app.api.admin import AdminController
from app.api.chat import chat_completions
from app.api.engines import list_engines
from app.api.errors import HANDLERS
from app.api.feedback import close_session, get_completion, post_feedback
from app.api.health import live, metrics, ready
from app.api.models import get_model, list_models
from app.api.requests import RequestMetrics
from app.engines.base import Engine
from app.engines.open import open_engine
from app.events.open import open_log
from app.registry import Registry, utc_now
from app.security.auth import AuthMiddleware
from app.services import Services
from app.settings import AppSettings

Opener = Callable[[AppSettings], Engine]


def _services(state: State) -> Services:
    return state.services


def create_app(
    settings: AppSettings, *, engine: Opener = open_engine, clock: Callable[[], datetime] = utc_now
) -> Litestar:
    """The serving API. The engine starts, and the live version loads, before the first request is taken."""

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        registry = await to_thread.run_sync(Registry.open, settings.resolved_database_url)
        events = await to_thread.run_sync(open_log, settings)
        services = Services.build(settings, engine(settings), events, registry, clock)
        app.state.services = services
        await services.engine.start()
        await to_thread.run_sync(
            registry.policies.ensure,
            *(settings.policy, settings.model, services.engine.info.fingerprint),
            *(settings.reward_min, settings.reward_max),
        )
        await services.versions.follow()
        async with services.background():
            yield
        await services.capture.settle()
        await services.deployer.close()
        await services.engine.close()
        if services.spool is not None:
            services.spool.close()
        events.close()
        registry.close()

    return Litestar(
        route_handlers=[
            *(chat_completions, list_models, get_model),
            *(post_feedback, close_session, get_completion),
            *(AdminController, list_engines),
            *(live, ready, metrics),
        ],
        dependencies={"services": Provide(_services, sync_to_thread=False)},
        middleware=[RequestMetrics(), DefineMiddleware(AuthMiddleware)],
        exception_handlers=HANDLERS,
        lifespan=[lifespan],
        plugins=[PydanticPlugin(prefer_alias=True, validate_strict=True)],
        openapi_config=OpenAPIConfig(title="Riacho", version="1", path="/openapi"),
        request_max_body_size=settings.max_body_bytes,
        logging_config=None,
        debug=False,
    )
