"""What a running app holds: built once at start, handed to the controllers."""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime

from anyio import to_thread

from app.engines.base import Engine
from app.errors import NotFound, RiachoError
from app.events.log import EventLog, LogUnavailable
from app.events.spool import Spool
from app.events.sqlite import SqliteLog
from app.registry import Registry
from app.security.auth import Authenticator
from app.security.receipts import Receipts
from app.security.secrets import signing_secret
from app.serving.capture import Capture
from app.serving.chat import ChatService
from app.serving.deployer import Deployer
from app.serving.feedback import FeedbackService
from app.serving.forwarder import Forwarder
from app.serving.operations import Operations
from app.serving.relay import Relay
from app.serving.versions import Versions
from app.settings import AppSettings
from app.telemetry.metrics import Metrics

log = logging.getLogger(__name__)


@dataclass
class Services:
    """The app's parts, wired."""

    settings: AppSettings
    engine: Engine
    events: EventLog
    spool: Spool | None
    registry: Registry
    metrics: Metrics
    authenticator: Authenticator
    receipts: Receipts
    versions: Versions
    deployer: Deployer
    relay: Relay
    capture: Capture
    chat: ChatService
    feedback: FeedbackService
    operations: Operations
    clock: Callable[[], datetime]
    started: int
    jobs: list[asyncio.Task[None]] = field(default_factory=list)

    @classmethod
    def build(
        cls,
        settings: AppSettings,
        engine: Engine,
        events: EventLog,
        registry: Registry,
        clock: Callable[[], datetime],
    ) -> "Services":
        policy = settings.policy
        metrics = Metrics()
        receipts = Receipts(signing_secret(settings.home))
        versions = Versions(engine, registry, policy, settings.resolved_adapter_store)
        embedded = isinstance(events, SqliteLog)  # it is as near as the spool would be
        spool = None if embedded else Spool(events, settings.spool_path, settings.spool_max_bytes)
        sink = events if spool is None else spool
        relay = Relay(registry, sink, metrics, policy, clock)
        capture = Capture(sink, receipts, metrics, settings.on_capture_failure)
        holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        return cls(
            settings=settings,
            engine=engine,
            events=events,
            spool=spool,
            registry=registry,
            metrics=metrics,
            authenticator=Authenticator(registry, settings.auth),
            receipts=receipts,
            versions=versions,
            deployer=Deployer(versions, registry, policy, holder, settings.deployer_lease_s, settings.keep_versions),
            relay=relay,
            capture=capture,
            chat=ChatService(engine, versions, capture),
            feedback=FeedbackService(registry, relay, receipts, policy, clock, bool(settings.scorers)),
            operations=Operations(registry, versions, relay, policy, clock),
            clock=clock,
            started=int(clock().timestamp()),
        )

    @asynccontextmanager
    async def background(self) -> AsyncIterator[None]:
        """Run the deployer, the relay and, where there is a spool, the forwarder while the block lasts."""
        self.jobs = [
            asyncio.create_task(self.deployer.run(self.settings.poll_s), name="deployer"),
            asyncio.create_task(self.relay.run(), name="relay"),
        ]
        if self.spool is not None:
            forwarder = Forwarder(self.spool, self.events, self.metrics)
            self.jobs.append(asyncio.create_task(forwarder.run(), name="forwarder"))
        try:
            yield
        finally:
            for job in self.jobs:
                job.cancel()
            await asyncio.gather(*self.jobs, return_exceptions=True)

    def require_policy(self, name: str) -> None:
        """Raises NotFound for a policy that this service does not serve."""
        if name != self.settings.policy:
            raise NotFound(f"policy {name!r} is not served here; this service has {self.settings.policy!r}")

    async def problems(self) -> list[str]:
        """Why requests should not be sent here now; empty when ready."""
        problems = [f"the {job.get_name()} stopped: {job.exception()}" for job in self.jobs if job.done()]
        if not await self.engine.healthy():
            out = "; ".join(f"{state.name}: {state.problem}" for state in self.engine.states())
            problems.append(f"the engine does not answer ({out})")
        live = self.versions.live
        if live and live not in self.engine.loaded():
            problems.append(f"{self.versions.name(live)} is not loaded")
        try:
            await asyncio.wait_for(to_thread.run_sync(self.registry.policies.get, self.settings.policy), 5)
        except (RiachoError, TimeoutError) as error:
            problems.append(f"the registry cannot be read: {error}")
        problems += await to_thread.run_sync(self._spool_problems)
        return problems

    def _spool_problems(self) -> list[str]:
        """A spool that takes nothing more; with fail_open answers go on, so requests may still be sent here."""
        if self.spool is None or self.settings.on_capture_failure == "fail_open":
            return []
        try:
            full = self.spool.full()
        except LogUnavailable as error:
            return [f"the spool cannot be used: {error}"]
        return ["the log is away and the spool is full (spool_max_bytes)"] if full else []

    def refresh_metrics(self) -> None:
        """Set the gauges that are looked up, not counted."""
        self.metrics.live_version.set(self.versions.live)
        self.metrics.leases.set(self.versions.leases)
        self.metrics.loaded_versions.set(len(self.engine.loaded()))
        for update in self.registry.projections.updates(self.settings.policy, 1):
            self.metrics.show_update(update.number, update.metrics)
        for state, count in self.registry.projections.held(self.settings.policy).items():
            self.metrics.held.labels(state).set(count)
        try:
            waiting = self._refresh_spool_metrics()
            if not waiting:  # else the log is away, and asking would hold up whoever wants the metrics
                self._refresh_log_metrics()
        except LogUnavailable as error:
            log.warning("the log's metrics are those of before: %s", error)

    def _refresh_spool_metrics(self) -> int:
        """The number of events that wait."""
        if self.spool is None:
            return 0
        size = self.spool.size()
        self.metrics.spool_events.set(size.events)
        self.metrics.spool_bytes.set(size.bytes)
        return size.events

    def _refresh_log_metrics(self) -> None:
        ends = self.events.end_positions()
        self.metrics.log_end.set(sum(ends.values()))
        self.metrics.learner_lag.set(self.registry.versions.lag(self.settings.policy, ends))
