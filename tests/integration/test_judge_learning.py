"""Learning with a judge that fails: sessions are trained without it or parked, as the settings say."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.events.schema import ScoreEvent
from tests.judge_server import JudgeServer, cuts, hangs, judge_server, late, raw, says
from tests.plugins import built_ins, write_metadata
from tests.service import Service, eventually

ROOT = Path(__file__).parents[2]
WEIGHT = 0.5
VERDICT = '{"reason": "true", "score": 8}'
GOOD = says(VERDICT)
FAULTS = {
    "hangs": hangs,
    "error": raw(500, '{"error": {}}'),
    "nonsense": says("It was a fine answer."),
    "off the scale": says('{"reason": "great", "score": 11}'),
    "cut": cuts,
}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[JudgeServer]:
    with judge_server() as server:
        yield server


@pytest.fixture
def server(shared_server: JudgeServer) -> Iterator[JudgeServer]:
    """The judge, which is fine until a test says otherwise; what hangs ends with the test."""
    shared_server.respond = GOOD
    shared_server.released.clear()
    yield shared_server
    shared_server.released.set()


def started(folder: Path, server: JudgeServer, on_failure: str) -> Service:
    """A service whose sessions clients and the judge score together."""
    home = folder / "home"
    home.mkdir()
    write_metadata(folder / "packages", "riacho", built_ins())
    (home / "riacho.toml").write_text(
        f"""
        [learner]
        score_retry_s = 0.05
        [rewards.reward]
        [rewards.truth]
        weight = {WEIGHT}
        scorer = "judge"
        on_failure = "{on_failure}"
        [rewards.truth.options]
        base_url = "{server.url}"
        model = "judge-1"
        rubric = "Is it true?"
        timeout_s = 2.0
        max_retries = 0
        cache_size = 0
        """,
        encoding="utf-8",
    )
    return Service(home, "up", {"PYTHONPATH": os.pathsep.join([str(folder / "packages"), str(ROOT)])})


@pytest.fixture(scope="module")
def training(shared_server: JudgeServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Without the judge's reward a session is trained on what it has."""
    with started(tmp_path_factory.mktemp("training"), shared_server, "train") as service:
        yield service


@pytest.fixture(scope="module")
def parking(shared_server: JudgeServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Without the judge's reward a session waits for it."""
    with started(tmp_path_factory.mktemp("parking"), shared_server, "park") as service:
        yield service


def record(service: Service, id: str) -> dict[str, Any]:
    body: dict[str, Any] = service.client.get(f"/v1/completions/{id}").json()
    return body


def judged(service: Service, reward: float = 1.0) -> str:
    """An answer that its client has judged; its id."""
    id: str = service.ask(max_tokens=6)["id"]
    assert service.judge(completion_id=id, reward=reward).status_code == 200
    return id


def only_update(service: Service, id: str) -> dict[str, Any]:
    """The metrics of the one update that trained on this answer; waits for it."""
    eventually(lambda: record(service, id)["state"] == "trained", f"{id} is trained on")
    session = record(service, id)["session_id"]
    [update] = [row for row in service.updates() if session in row["session_ids"]]
    metrics: dict[str, Any] = update["metrics"]
    return metrics


def scores(service: Service, id: str) -> list[ScoreEvent]:
    session = record(service, id)["session_id"]
    return [event for event in service.events() if isinstance(event, ScoreEvent) and event.session_id == session]


def test_the_judges_reward_counts_beside_the_clients(training: Service, server: JudgeServer) -> None:
    """1 from the client and 0.8 from the judge, at half the weight, are 1.4, in one update and from one call."""
    before = len(server.bodies)
    id = judged(training)
    assert only_update(training, id)["reward"] == pytest.approx(1.0 + WEIGHT * 0.8)
    assert len(server.bodies) == before + 1
    assert [event.session for event in scores(training, id)] == [0.8]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_judge_is_left_out(training: Service, server: JudgeServer, fault: str) -> None:
    """on_failure = train: the client's reward alone is trained on, once; no number stands in for the judge's."""
    server.respond = FAULTS[fault]
    id = judged(training, 0.75)
    assert only_update(training, id)["reward"] == pytest.approx(0.75)
    assert [event.session for event in scores(training, id)] == [None]
    assert all(event.failure for event in scores(training, id))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_judge_is_waited_for(parking: Service, server: JudgeServer, fault: str) -> None:
    """on_failure = park: the session is parked, and trained on once the judge is back, once and with its reward."""
    server.respond = FAULTS[fault]
    id = judged(parking)
    eventually(lambda: record(parking, id)["state"] == "parked", f"{id} is parked")
    server.respond = GOOD
    assert only_update(parking, id)["reward"] == pytest.approx(1.0 + WEIGHT * 0.8)
    assert [event.session for event in scores(parking, id) if event.failure is None] == [0.8]


def test_serving_does_not_wait_for_the_judge(parking: Service, server: JudgeServer) -> None:
    """While it hangs, chat and feedback go on, and sessions wait without a reward until it is back."""
    server.respond = hangs
    ids = [judged(parking) for _ in range(8)]
    assert {record(parking, id)["state"] for id in ids} <= {"captured", "waiting", "scoring", "parked"}
    eventually(lambda: record(parking, ids[0])["state"] == "parked", "the first is parked")
    server.respond = GOOD
    for id in ids:
        assert only_update(parking, id)["reward"] == pytest.approx(1.0 + WEIGHT * 0.8)


def test_a_late_verdict_changes_nothing(training: Service, server: JudgeServer) -> None:
    """A verdict that comes after the session was trained without it is neither counted nor recorded."""
    server.respond = late(VERDICT, then=VERDICT)
    id = judged(training, 0.25)
    assert only_update(training, id)["reward"] == pytest.approx(0.25)
    server.released.set()
    only_update(training, judged(training))  # all that was on its way has come
    assert only_update(training, id)["reward"] == pytest.approx(0.25)
    assert [event.session for event in scores(training, id)] == [None]
