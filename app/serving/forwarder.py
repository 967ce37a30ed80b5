"""Forwards what waits in the spool to the log, once the log is back."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from anyio import to_thread

from app.events.log import EventRefused, EventSink, LogUnavailable
from app.events.schema import BadEvent, decode
from app.events.spool import Spool, Spooled
from app.telemetry.metrics import Metrics

POLL_S = 0.25
LONGEST_PAUSE_S = 15.0
STOP_S = 2.0

log = logging.getLogger(__name__)


class Forwarder:
    """One event at a time, oldest first, and each removed before the next: a crash repeats one event at most."""

    def __init__(self, spool: Spool, primary: EventSink, metrics: Metrics) -> None:
        self._spool = spool
        self._primary = primary
        self._metrics = metrics
        self._delivered = 0

    async def run(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Forward until cancelled; while the log is away it is tried ever more seldom, down to LONGEST_PAUSE_S."""
        pause = POLL_S
        while True:
            try:
                await self.drain()
                pause = POLL_S
            except LogUnavailable as error:
                pause = min(2 * pause, LONGEST_PAUSE_S)
                log.warning("the spool cannot be forwarded, next try in %.1f s: %s", pause, error)
            await sleep(pause)

    async def drain(self) -> None:
        """Forward all that waits, unless another process is at it; raises LogUnavailable."""
        with self._spool.forwarding() as ours:
            while ours and (oldest := await to_thread.run_sync(self._spool.oldest)):
                await self._uncut(self._forward(oldest))

    async def _uncut(self, forward: Awaitable[None]) -> None:
        """Let an event that is on its way arrive although the app stops; a log that hangs is not waited for."""
        task = asyncio.ensure_future(forward)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task}, timeout=STOP_S)
            task.cancel()
            raise

    async def _forward(self, spooled: Spooled) -> None:
        try:
            if spooled.id != self._delivered:  # else only its removal failed
                await self._primary.append(decode(spooled.payload))
        except (EventRefused, BadEvent) as error:
            log.error("an event in the spool is set aside: %s", error)
            await to_thread.run_sync(self._spool.set_aside, spooled.id, str(error))
            self._metrics.refused_events.inc()
            return
        self._delivered = spooled.id
        await to_thread.run_sync(self._spool.remove, spooled.id)
        self._metrics.forwarded_events.inc()
