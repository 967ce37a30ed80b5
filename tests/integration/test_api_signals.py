"""Named signals through the front door: which rewards clients may give, and what the log keeps of them."""

from typing import Any

import httpx
import pytest

from app.events.schema import FeedbackEvent, SessionClosedEvent
from tests.service import Service, error_of, service_fixture

service = service_fixture(
    RIACHO_REWARDS_STYLE_WEIGHT="0.5",
    RIACHO_REWARDS_TASK_WEIGHT="2",
    RIACHO_REWARDS_JUDGE_SCORER="judge",
)


def judgements(service: Service, completion_id: str) -> list[FeedbackEvent]:
    events = [event for event in service.events() if isinstance(event, FeedbackEvent)]
    return [event for event in events if event.completion_id == completion_id]


def test_several_signals_judge_one_turn(service: Service) -> None:
    """Each is an event of its own under its name, and the answer says which it was."""
    id = service.ask(max_tokens=2)["id"]
    for signal, reward, final in (("style", 0.25, False), ("task", 1.0, True)):
        answer = service.judge(completion_id=id, signal=signal, reward=reward, final=final)
        assert answer.status_code == httpx.codes.OK, answer.text
        assert answer.json()["signal"] == signal
    assert [(event.signal, event.reward) for event in judgements(service, id)] == [("style", 0.25), ("task", 1.0)]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"signal": "stile"}, ["'stile'", "not known", "style, task"]),
        ({}, ["'reward'", "not known", "style, task"]),
        ({"signal": "judge"}, ["'judge'", "reward function", "style, task"]),
    ],
    ids=["unknown", "default", "scored"],
)
def test_signals_that_clients_cannot_give_are_refused(service: Service, body: dict[str, Any], words: list[str]) -> None:
    """422 names the signal and those that this policy takes; nothing reaches the log."""
    id = service.ask(max_tokens=2)["id"]
    error = error_of(service.judge(completion_id=id, reward=1, **body), 422)
    assert (error["param"], error["code"]) == ("signal", "wrong_signal")
    for word in words:
        assert word in error["message"]
    assert judgements(service, id) == []


@pytest.mark.parametrize("signal", ["", "Style", "1st", "a-b", "s" * 33, 1, None])
def test_signal_has_the_form_of_a_name(service: Service, signal: Any) -> None:
    """Other names are wrong requests."""
    id = service.ask(max_tokens=2)["id"]
    assert "signal" in error_of(service.judge(completion_id=id, reward=1, signal=signal), 400)["message"]


def test_same_id_for_another_signal_conflicts(service: Service) -> None:
    """An idempotency key stands for one judgement of one signal; the same again is the same answer."""
    completion = service.ask(max_tokens=2)["id"]
    body = {"completion_id": completion, "reward": 1, "id": f"once-{completion}"[:128], "final": False}
    first = service.judge(signal="style", **body)
    assert service.judge(signal="style", **body).json() == first.json()
    error_of(service.judge(signal="task", **body), 409)
    assert len(judgements(service, completion)) == 1


def test_session_is_closed_without_feedback_where_it_will_be_scored(service: Service) -> None:
    """Reward functions judge it, so its end waits for no client."""
    service.ask(max_tokens=2, session="scored-later")
    answer = service.client.post("/v1/sessions/scored-later/close")
    assert answer.json() == {"object": "session", "id": "scored-later", "closed": True, "waits_for_feedback": False}
    assert [e for e in service.events() if isinstance(e, SessionClosedEvent) and "scored-later" in e.session_id]
