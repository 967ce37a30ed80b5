"""Sessions: several completions, rewards on turns, one rollout."""

from typing import Any

import httpx
import pytest

from app.events.schema import FeedbackEvent, SessionClosedEvent
from tests.service import POLICY, Service, error_of, service_fixture

service = service_fixture()


def key_id(service: Service) -> str:
    return service.recorded(service.ask(max_tokens=2)["id"]).key_id


def close(service: Service, name: str, http: httpx.Client | None = None) -> httpx.Response:
    return (http or service.client).post(f"/v1/sessions/{name}/close")


def session_events(service: Service, session_id: str) -> list[Any]:
    return [event for event in service.events() if event.session_id == session_id]


@pytest.mark.parametrize("name", ["s", "agent-run.7_b", "x" * 64], ids=len)
def test_turns_of_a_session_share_it(service: Service, name: str) -> None:
    """The header puts completions into one session; the events say which."""
    ids = [service.ask(session=name, max_tokens=4)["id"] for _ in range(2)]
    sessions = {service.recorded(id).session_id for id in ids}
    assert len(set(ids)) == 2
    assert sessions == {f"{key_id(service)}:{name}"}


def test_metadata_names_a_session_too(service: Service) -> None:
    """metadata.session_id does what the header does; the header wins."""
    by_metadata = service.ask(metadata={"session_id": "by-metadata"}, max_tokens=4)
    both = service.ask(metadata={"session_id": "by-metadata"}, session="by-header", max_tokens=4)
    assert service.recorded(by_metadata["id"]).session_id.endswith(":by-metadata")
    assert service.recorded(both["id"]).session_id.endswith(":by-header")


def test_completion_without_a_session_is_its_own(service: Service) -> None:
    """Two completions without a name are two sessions."""
    events = [service.recorded(service.ask(max_tokens=4)["id"]) for _ in range(2)]
    assert events[0].session_id != events[1].session_id


@pytest.mark.parametrize("name", ["", "a b", "a:b", "x" * 65, "a/b", "s\N{LATIN SMALL LETTER E WITH ACUTE}", "a\tb"])
@pytest.mark.parametrize("where", ["header", "metadata", "feedback"])
def test_bad_session_name_is_refused(service: Service, name: str, where: str) -> None:
    """A name with other characters or too long is a 400 that says what is allowed, wherever it is given."""
    if where == "header":
        headers = {"X-Riacho-Session": name.encode("latin-1")}
        body = {"model": POLICY, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        response = service.client.post("/v1/chat/completions", json=body, headers=headers)
    elif where == "metadata":
        response = service.post_chat(metadata={"session_id": name}, max_tokens=2)
    else:
        response = service.judge(session_id=name, reward=1)
    assert "letters" in error_of(response, 400)["message"]


def test_session_with_choices_is_refused(service: Service) -> None:
    """A session is one trajectory: n = 2 in it is a 400 on n."""
    assert error_of(service.post_chat(n=2, session="branches"), 400)["param"] == "n"


@pytest.mark.parametrize("owner", ["x" * 60, "x" * 200, "x" * 5000], ids=len)
def test_admins_long_session_is_no_bug(service: Service, owner: str) -> None:
    """An admin's internal session name is taken or refused, however long."""
    name = f"{owner}:s"
    answers = [
        close(service, name, service.admin),
        service.judge(service.admin, session_id=name, reward=1),
        service.post_chat(session=name, max_tokens=2, http=service.admin),
    ]
    assert all(answer.status_code in (200, 400, 409) for answer in answers), [answer.text for answer in answers]


def test_rewards_on_turns_and_then_the_final_one(service: Service) -> None:
    """final = false judges a turn and leaves the session open; the final reward on the session ends it."""
    ids = [service.ask(session="turns", max_tokens=4)["id"] for _ in range(2)]
    for id, reward in zip(ids, (0.25, 0.5), strict=True):
        assert service.judge(completion_id=id, reward=reward, final=False).status_code == httpx.codes.OK
    assert service.judge(session_id="turns", reward=1).status_code == httpx.codes.OK
    for body in ({"session_id": "turns"}, {"completion_id": ids[0]}, {"completion_id": ids[0], "final": False}):
        assert error_of(service.judge(reward=0, **body), 409)["code"] == "rollout_closed"
    events = session_events(service, service.recorded(ids[0]).session_id)
    judged = [(e.completion_id, e.reward, e.final) for e in events if isinstance(e, FeedbackEvent)]
    assert judged == [(ids[0], 0.25, False), (ids[1], 0.5, False), (None, 1.0, True)]


def test_close_with_rewards_ends_the_rollout(service: Service) -> None:
    """With a reward there, close is the end: one event, and no more feedback."""
    id = service.ask(session="closed", max_tokens=4)["id"]
    service.judge(completion_id=id, reward=0.5, final=False)
    answer = close(service, "closed")
    assert answer.status_code == httpx.codes.OK
    assert answer.json() == {"object": "session", "id": "closed", "closed": True, "waits_for_feedback": False}
    assert error_of(service.judge(session_id="closed", reward=1), 409)["code"] == "rollout_closed"
    ends = session_events(service, service.recorded(id).session_id)
    assert [isinstance(event, SessionClosedEvent) for event in ends].count(True) == 1


def test_close_without_rewards_waits(service: Service) -> None:
    """Absence is never 0: a close without a reward waits, and the final judgement still counts."""
    id = service.ask(session="waiting", max_tokens=4)["id"]
    answer = close(service, "waiting")
    assert answer.status_code == httpx.codes.OK
    assert answer.json()["waits_for_feedback"] is True
    assert service.judge(session_id="waiting", reward=1).status_code == httpx.codes.OK
    rewards = [e.reward for e in session_events(service, service.recorded(id).session_id) if e.type == "feedback"]
    assert rewards == [1.0]


def test_sessions_belong_to_a_key(service: Service) -> None:
    """The same name under another key is another session: nobody ends somebody else's."""
    service.add_client("other-client-key")
    with service.http("other-client-key") as other:
        mine = service.recorded(service.ask(session="shared", max_tokens=4)["id"])
        theirs = service.recorded(service.ask(session="shared", max_tokens=4, http=other)["id"])
        assert mine.session_id != theirs.session_id
        assert service.judge(other, session_id="shared", reward=0).status_code == httpx.codes.OK
    assert service.judge(session_id="shared", reward=1).status_code == httpx.codes.OK


def test_client_cannot_name_somebody_elses_session(service: Service) -> None:
    """The internal form `KEY:NAME` is for admins alone."""
    id = service.ask(session="mine", max_tokens=4)["id"]
    internal = service.recorded(id).session_id
    service.add_client("third-client-key")
    with service.http("third-client-key") as third:
        error_of(service.judge(third, session_id=internal, reward=0), 400)
        error_of(close(service, internal, third), 400)
    assert service.judge(service.admin, session_id=internal, reward=1).status_code == httpx.codes.OK
    rewards = [e.reward for e in session_events(service, internal) if e.type == "feedback"]
    assert rewards == [1.0]
