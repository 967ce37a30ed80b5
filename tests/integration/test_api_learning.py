"""What clients and operators see of learning, through the front door of `riacho up`."""

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest

from app.events.log import Position, Record
from app.events.schema import CompletionEvent, FeedbackEvent, Sampling, Usage, encode
from tests.service import POLICY, Service, error_of, eventually, riacho, service_fixture

service = service_fixture("up")

ADMIN = f"/admin/policies/{POLICY}"
BAD_ROLLBACKS: list[dict[str, Any]] = [
    {},
    {"to": 0},
    {"reason": "no target"},
    {"to": -1, "reason": "x"},
    {"to": 2**40, "reason": "x"},
    {"to": 1.5, "reason": "x"},
    {"to": True, "reason": "x"},
    {"to": "0", "reason": "x"},
    {"to": "newest", "reason": "x"},
    {"to": 0, "reason": ""},
    {"to": 0, "reason": 5},
    {"to": 0, "reason": "x", "force": True},
]


def record(service: Service, id: str) -> dict[str, Any]:
    answer = service.client.get(f"/v1/completions/{id}")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def wait_for_state(service: Service, id: str, state: str) -> dict[str, Any]:
    eventually(lambda: record(service, id)["state"] == state, f"{id} is {state}")
    return record(service, id)


def learn(service: Service, reward: float = 1.0) -> dict[str, Any]:
    """One judged completion, trained on and published; its record."""
    id = service.ask(max_tokens=8)["id"]
    assert service.judge(completion_id=id, reward=reward).status_code == 200
    eventually(lambda: record(service, id).get("trained_version"), "a version with the rollout")
    return record(service, id)


def deploy(service: Service) -> int:
    """Learn something, wait until it serves; the version."""
    number: int = learn(service)["trained_version"]
    eventually(lambda: service.policy()["live_version"] >= number, f"version {number} is live")
    return number


def test_completion_is_captured_waits_and_is_trained_on(service: Service) -> None:
    """A record goes from waiting to trained, and names the update and the version that have it."""
    answer = service.ask(max_tokens=8)
    waiting = wait_for_state(service, answer["id"], "waiting")
    assert waiting["rollout_update"] is None
    assert waiting["output"] == answer["choices"][0]["message"]["content"]
    assert waiting["completion_tokens"] == answer["usage"]["completion_tokens"]
    service.judge(completion_id=answer["id"], reward=1)
    trained = wait_for_state(service, answer["id"], "trained")
    update = next(row for row in service.updates() if row["number"] == trained["rollout_update"])
    assert update["session_ids"] == [trained["session_id"]]
    assert update["metrics"]["reward"] == 1.0
    eventually(lambda: record(service, answer["id"])["trained_version"] is not None, "the version that has it")


def test_new_version_serves(service: Service) -> None:
    """After learning, answers come from the new version, which header, body and models list name."""
    number = deploy(service)
    answer = service.post_chat()
    served = int(answer.json()["model"].removeprefix(f"{POLICY}@"))
    assert served >= number
    assert answer.headers["x-riacho-version"] == answer.json()["model"]
    assert service.recorded(answer.json()["id"]).version == served
    assert answer.json()["model"] in {model.id for model in service.openai().models.list()}


def test_versions_can_be_pinned_by_name(service: Service) -> None:
    """`riacho@N` and `riacho@base` still answer, and differ: each from its own version."""
    number = deploy(service)
    greedy: dict[str, Any] = {"temperature": 0, "logprobs": True}
    base = service.ask(model=f"{POLICY}@base", **greedy)
    pinned = service.ask(model=f"{POLICY}@{number}", **greedy)
    assert (base["model"], pinned["model"]) == (f"{POLICY}@base", f"{POLICY}@{number}")
    logprobs = [[t["logprob"] for t in answer["choices"][0]["logprobs"]["content"]] for answer in (base, pinned)]
    assert logprobs[0] != logprobs[1]


def test_agent_session_is_one_rollout(service: Service) -> None:
    """Turns judged one by one and then as a whole are trained on in one update."""
    ids = [service.ask(session="agent", max_tokens=6)["id"] for _ in range(2)]
    assert service.judge(completion_id=ids[0], reward=0.5, final=False).status_code == 200
    assert record(service, ids[0])["state"] in ("captured", "waiting")
    assert service.judge(session_id="agent", reward=1).status_code == 200
    records = [wait_for_state(service, id, "trained") for id in ids]
    assert records[0]["rollout_update"] == records[1]["rollout_update"]


def test_close_completes_a_session_with_rewards(service: Service) -> None:
    """Per-turn rewards and then a close: trained on."""
    id = service.ask(session="closed", max_tokens=6)["id"]
    assert service.judge(completion_id=id, reward=1, final=False).status_code == 200
    assert service.client.post("/v1/sessions/closed/close").json()["waits_for_feedback"] is False
    wait_for_state(service, id, "trained")


def test_unstored_completion_is_not_trained_on(service: Service) -> None:
    """store = false: the record says why, and has no content."""
    id = service.ask(store=False)["id"]
    seen = wait_for_state(service, id, "not_trainable")
    assert "store" in seen["reason"]
    assert (seen["messages"], seen["output"]) == (None, None)


def test_greedy_completion_is_not_trained_on(service: Service) -> None:
    """A judged completion that cannot be trained on is dropped, never guessed at."""
    id = service.ask(temperature=0)["id"]
    before = len(service.updates())
    assert service.judge(completion_id=id, reward=1).status_code == 200
    learn(service)
    assert record(service, id)["state"] == "not_trainable"
    assert len(service.updates()) == before + 1


def test_pause_keeps_feedback_and_resume_trains_on_it(service: Service) -> None:
    """Paused: feedback is taken and no update follows; resumed: it is trained on, nothing is lost."""
    learn(service)
    paused = service.admin.post(f"{ADMIN}/pause")
    assert paused.json()["learning_paused"] is True
    id = service.ask(max_tokens=8)["id"]
    before = service.updates()[0]["number"]
    assert service.judge(completion_id=id, reward=1).status_code == 200
    for _ in range(30):
        assert record(service, id)["state"] in ("captured", "waiting")
    assert service.updates()[0]["number"] == before
    assert service.admin.post(f"{ADMIN}/resume").json()["learning_paused"] is False
    wait_for_state(service, id, "trained")


def completion_event(**changes: Any) -> CompletionEvent:
    values: dict[str, Any] = {
        "policy": POLICY,
        "session_id": "poison",
        "at": datetime(2026, 1, 1, tzinfo=UTC),
        "completion_id": "poison",
        "version": 0,
        "prompt_ids": (1, 2),
        "completion_ids": (3,),
        "logprobs": (-0.5,),
        "sampling": Sampling(temperature=1.0, max_tokens=1),
        "finish_reason": "stop",
        "trainable": True,
        "usage": Usage(prompt_tokens=2, completion_tokens=1),
        "key_id": "k",
    }
    return CompletionEvent(**values | changes)


def edited(**changes: Any) -> bytes:
    return json.dumps(json.loads(encode(completion_event())) | changes).encode()


POISON: dict[str, tuple[bytes, str]] = {
    "no json": (b"\xff\x00 not an event", "JSON"),
    "empty": (b"", "JSON"),
    "unknown type": (edited(type="telepathy"), "telepathy"),
    "unknown version": (edited(schema_version=2), "schema_version"),
    "counts differ": (edited(logprobs=""), "logprobs"),
    "another policy": (edited(policy="stranger"), "stranger"),
    "outside the vocabulary": (encode(completion_event(completion_ids=(2**30,))), "vocabulary"),
    "no reward": (
        encode(FeedbackEvent(policy=POLICY, session_id="s", at=datetime.now(UTC), reward=1, key_id="k")).replace(
            b'"reward":1.0', b'"reward":true'
        ),
        "reward",
    ),
}


def letters(service: Service) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = service.admin.get(f"{ADMIN}/dead-letters").json()["dead_letters"]
    return found


def letter_url(letter: dict[str, Any], *action: str) -> str:
    return "/".join((f"{ADMIN}/dead-letters", str(letter["id"]), *action))


def poison(service: Service, payload: bytes) -> dict[str, Any]:
    """Put a bad record on the log; the dead letter that it becomes."""
    with closing(service.log()) as log:
        position = str(log.append_raw("poison", payload))
    eventually(lambda: position in {letter["position"] for letter in letters(service)}, "a dead letter")
    return next(letter for letter in letters(service) if letter["position"] == position)


@pytest.mark.parametrize("name", POISON)
def test_poison_is_a_dead_letter_with_the_reason(service: Service, name: str) -> None:
    """A record that is no event of this policy is set aside, as it came, with the reason."""
    payload, reason = POISON[name]
    letter = poison(service, payload)
    assert reason.lower() in letter["reason"].lower()
    assert letter["attempts"] == 1
    assert letter["bytes"] == len(payload)
    shown = service.admin.get(letter_url(letter)).json()
    assert {name: shown[name] for name in letter} == letter
    decode = base64.b64decode if shown["payload_encoding"] == "base64" else str.encode
    assert decode(shown["payload"]) == payload
    assert shown["payload_encoding"] == ("base64" if b"\xff" in payload else "utf-8")


def test_learning_goes_on_behind_poison(service: Service) -> None:
    """Good rollouts before and behind a bad record are trained on."""
    poison(service, b"rubbish")
    learn(service)


def test_dead_letter_can_be_replayed(service: Service) -> None:
    """Replay puts the record on the log again; one that is still bad comes back, the former letter is gone."""
    letter = poison(service, b"still rubbish")
    answer = service.admin.post(letter_url(letter, "replay"))
    assert answer.status_code == 200
    position = answer.json()["position"]
    assert position != letter["position"]
    eventually(lambda: position in {item["position"] for item in letters(service)}, "the letter is back")
    assert letter["id"] not in {item["id"] for item in letters(service)}
    listed = riacho(service.home, "log", "dead", "--json")
    assert position in {json.loads(line)["position"] for line in listed.stdout.splitlines()}
    error_of(service.admin.post(letter_url(letter, "replay")), 404)
    assert audited(service)[0] == ("replay_dead_letter", {"id": letter["id"], "position": position})


def audited(service: Service) -> list[tuple[str, dict[str, Any]]]:
    """What keys did, newest first."""
    with closing(service.registry()) as registry:
        entries = registry.audit.list(100, POLICY)
    return [(entry.action, entry.detail) for entry in entries if entry.actor.startswith("key:")]


def test_replay_at_the_same_time_succeeds_once(service: Service) -> None:
    """Of many replays of one letter one puts it on the log, and the others hear that it is gone."""
    letter = poison(service, b"once more")
    before = len(service.log().read({}, 1_000_000))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: service.admin.post(letter_url(letter, "replay")), range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] + [404] * 7
    assert len(service.log().read({}, 1_000_000)) == before + 1


def test_replayed_letter_that_is_good_now_trains_once(service: Service) -> None:
    """A completion that no learner could read, replayed, joins the judgement that waits for it, in one update."""
    event = completion_event(
        session_id="revived",
        at=datetime.now(UTC),
        completion_id="revived",
        completion_ids=(3, 4),
        logprobs=(-0.5, -0.5),
    )
    judgement = FeedbackEvent(policy=POLICY, session_id="revived", at=event.at, reward=1.0, key_id="k")
    with closing(service.log()) as log:
        log.append_raw("revived", encode(judgement))
        log.bury(Record(Position(0, 10**6), encode(event)), "another release wrote it", event.at)
        [letter] = [letter for letter in letters(service) if letter["position"] == f"0:{10**6}"]
        assert service.admin.post(letter_url(letter, "replay")).status_code == 200
        eventually(lambda: trained_on(service, "revived"), "the revived session is trained on")
        log.append_raw("revived", encode(event))
    learn(service)
    assert len(trained_on(service, "revived")) == 1


def trained_on(service: Service, session: str) -> list[int]:
    """The updates that used a session."""
    return [row["number"] for row in service.updates() if session in row["session_ids"]]


def test_dead_letter_can_be_dropped(service: Service) -> None:
    """It is gone from the list, cannot be had or replayed, and who dropped it is on record."""
    letter = poison(service, b"away with it")
    assert service.admin.delete(letter_url(letter)).status_code == 204
    assert letter["id"] not in {item["id"] for item in letters(service)}
    error_of(service.admin.get(letter_url(letter)), 404)
    error_of(service.admin.delete(letter_url(letter)), 404)
    error_of(service.admin.post(letter_url(letter, "replay")), 404)
    assert audited(service)[0] == ("drop_dead_letter", {"id": letter["id"]})


def test_dead_letters_come_newest_first_page_by_page(service: Service) -> None:
    """`before` goes on where a page ended."""
    poison(service, b"older")
    poison(service, b"newer")
    ids = [letter["id"] for letter in letters(service)]
    assert ids == sorted(ids, reverse=True)
    page = service.admin.get(f"{ADMIN}/dead-letters", params={"limit": 1, "before": ids[0]}).json()["dead_letters"]
    assert [letter["id"] for letter in page] == [ids[1]]


def test_dead_letters_are_for_admins_only(service: Service) -> None:
    """A client's key reads, replays and drops none: they hold what other clients said."""
    letter = poison(service, b"private")
    for method, url in (
        ("GET", f"{ADMIN}/dead-letters"),
        ("GET", letter_url(letter)),
        ("POST", letter_url(letter, "replay")),
        ("DELETE", letter_url(letter)),
    ):
        error_of(service.client.request(method, url), 403)
        error_of(service.anonymous.request(method, url), 401)
    assert letter in letters(service)


def test_versions_show_lineage_and_metrics(service: Service) -> None:
    """Each version names its parent, epoch, update, hash, metrics and settings; newest first, page by page."""
    newest = deploy(service)
    rows = service.admin.get(f"{ADMIN}/versions").json()["versions"]
    numbers = [row["number"] for row in rows]
    assert numbers == sorted(numbers, reverse=True)
    assert newest in numbers
    for row in rows:
        assert row["parent"] < row["number"]
        assert len(row["sha256"]) == 64
        assert "kl_to_base" in row["metrics"]
        assert row["settings"]["eps_high"] == 5.0
    assert service.admin.get(f"{ADMIN}/versions/{newest}").json()["number"] == newest
    page = service.admin.get(f"{ADMIN}/versions", params={"limit": 1, "before": newest}).json()["versions"]
    assert [row["number"] for row in page] == [n for n in numbers if n < newest][:1]


def test_version_can_be_pinned_and_let_go(service: Service) -> None:
    """A pin keeps a version's files; what is no pin is refused."""
    number = deploy(service)
    for pinned in (True, False):
        answer = service.admin.post(f"{ADMIN}/versions/{number}/pin", json={"pinned": pinned})
        assert answer.json()["pinned"] is pinned
    error_of(service.admin.post(f"{ADMIN}/versions/99999/pin", json={"pinned": True}), 404)
    for body in ({}, {"pinned": 1}, {"pinned": "yes"}, {"pinned": None}, {"pinned": True, "x": 1}):
        error_of(service.admin.post(f"{ADMIN}/versions/{number}/pin", json=body), 400)


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "before=-1", "before=99999999999999999999"])
@pytest.mark.parametrize("what", ["versions", "updates", "dead-letters"])
def test_bad_page_is_refused(service: Service, what: str, query: str) -> None:
    """A page size or a page start that cannot be is a 400 that names it."""
    error = error_of(service.admin.get(f"{ADMIN}/{what}?{query}"), 400)
    assert query.partition("=")[0] in f"{error['param']} {error['message']}"


@pytest.mark.parametrize(
    "path", ["", "/versions", "/versions/1", "/deployments", "/updates", "/dead-letters", "/dead-letters/1"]
)
def test_unknown_policy_is_not_found(service: Service, path: str) -> None:
    """A mistyped policy is a 404 everywhere, not an empty list."""
    error_of(service.admin.get(f"/admin/policies/nobody{path}"), 404)


@pytest.mark.parametrize("path", ["pause", "resume", "rollback", "dead-letters/1/replay", "versions/1/pin"])
def test_unknown_policy_cannot_be_changed(service: Service, path: str) -> None:
    """No operation on a policy that is not there."""
    body = {"rollback": {"to": 0, "reason": "x"}, "versions/1/pin": {"pinned": True}}.get(path)
    error_of(service.admin.post(f"/admin/policies/nobody/{path}", json=body), 404)


@pytest.mark.parametrize("body", BAD_ROLLBACKS, ids=str)
def test_bad_rollback_is_refused(service: Service, body: dict[str, Any]) -> None:
    """A rollback without a target or a reason moves nothing."""
    before = service.policy()
    error_of(service.admin.post(f"{ADMIN}/rollback", json=body), 400)
    assert service.policy()["epoch"] == before["epoch"]


def test_rollback_to_an_unknown_version(service: Service) -> None:
    """404 that names the version, with the pointer unmoved."""
    before = service.policy()
    error = error_of(service.admin.post(f"{ADMIN}/rollback", json={"to": 99999, "reason": "x"}), 404)
    assert "99999" in error["message"]
    assert service.policy() == before


def test_rollback_to_a_rejected_version(service: Service) -> None:
    """409 with the reason of the rejection, with the pointer unmoved."""
    rejected = deploy(service)
    deploy(service)
    with closing(service.registry()) as registry:
        registry.versions.reject(POLICY, rejected, "it stammers", "engine")
    before = service.policy()["epoch"]
    error = error_of(service.admin.post(f"{ADMIN}/rollback", json={"to": rejected, "reason": "x"}), 409)
    assert "it stammers" in error["message"]
    assert service.policy()["epoch"] == before


def test_rollback_serves_the_old_version_and_learning_goes_on(service: Service) -> None:
    """The next answer is the old version's, the move is on record, and new versions are of the new epoch."""
    deploy(service)
    before = service.policy()
    moved = service.admin.post(f"{ADMIN}/rollback", json={"to": "base", "reason": "it got worse"})
    assert moved.status_code == 200
    assert (moved.json()["to_version"], moved.json()["from_version"]) == (0, before["live_version"])
    assert service.ask()["model"] == f"{POLICY}@base"
    newest = service.admin.get(f"{ADMIN}/deployments").json()["deployments"][0]
    assert newest == moved.json()
    assert (newest["kind"], newest["reason"]) == ("rollback", "it got worse")
    assert newest["actor"].startswith("key:")
    number = deploy(service)
    version = service.admin.get(f"{ADMIN}/versions/{number}").json()
    assert (version["epoch"], version["parent"]) == (before["epoch"] + 1, 0)


def test_metrics_show_the_learner(service: Service) -> None:
    """The live version, the updates and the newest update's numbers are in /metrics."""
    number = deploy(service)
    assert service.metric("riacho_live_version") >= number
    assert service.metric('riacho_engines{state="serving"}') == 1
    assert service.metric('riacho_engines{state="out"}') == 0
    assert service.metric("riacho_learner_updates") == service.updates()[0]["number"]
    assert service.metric('riacho_learner{metric="reward"}') == 1.0
    assert service.metric("riacho_log_events") == len(service.log().read({}, 1_000_000))
    eventually(lambda: service.metric("riacho_learner_lag_events") == 0, "the learner has caught up")


def test_engines_are_listed(service: Service) -> None:
    """The local engine serves, and holds the live version; clients may not look."""
    number = deploy(service)
    [engine] = service.admin.get("/admin/engines").json()["engines"]
    assert (engine["name"], engine["serving"], engine["problem"], engine["running"]) == ("local", True, "", 0)
    assert number in engine["versions"]
    assert service.client.get("/admin/engines").status_code == 403


def test_policy_is_listed(service: Service) -> None:
    """The list holds the one policy with its range, as the detail shows it."""
    [listed] = service.admin.get("/admin/policies").json()["policies"]
    assert listed == service.policy()
    assert (listed["name"], listed["reward_min"], listed["reward_max"]) == (POLICY, 0.0, 1.0)
