"""A judge that hangs, fails, is slow or talks nonsense: sessions train or park by the rule, and serving goes on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.events.schema import ScoreEvent
from app.registry import upgrade
from tests.judges import Steered
from tests.learning import LearnerProcess
from tests.service import Service, eventually, local_only


class Judged:
    """`riacho up` with the steered judge."""

    def __init__(self, service: Service, judge: Steered) -> None:
        self.service, self.judge = service, judge

    def record(self, id: str) -> dict[str, Any]:
        body: dict[str, Any] = self.service.client.get(f"/v1/completions/{id}").json()
        return body

    def becomes(self, id: str, state: str) -> dict[str, Any]:
        eventually(lambda: self.record(id)["state"] == state, f"{id} is {state}")
        return self.record(id)

    def rewarded(self, reward: float) -> str:
        """A completion that its client has judged for good."""
        id: str = self.service.ask(max_tokens=8)["id"]
        assert self.service.judge(completion_id=id, reward=reward).status_code == httpx.codes.OK
        return id

    def closed(self, session: str) -> str:
        """A completion whose session has ended without any client's reward."""
        id: str = self.service.ask(max_tokens=8, session=session)["id"]
        assert self.service.client.post(f"/v1/sessions/{session}/close").status_code == httpx.codes.OK
        return id

    def update(self, id: str) -> dict[str, Any]:
        """The metrics of the update that trained on a completion."""
        number = self.record(id)["rollout_update"]
        metrics: dict[str, Any] = next(row for row in self.service.updates() if row["number"] == number)["metrics"]
        return metrics

    def scores(self, id: str) -> list[ScoreEvent]:
        session = self.service.recorded(id).session_id
        return [e for e in self.service.events() if isinstance(e, ScoreEvent) and e.session_id == session]


def judged(tmp_path_factory: pytest.TempPathFactory, on_failure: str) -> Iterator[Judged]:
    folder = tmp_path_factory.mktemp("judged")
    judge = Steered(folder / "judge")
    home = folder / "home"
    home.mkdir()
    with Service(home, "up", judge.variables(on_failure)) as service:
        yield Judged(service, judge)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judged]:
    """Sessions that cannot be scored are trained without the judge."""
    yield from judged(tmp_path_factory, "train")


@pytest.fixture(scope="module")
def parking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judged]:
    """Sessions that cannot be scored are parked."""
    yield from judged(tmp_path_factory, "park")


@pytest.mark.parametrize("mode", ["good", "slow"])
def test_score_counts_beside_the_clients_reward(training: Judged, mode: str) -> None:
    """The rollout's reward is the sum of weight times value, however long the judge takes."""
    training.judge.mode(mode)
    id = training.rewarded(0.75)
    training.becomes(id, "trained")
    [score] = training.scores(id)
    assert score.session is not None
    assert training.update(id)["reward"] == pytest.approx(0.75 + 0.5 * score.session)
    assert training.update(id)["scores"]["judge.scored"] >= 1


@pytest.mark.parametrize("mode", ["hang", "error", "nonsense", "away"])
def test_session_is_trained_without_a_judge_that_fails(training: Judged, mode: str) -> None:
    """The client's reward alone counts, and the log says why."""
    training.judge.mode(mode)
    id = training.rewarded(0.75)
    training.becomes(id, "trained")
    assert training.update(id)["reward"] == 0.75
    [score] = training.scores(id)
    assert score.failure
    assert "broken" not in score.failure
    assert training.update(id)["scores"]["judge.failed"] >= 1


def test_session_without_any_reward_left_is_dropped(training: Judged) -> None:
    """A judge that fails is no reward of 0."""
    training.judge.mode("away")
    training.becomes(training.closed("nothing-left"), "dropped")
    training.judge.mode("good")
    id = training.rewarded(0.5)
    training.becomes(id, "trained")
    row = next(row for row in training.service.updates() if row["number"] == training.record(id)["rollout_update"])
    assert row["metrics"]["not_trained"]["no_reward"] == 1


@pytest.mark.parametrize("mode", ["hang", "error", "nonsense", "away"])
def test_session_is_parked_while_its_judge_fails(parking: Judged, mode: str) -> None:
    """It shows as parked; when the judge is well again it is trained with its score."""
    parking.judge.mode(mode)
    id = parking.closed(f"parked-{mode}")
    parking.becomes(id, "parked")
    parking.judge.mode("good")
    parking.becomes(id, "trained")
    failure, success = parking.scores(id)
    assert failure.failure
    assert success.session is not None
    assert parking.update(id)["reward"] == pytest.approx(0.5 * success.session)


def test_service_answers_while_the_judge_hangs(parking: Judged) -> None:
    """Chat, feedback and records go on with a session in the judge's hands, which is scored at last."""
    parking.judge.mode("hang")
    held = parking.closed("held")
    eventually(lambda: parking.record(held)["state"] in ("scoring", "parked"), "the session is in the judge's hands")
    others = [parking.rewarded(1.0) for _ in range(3)]
    assert parking.record(held)["state"] in ("scoring", "parked")
    for id in others:
        eventually(lambda id=id: parking.record(id)["state"] in ("scoring", "parked"), "the learner reads on")  # type: ignore[misc]
    parking.judge.mode("good")
    for id in (held, *others):
        parking.becomes(id, "trained")


@local_only
def test_what_the_judge_says_shows_in_the_metrics(parking: Judged) -> None:
    """Scores by signal and outcome, lengths, as of the newest update."""
    parking.judge.mode("good")
    id = parking.rewarded(1.0)
    parking.becomes(id, "trained")
    metrics = parking.update(id)
    service = parking.service
    assert service.metric('riacho_learner_scores{outcome="scored",signal="judge"}') == metrics["scores"]["judge.scored"]
    assert service.metric('riacho_learner{metric="turn_tokens"}') == metrics["turn_tokens"] == 8


def test_scorer_that_is_not_installed_stops_the_learner_at_its_start(tmp_path: Path) -> None:
    """The message names the setting, the value, and what is installed."""
    judge = Steered(tmp_path / "judge")
    variables = judge.variables("train") | {"RIACHO_REWARDS_JUDGE_SCORER": "nobodys"}
    upgrade(f"sqlite:///{tmp_path / 'registry.db'}")
    with LearnerProcess(tmp_path, variables) as learner:
        eventually(lambda: not learner.running, "the learner ends")
        assert "scorer = 'nobodys'" in learner.log_text
        assert "steered" in learner.log_text
