"""Counts requests and their duration, by route pattern."""

import time

from litestar.enums import ScopeType
from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from app.telemetry.metrics import Metrics


class RequestMetrics(ASGIMiddleware):
    """The outermost middleware: it sees refused requests too."""

    scopes = (ScopeType.HTTP,)

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        metrics: Metrics = scope["litestar_app"].state.services.metrics
        route = scope.get("path_template") or "unknown"
        started = time.perf_counter()
        status = 500

        async def observe(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await next_app(scope, receive, observe)
        finally:
            metrics.requests.labels(str(scope.get("method")), route, str(status)).inc()
            metrics.request_seconds.labels(route).observe(time.perf_counter() - started)
