"""Liveness, readiness and metrics."""

from typing import Any

from anyio import to_thread
from litestar import Response, get

from app.services import Services


@get("/health/live", exclude_from_auth=True, tags=["health"])
async def live() -> dict[str, str]:
    """The process answers."""
    return {"status": "live"}


@get("/health/ready", exclude_from_auth=True, tags=["health"])
async def ready(services: Services) -> Response[dict[str, Any]]:
    """The engine answers, the live version is loaded and the registry can be read; else 503 with what is wrong."""
    problems = await services.problems()
    status = "ready" if not problems else "not ready"
    return Response({"status": status, "problems": problems}, status_code=503 if problems else 200)


@get("/metrics", media_type="text/plain", tags=["health"])
async def metrics(services: Services) -> bytes:
    """Prometheus metrics of this process, and the learner's newest update."""
    services.metrics.show_engines(services.engine.states())
    await to_thread.run_sync(services.refresh_metrics)
    return services.metrics.render()
