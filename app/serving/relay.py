"""Carries promised events from the registry's outbox to the log."""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from anyio import to_thread

from app.events.log import EventRefused, EventSink, LogUnavailable
from app.events.schema import Event
from app.registry import Registry
from app.registry.errors import RegistryUnavailable
from app.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

GRACE = timedelta(seconds=2)
BATCH = 100


class Relay:
    """A row and its event agree after any crash: the row is promised, the event appended, the promise marked.

    Whoever makes a promise appends its event at once; `run` appends what a crash or a failed append left.
    """

    def __init__(
        self, registry: Registry, events: EventSink, metrics: Metrics, policy: str, clock: Callable[[], datetime]
    ) -> None:
        self._outbox = registry.outbox
        self._log = events
        self._metrics = metrics
        self._policy = policy
        self._clock = clock

    async def deliver(self, event: Event) -> None:
        """Append one promised event; if the log or the registry is away it stays promised and is appended later.

        One that the log will never take is lost, and counted: its promise must not be tried for ever.
        """
        try:
            await self._log.append(event)
        except LogUnavailable as error:
            log.warning("event %s waits in the outbox: %s", event.event_id, error)
            return
        except EventRefused as error:
            self._metrics.lost_events.inc()
            self._metrics.refused_events.inc()
            log.error("event %s is dropped: %s", event.event_id, error)
        try:
            await to_thread.run_sync(self._outbox.mark_appended, event.event_id)
        except RegistryUnavailable as error:
            log.warning("event %s is on the log and will be appended once more: %s", event.event_id, error)

    async def run(self, poll_s: float = 1.0) -> None:
        """Deliver promises older than the grace that their own request has, until cancelled."""
        while True:
            try:
                await self._deliver_left()
            except RegistryUnavailable as error:
                log.warning("the outbox cannot be read: %s", error)
            await asyncio.sleep(poll_s)

    async def _deliver_left(self) -> None:
        pending = await to_thread.run_sync(self._outbox.pending, self._policy, self._clock() - GRACE, BATCH)
        for record in pending:
            await self.deliver(record.event)
