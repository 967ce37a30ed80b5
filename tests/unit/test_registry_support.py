"""What the registry's tests share: a registry on each database, a clock that stands still, and builders."""

from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from app.events.schema import FeedbackEvent, RollbackEvent
from app.registry import Registry
from app.registry.records import Lease, NewFeedback, NewVersion, VersionRecord

START = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now

    def tick(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(database_url: str, clock: Clock) -> Iterator[Registry]:
    """A registry with the policy `p`."""
    with closing(Registry.open(database_url, clock=clock)) as registry:
        registry.policies.ensure("p", "tiny", "f1", -1.0, 1.0)
        yield registry


@pytest.fixture
def lease(registry: Registry) -> Lease:
    lease = registry.leases.acquire("learner:p", "one", 3600)
    assert lease is not None
    return lease


def new_version(number: int, **changes: Any) -> NewVersion:
    values: dict[str, Any] = {
        "policy": "p",
        "number": number,
        "parent": number - 1,
        "epoch": 0,
        "update_count": number * 10,
        "sha256": f"{number:064x}",
        "path": f"p/{number}",
        "position": {"0": number},
        "metrics": {"kl": 0.25},
        "settings": {"lr": 1e-4},
    }
    return NewVersion(**(values | changes))


def publish(registry: Registry, lease: Lease, number: int, epoch: int = 0) -> VersionRecord:
    """Add a version and make it live."""
    registry.versions.add(new_version(number, epoch=epoch), lease)
    assert registry.versions.make_live("p", number, "deployer", "loaded", epoch) is not None
    return registry.versions.get("p", number)


def new_feedback(id: str | None = "k1", **changes: Any) -> NewFeedback:
    values: dict[str, Any] = {
        "id": id,
        "policy": "p",
        "session_id": "s",
        "completion_id": None,
        "reward": 1.0,
        "final": True,
        "closes": False,
        "key_id": "key",
    }
    return NewFeedback(**(values | changes))


def feedback_event(new: NewFeedback) -> FeedbackEvent:
    return FeedbackEvent(
        policy=new.policy, session_id=new.session_id, at=START, reward=new.reward or 0.0, key_id=new.key_id
    )


def rollback_event(to: int) -> Callable[[int], RollbackEvent]:
    return lambda epoch: RollbackEvent(policy="p", session_id="rollback", at=START, to=to, epoch=epoch, reason="worse")
