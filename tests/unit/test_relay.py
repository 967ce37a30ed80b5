"""The relay: what happens to promised events that the log cannot take, or never will."""

from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from app.registry import Registry, upgrade
from app.registry.records import NewFeedback
from app.serving.relay import Relay
from app.telemetry.metrics import Metrics
from tests.builders import feedback, moment
from tests.switchable import SwitchableLog


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    url = f"sqlite:///{tmp_path / 'registry.db'}"
    upgrade(url)
    with closing(Registry.open(url)) as opened:
        opened.policies.ensure("riacho", "model", "fingerprint", 0.0, 1.0)
        yield opened


def promise(registry: Registry, event_id: str) -> None:
    event = feedback("s", event_id)
    new = NewFeedback(
        id=None,
        policy="riacho",
        session_id="s",
        completion_id=None,
        reward=1.0,
        final=False,
        closes=False,
        key_id="k",
    )
    registry.feedback.record(new, event)


def waiting(registry: Registry) -> list[str]:
    far = registry.outbox.pending("riacho", moment(10**9), 10)
    return [record.event.event_id for record in far]


async def test_promise_waits_while_the_log_is_away(registry: Registry, tmp_path: Path) -> None:
    """What could not be delivered stays promised, and is delivered once the log is back."""
    with closing(SwitchableLog(tmp_path / "log.db")) as log:
        relay = Relay(registry, log, Metrics(), "riacho", lambda: moment(10**9) + timedelta(days=1))
        promise(registry, "a")
        log.mode = "away"
        await relay._deliver_left()
        assert waiting(registry) == ["a"]
        log.mode = "up"
        await relay._deliver_left()
        assert waiting(registry) == []
        assert log.event_ids() == ["a"]


async def test_event_that_the_log_never_takes_is_counted_and_let_go(registry: Registry, tmp_path: Path) -> None:
    """It is tried once, and neither it nor those behind it are held up."""
    metrics = Metrics()
    with closing(SwitchableLog(tmp_path / "log.db", lambda event: event.event_id == "large")) as log:
        relay = Relay(registry, log, metrics, "riacho", lambda: moment(10**9) + timedelta(days=1))
        promise(registry, "large")
        promise(registry, "b")
        for _ in range(3):
            await relay._deliver_left()
        assert log.event_ids() == ["b"]
        assert log.attempts == 2
    assert waiting(registry) == []
    for name in ("riacho_refused_events_total", "riacho_lost_events_total"):
        assert metrics.registry.get_sample_value(name) == 1
