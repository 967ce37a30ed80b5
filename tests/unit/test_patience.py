"""Waiting for a log that is away."""

import logging

import pytest

from app.events.log import LogUnavailable
from learner.patience import Patience


def answers(*outcomes: object) -> object:
    """A call that gives these in turn, and raises those that are errors."""
    left = list(outcomes)

    def call() -> object:
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return call


def test_calls_until_the_log_answers(caplog: pytest.LogCaptureFixture) -> None:
    """The outage is told once, with its reason, and so is its end."""
    slept: list[float] = []
    caplog.set_level(logging.INFO)
    patience = Patience(lambda: True, slept.append)
    away = LogUnavailable("no broker")
    assert patience(answers(away, away, away, 5)) == 5  # type: ignore[arg-type]
    assert len(slept) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "the log is away; waiting for it: no broker",
        "the log is back",
    ]


def test_stop_ends_the_wait() -> None:
    """What was asked to stop does not wait for a broker."""
    stops = iter([True, False])
    with pytest.raises(LogUnavailable):
        Patience(lambda: next(stops), lambda _: None)(answers(*[LogUnavailable("away")] * 9))  # type: ignore[arg-type]


def test_other_errors_are_not_waited_for() -> None:
    """Only a log that is away is."""
    with pytest.raises(ZeroDivisionError):
        Patience(lambda: True, lambda _: None)(answers(ZeroDivisionError()))  # type: ignore[arg-type]
