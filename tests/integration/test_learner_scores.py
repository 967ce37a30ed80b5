"""The learner and scores on a real log: what it holds, trains, parks, drops, shows and hands over to scorers."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_learner_loop import Home, rollback, states

from app.events.schema import CompletionEvent, Event
from learner.joins import Joined
from learner.signals import Signals
from tests.builders import closed, feedback, forget, moment, score
from tests.fixed_log import events

SIGNALS = Signals({"reward": 1.0, "judge": 0.5, "task": 2.0})


class Handed:
    """Takes sessions as scoring does, and only notes them."""

    def __init__(self) -> None:
        self.sessions: list[tuple[str, tuple[str, ...]]] = []
        self.dropped: list[str] = []

    def submit(self, joined: Joined, signals: Iterable[str]) -> None:
        self.sessions.append((joined.session_id, tuple(signals)))

    def drop(self, session: str) -> None:
        self.dropped.append(session)

    def clear(self) -> None:
        self.sessions.clear()


class Scored(Home):
    """A learner that waits for a judge (train without it) and for a task's checker (park)."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.handed = Handed()
        scorers = {"judge": "train", "task": "park"}
        super().__init__(folder, signals=SIGNALS, scorers=scorers, scoring=self.handed, **settings)  # type: ignore[arg-type]

    def state(self, completion_id: str) -> str:
        row = self.registry.projections.completion(completion_id)
        assert row is not None
        return row.state

    def metrics(self) -> dict[str, Any]:
        """Of the newest update."""
        return self.registry.projections.updates("riacho", 1)[0].metrics

    def feed(self, *stream: Event) -> None:
        self.append(*stream)
        self.learn()


@pytest.fixture(scope="module")
def answers() -> list[CompletionEvent]:
    return [event for event in events(4) if isinstance(event, CompletionEvent) and event.completion_id[0] == "c"]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Scored]:
    home = Scored(tmp_path)
    yield home
    home.close()


def answer(answers: list[CompletionEvent], session: str = "s", **changes: Any) -> CompletionEvent:
    id = changes.pop("completion_id", f"c-{session}")
    return answers[0].model_copy(update={"session_id": session, "completion_id": id, "event_id": id, **changes})


def test_session_is_trained_with_its_last_score(home: Scored, answers: list[CompletionEvent]) -> None:
    """Until then it shows as scoring; the reward is the weighted sum, by hand 0.6 + 0.5 * 0.5 + 2 * 0.25 = 1.35."""
    home.feed(answer(answers), feedback("s", reward=0.6))
    assert (home.state("c-s"), states(home)) == ("scoring", {})
    home.feed(score("s", "judge", session=0.5))
    assert (home.state("c-s"), states(home)) == ("scoring", {})
    home.feed(score("s", "task", turns={"c-s": 0.25}))
    assert (home.state("c-s"), sorted(states(home))) == ("trained", [1])
    assert home.metrics()["reward"] == pytest.approx(1.35)
    assert home.metrics()["scores"] == {"judge.parked": 0, "judge.scored": 1, "task.parked": 0, "task.scored": 1}


def test_scores_that_come_again_train_nothing_more(home: Scored, answers: list[CompletionEvent]) -> None:
    """Neither the same events nor others for the same session and signal."""
    scores = [score("s", "judge", session=0.5), score("s", "task", session=0.5)]
    home.feed(answer(answers), closed("s"), *scores, *scores, score("s", "judge", session=0.9, attempt=1))
    assert sorted(states(home)) == [1]
    assert home.metrics()["reward"] == pytest.approx(1.25)
    assert home.learner.stream.joins.late == 3


def test_failures_train_or_park_by_the_signals_rule(home: Scored, answers: list[CompletionEvent]) -> None:
    """The judge's leaves its share out; the checker's parks the session until it is scored."""
    home.feed(answer(answers), closed("s"), score("s", "judge", failure="away"), score("s", "task", failure="away"))
    assert (home.state("c-s"), states(home)) == ("parked", {})
    assert home.registry.projections.held("riacho") == {"scoring": 0, "parked": 1}
    home.feed(score("s", "task", failure="away", attempt=1))
    home.feed(score("s", "task", session=0.5, attempt=2))
    assert home.state("c-s") == "trained"
    assert home.metrics()["reward"] == 1.0
    assert home.metrics()["scores"] == {
        **{"judge.failed": 1, "judge.parked": 0},
        **{"task.failed": 1, "task.parked": 0, "task.scored": 1},
    }
    assert home.registry.projections.held("riacho") == {"scoring": 0, "parked": 0}


def test_session_without_any_reward_is_dropped(home: Scored, answers: list[CompletionEvent]) -> None:
    """A scorer that gives no number and one that fails leave nothing to learn from, which is no reward of 0."""
    home.feed(answer(answers), closed("s"), score("s", "judge", failure="away"), score("s", "task"))
    assert (home.state("c-s"), states(home)) == ("dropped", {})
    assert home.learner.stream.counters["no_reward"] == 1


@pytest.mark.parametrize(
    "change", [{"trainable": False, "not_trainable_reason": "x"}, {"finish_reason": "abort"}], ids=str
)
def test_what_cannot_be_trained_on_is_not_scored(
    home: Scored, answers: list[CompletionEvent], change: dict[str, Any]
) -> None:
    """It is dropped when it is complete, and no scorer is asked."""
    home.feed(answer(answers, **change), closed("s"))
    assert (home.handed.sessions, home.learner.stream.joins.held()) == ([], [])
    home.feed(score("s", "judge", session=1.0))
    assert states(home) == {}


def test_bad_scores_go_to_the_dead_letters(home: Scored, answers: list[CompletionEvent]) -> None:
    """An unknown signal and a reward outside the range change nothing, and the session goes on waiting."""
    home.feed(answer(answers), closed("s"), score("s", "style", session=1.0), score("s", "judge", session=1.5))
    for letter, word in zip(home.log.dead_letters(), ("'style'", "1.5"), strict=True):
        assert word in letter.reason
    assert home.learner.stream.joins.missing("s") == ("judge", "task")


def test_complete_sessions_are_handed_to_the_scorers_they_miss(home: Scored, answers: list[CompletionEvent]) -> None:
    """Once; one that is already scored for a signal is not handed over for it."""
    home.feed(score("early", "judge", session=1.0), answer(answers, "early"), closed("early"))
    home.feed(answer(answers), closed("s"), closed("s"))
    assert home.handed.sessions == [("early", ("task",)), ("s", ("judge", "task"))]


@pytest.mark.parametrize(("end", "state"), [("forget", "dropped"), ("expire", "expired")])
def test_session_that_ends_while_it_is_scored(
    home: Scored, answers: list[CompletionEvent], end: str, state: str
) -> None:
    """Forgotten or expired, it is scored no more, and a score that still comes trains nothing."""
    home.feed(answer(answers), closed("s"))
    home.feed(forget("s") if end == "forget" else answer(answers, "later", at=moment(7200)))
    assert (home.state("c-s"), home.handed.dropped) == (state, ["s"])
    home.feed(*(score("s", signal, session=1.0, seconds=7200) for signal in ("judge", "task")))
    assert states(home) == {}
    assert home.learner.stream.counters["expired"] == (end == "expire")


def test_resumed_learner_holds_what_the_checkpoint_held(home: Scored, answers: list[CompletionEvent]) -> None:
    """The tables show it so again, and what was done after the checkpoint is done once more from the log."""
    scores = [score("a", signal, session=1.0) for signal in ("judge", "task")]
    home.feed(answer(answers, "held"), closed("held"), score("held", "task", failure="away"))
    home.feed(answer(answers, "a"), closed("a"), *scores)
    assert sorted(states(home)) == [1]
    home.feed(answer(answers, "b"), closed("b"), score("b", "judge", session=0.0), forget("held"))
    home.crash()
    assert home.state("c-held") == "parked"
    home.learn()
    assert [home.state(f"c-{name}") for name in ("held", "a", "b")] == ["dropped", "trained", "scoring"]
    assert home.handed.sessions == [("b", ("task",))]
    home.feed(score("b", "task", session=1.0))
    assert [row.session_ids for row in home.registry.projections.updates("riacho")] == [["b"], ["a"]]


def test_resumed_learner_reads_the_log_before_it_asks_scorers(home: Scored, answers: list[CompletionEvent]) -> None:
    """A session whose score lies after the checkpoint is not scored again, though much lies before it."""
    home.feed(answer(answers), closed("s"))
    others = [e for i in range(30) for e in (answer(answers, f"x{i}"), closed(f"x{i}"), forget(f"x{i}"))]
    home.append(*others, score("s", "judge", session=1.0), score("s", "task", session=1.0))
    home.crash()
    home.learn()
    assert home.handed.sessions == []
    assert home.state("c-s") == "trained"


def test_rollback_keeps_what_waits_for_scores(home: Scored, answers: list[CompletionEvent]) -> None:
    """A session that is scored across a rollback is trained on in the new epoch."""
    home.feed(answer(answers), closed("s"), score("s", "judge", session=1.0))
    home.registry.versions.rollback("riacho", 0, "test", "test", lambda epoch: rollback(0, epoch))
    home.feed(rollback(0, 1), score("s", "task", session=1.0))
    assert home.state("c-s") == "trained"
    assert home.registry.versions.get("riacho", 1).epoch == 1


def test_rollouts_that_wait_for_an_update_are_scored(tmp_path: Path, answers: list[CompletionEvent]) -> None:
    """With several rollouts an update, one with all its scores waits like one of clients' rewards."""
    home = Scored(tmp_path, rollouts_per_update=2)
    for name in "ab":
        home.feed(answer(answers, name), closed(name), *(score(name, s, session=1.0) for s in ("judge", "task")))
        assert home.state("c-a") == ("waiting" if name == "a" else "trained")
    home.close()


def test_report_counts_tool_calls_and_lengths(home: Scored, answers: list[CompletionEvent]) -> None:
    """By hand: sessions of two turns (m and n tokens) and of one (n tokens); running means over both."""
    first, second = answers[0], answers[1]
    m, n = len(first.completion_ids), len(second.completion_ids)
    turns = [
        answer([first], "two", completion_id="t1", tool_call_kinds=("valid", "empty")),
        answer([second], "two", completion_id="t2", tool_call_kinds=("empty",)),
    ]
    scores = [score(name, s, session=1.0) for name in ("two", "one") for s in ("judge", "task")]
    home.feed(*turns, closed("two"), *scores[:2])
    assert home.metrics()["tool_calls"] == {"empty": 2, "valid": 1}
    assert (home.metrics()["rollout_tokens"], home.metrics()["turn_tokens"]) == (m + n, (m + n) / 2)
    home.feed(answer([second], "one", tool_call_kinds=("none",)), closed("one"), *scores[2:])
    metrics = home.metrics()
    assert metrics["tool_calls"] == {"none": 1}
    assert (metrics["rollout_tokens"], metrics["turn_tokens"]) == (n, n)
    assert metrics["rollout_tokens_mean"] == pytest.approx((m + 2 * n) / 2)
    assert metrics["turn_tokens_mean"] == pytest.approx((m + 2 * n) / 3)
