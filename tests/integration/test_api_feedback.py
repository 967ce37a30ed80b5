"""Feedback through the front door: each judgement counts once, for the right completion, or is refused clearly."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from app.events.schema import FeedbackEvent
from tests.service import Service, error_of, service_fixture

service = service_fixture()


@pytest.fixture(scope="module")
def other(service: Service) -> Iterator[httpx.Client]:
    """Somebody else: a second client key."""
    service.add_client("other-client-key")
    with service.http("other-client-key") as http:
        yield http


@pytest.fixture
def id(service: Service) -> str:
    """A fresh completion of the client's."""
    id: str = service.ask(max_tokens=2)["id"]
    return id


def feedback_events(service: Service, completion_id: str) -> list[FeedbackEvent]:
    events = [event for event in service.events() if isinstance(event, FeedbackEvent)]
    return [event for event in events if event.completion_id == completion_id]


def test_reward_reaches_the_log(service: Service, id: str) -> None:
    """An accepted reward is one event in the completion's session, with comment and metadata."""
    answer = service.judge(completion_id=id, reward=0.25, comment="so so", metadata={"page": 3})
    assert answer.status_code == httpx.codes.OK, answer.text
    assert answer.json() | {"id": ""} == {
        "object": "feedback",
        "id": "",
        "completion_id": id,
        "session_id": None,
        "signal": "reward",
        "reward": 0.25,
        "final": True,
    }
    [event] = feedback_events(service, id)
    assert (event.reward, event.final, event.comment, event.metadata) == (0.25, True, "so so", {"page": 3})
    assert event.session_id == service.recorded(id).session_id


@pytest.mark.parametrize(("thumb", "reward"), [("up", 1.0), ("down", 0.0)])
def test_thumbs_are_the_ends_of_the_range(service: Service, id: str, thumb: str, reward: float) -> None:
    """A thumb up is the largest reward, a thumb down the smallest."""
    assert service.judge(completion_id=id, thumb=thumb).json()["reward"] == reward
    assert [event.reward for event in feedback_events(service, id)] == [reward]


@pytest.mark.parametrize("reward", [0, 1, 0.0, 1.0])
def test_ends_of_the_range_are_inside(service: Service, id: str, reward: float) -> None:
    """0 and 1 are rewards, as whole numbers too."""
    assert service.judge(completion_id=id, reward=reward).status_code == httpx.codes.OK


@pytest.mark.parametrize(
    "value",
    [
        {"reward": 1.01},
        {"reward": -0.01},
        {"reward": 1e300},
        {"reward": True},
        {"reward": False},
        {"reward": "1"},
        {"reward": "up"},
        {"reward": None},
        {"reward": [1]},
        {"thumb": "sideways"},
        {"thumb": True},
        {"reward": 1, "thumb": "up"},
        {},
        {"reward": 1, "final": "yes"},
        {"reward": 1, "final": 1},
        {"reward": 1, "id": ""},
        {"reward": 1, "id": 5},
        {"reward": 1, "id": "x" * 129},
        {"reward": 1, "comment": "x" * 5000},
        {"reward": 1, "metadata": []},
        {"reward": 1, "score": 1},
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_judgement_is_refused(service: Service, id: str, value: dict[str, Any]) -> None:
    """A reward that is no number inside the range, two values or none: 400, and nothing is stored."""
    error = error_of(service.judge(completion_id=id, **value), 400)
    assert error["type"] == "invalid_request_error"
    assert feedback_events(service, id) == []


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(service: Service, id: str, literal: str) -> None:
    """NaN and the infinities never become a reward."""
    body = f'{{"completion_id": "{id}", "reward": {literal}}}'
    response = service.client.post("/v1/feedback", content=body, headers={"content-type": "application/json"})
    error_of(response, 400)
    assert feedback_events(service, id) == []


def test_range_is_in_the_message(service: Service, id: str) -> None:
    """An out-of-range reward is told the range."""
    error = error_of(service.judge(completion_id=id, reward=5), 400)
    assert error["param"] == "reward"
    assert "0 to 1" in error["message"]


@pytest.mark.parametrize("target", [{}, {"completion_id": "", "session_id": "s"}, {"completion_id": None}], ids=str)
def test_one_target_is_needed(service: Service, target: dict[str, Any]) -> None:
    """Neither or both of completion_id and session_id: 400 that says to give one."""
    error = error_of(service.judge(reward=1, **target), 400)
    assert "completion_id" in error["message"]
    assert "session_id" in error["message"]


def forged(id: str) -> dict[str, str]:
    """Ids that this service never gave out."""
    head, mac = id.split(".")
    middle = len(head) // 2
    return {
        "empty": "",
        "not ours": "chatcmpl-123",
        "no prefix": id.removeprefix("chatcmpl-"),
        "payload changed": f"{head[:middle]}{'A' if head[middle] != 'A' else 'B'}{head[middle + 1 :]}.{mac}",
        "mac changed": f"{head}.{mac[:-1]}{'A' if mac[-1] != 'A' else 'B'}",
        "mac cut": f"{head}.{mac[:-4]}",
        "no mac": head,
        "space": f"{id} ",
        "not ascii": f"{id}\N{SNOWMAN}",
        "padding": f"{id}=",
    }


@pytest.mark.parametrize("how", forged("chatcmpl-abcdef.abcd"))
def test_forged_id_is_unknown(service: Service, id: str, how: str) -> None:
    """A completion id with any change is a 404 for feedback and for the record, not a bug."""
    other_id = forged(id)[how]
    error = error_of(service.judge(completion_id=other_id, reward=1), 404)
    assert error["param"] == "completion_id"
    if other_id:
        error_of(service.client.get(f"/v1/completions/{other_id}"), 404)


def test_somebody_elses_completion(service: Service, other: httpx.Client, id: str) -> None:
    """Another client can neither judge nor see a completion, and is not told more than that."""
    error = error_of(service.judge(other, completion_id=id, reward=1), 404)
    assert "key" in error["message"]
    error_of(other.get(f"/v1/completions/{id}"), 404)
    assert feedback_events(service, id) == []


def test_admin_judges_and_sees_any_completion(service: Service, id: str) -> None:
    """An admin key judges a client's completion in the client's session."""
    assert service.admin.get(f"/v1/completions/{id}").json()["state"] == "captured"
    assert service.judge(service.admin, completion_id=id, reward=1).status_code == httpx.codes.OK
    [event] = feedback_events(service, id)
    assert event.session_id == service.recorded(id).session_id


def test_record_waits_for_the_learner(service: Service, id: str) -> None:
    """Before a learner has read so far, a completion is `captured`."""
    record = service.client.get(f"/v1/completions/{id}").json()
    assert (record["id"], record["state"], record["object"]) == (id, "captured", "completion.record")


def test_answer_with_choices_is_judged_by_choice(service: Service) -> None:
    """The id of an answer with two choices is refused with what to send instead; a choice's is taken."""
    answer = service.ask(n=2, max_tokens=4)
    error = error_of(service.judge(completion_id=answer["id"], reward=1), 400)
    assert "choices[i].completion_id" in error["message"]
    assert "choices[i].completion_id" in error_of(service.client.get(f"/v1/completions/{answer['id']}"), 400)["message"]
    for choice, reward in zip(answer["choices"], (0.0, 1.0), strict=True):
        assert service.judge(completion_id=choice["completion_id"], reward=reward).status_code == httpx.codes.OK
    rewards = [feedback_events(service, choice["completion_id"])[0].reward for choice in answer["choices"]]
    assert rewards == [0.0, 1.0]


def test_retry_gets_the_same_answer(service: Service, id: str) -> None:
    """The same id with the same content again: the same answer and one event."""
    body: dict[str, Any] = {"completion_id": id, "reward": 1, "id": f"retry-{id[-8:]}", "metadata": {"a": 1, "b": 2}}
    first, again = service.judge(**body), service.judge(**body | {"metadata": {"b": 2, "a": 1}})
    assert first.status_code == again.status_code == httpx.codes.OK
    assert first.json() == again.json()
    assert first.json()["id"] == body["id"]
    assert len(feedback_events(service, id)) == 1


@pytest.mark.parametrize("change", [{"reward": 0}, {"final": False}, {"comment": "x"}], ids=str)
def test_reused_id_with_other_content_conflicts(service: Service, id: str, change: dict[str, Any]) -> None:
    """An idempotency key stands for one content; another is a 409, and not stored."""
    body: dict[str, Any] = {"completion_id": id, "reward": 1, "id": f"reused-{id[-8:]}"}
    assert service.judge(**body).status_code == httpx.codes.OK
    error = error_of(service.judge(**body | change), 409)
    assert error["param"] == "id"
    assert len(feedback_events(service, id)) == 1


def test_second_final_judgement_is_told_so(service: Service, id: str) -> None:
    """A rollout is judged finally once: then 409 `rollout_closed`, for thumbs and per-turn rewards too."""
    assert service.judge(completion_id=id, reward=1).status_code == httpx.codes.OK
    for body in ({"reward": 1}, {"thumb": "down"}, {"reward": 0, "final": False}):
        error = error_of(service.judge(completion_id=id, **body), 409)
        assert error["code"] == "rollout_closed"
        assert "closed" in error["message"]
    assert len(feedback_events(service, id)) == 1


def test_twenty_posts_at_once_are_one_event(service: Service, id: str) -> None:
    """The same click from 20 threads: everyone gets the same answer, the log gets one event."""
    body: dict[str, Any] = {"completion_id": id, "reward": 1, "id": f"click-{id[-8:]}"}
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: service.judge(**body), range(20)))
    assert [answer.status_code for answer in answers] == [200] * 20
    assert all(answer.json() == answers[0].json() for answer in answers)
    assert len(feedback_events(service, id)) == 1


def test_twenty_final_judgements_at_once_are_one(service: Service, id: str) -> None:
    """Of 20 different final judgements at once one is taken, the others hear that the rollout is closed."""
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda n: service.judge(completion_id=id, reward=n / 20), range(20)))
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 19
    assert len(feedback_events(service, id)) == 1


def test_judgements_are_counted_once(service: Service, id: str) -> None:
    """The counter of accepted judgements does not count a retry."""
    counter = 'riacho_feedback_total{final="true"}'
    before = service.metric(counter)
    for _ in range(3):
        service.judge(completion_id=id, reward=1, id=f"count-{id[-8:]}")
    assert service.metric(counter) == before + 1


@pytest.mark.parametrize("comment", ["", "a\x00b", "\N{SNOWMAN}\U0001f600", "<script>"], ids=repr)
def test_comment_comes_through_as_it_is(service: Service, id: str, comment: str) -> None:
    """Any text in a comment reaches the log unchanged."""
    assert service.judge(completion_id=id, reward=1, comment=comment).status_code == httpx.codes.OK
    assert feedback_events(service, id)[0].comment == comment


@pytest.mark.parametrize("metadata", [{"big": 2**70}, {"deep": [[[{"x": [None, 1.5]}]]]}, {"": ""}], ids=str)
def test_any_json_is_metadata(service: Service, id: str, metadata: dict[str, Any]) -> None:
    """Metadata is any JSON object, kept as it came, and its retry is recognised."""
    body: dict[str, Any] = {"completion_id": id, "reward": 1, "metadata": metadata, "id": f"meta-{id[-8:]}"}
    assert service.judge(**body).status_code == httpx.codes.OK
    assert service.judge(**body).status_code == httpx.codes.OK
    assert feedback_events(service, id)[0].metadata == metadata


def test_feedback_survives_a_kill(service: Service, id: str) -> None:
    """After SIGKILL and a restart the receipt still works, and what was accepted is still known."""
    body: dict[str, Any] = {"completion_id": id, "reward": 1, "id": f"kill-{id[-8:]}"}
    first = service.judge(**body)
    service.restart()
    assert service.judge(**body).json() == first.json()
    assert error_of(service.judge(completion_id=id, reward=0), 409)["code"] == "rollout_closed"
    assert len(feedback_events(service, id)) == 1
