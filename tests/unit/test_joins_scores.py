"""Scores in the join: a complete session waits for each scorer's first score or its failure, and no longer."""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.events.log import Position
from app.events.schema import ScoreEvent
from learner.joins import Joinable, Joined, Joins, OnFailure
from tests.builders import closed, completion, feedback, forget, moment, score

TTL = timedelta(seconds=100)
ONE: Mapping[str, OnFailure] = {"judge": "train"}
TWO: Mapping[str, OnFailure] = {"judge": "train", "task": "park"}


def feed(joins: Joins, *events: Joinable, start: int = 0) -> list[Joined | None]:
    return [joins.apply(event, Position(0, start + i)) for i, event in enumerate(events)]


def ended(log: Sequence[Joinable], scorers: Mapping[str, OnFailure]) -> list[Joined]:
    """The rollouts that may be trained on, in order."""
    joins = Joins(TTL, scorers)
    found = []
    for offset, event in enumerate(log):
        joined = joins.apply(event, Position(0, offset))
        if joined is not None and not joins.missing(joined.session_id):
            found.append(joined)
    return found


def test_complete_session_is_held_until_its_score_comes() -> None:
    """It is given out when it is complete, with what it misses, and again with its scores."""
    joins = Joins(TTL, ONE)
    answer, joined = feed(joins, completion(), feedback())
    assert (answer, joined) == (None, Joined("s", (Position(0, 0),), (Position(0, 1),)))
    assert joins.missing("s") == ("judge",)
    assert joins.held() == [joined]
    scored = joins.apply(score(session=1.0), Position(0, 2))
    assert scored == Joined("s", (Position(0, 0),), (Position(0, 1),), (Position(0, 2),))
    assert (joins.missing("s"), joins.held()) == ((), [])


def test_close_without_feedback_completes_a_session_that_is_scored() -> None:
    """Its scorers judge it; without scorers it goes on waiting for a reward."""
    assert feed(Joins(TTL, ONE), completion(), closed())[-1] is not None
    assert feed(Joins(TTL), completion(), closed())[-1] is None


def test_scores_join_in_every_order() -> None:
    """Before, between and after the events that complete the session, each score is in its rollout once."""
    log: list[Joinable] = [completion(), feedback(), score(session=0.5), score(signal="task", turns={"c0": 1.0})]
    for order in permutations(range(4)):
        [joined] = ended([log[i] for i in order], TWO)
        names = {i: name for i, name in zip(order, range(4), strict=True)}
        assert joined.completions == (Position(0, names[0]),)
        assert joined.feedback == (Position(0, names[1]),)
        assert set(joined.scores) == {Position(0, names[2]), Position(0, names[3])}


def test_first_score_counts() -> None:
    """The same score again, or another of a second attempt, changes nothing; after the end it is late."""
    joins = Joins(TTL, TWO)
    again = [score(session=0.5), score(session=0.5), score(session=0.9, attempt=1)]
    feed(joins, completion(), feedback(), *again)
    joined = joins.apply(score(signal="task", session=1.0), Position(0, 5))
    assert joined is not None
    assert joined.scores == (Position(0, 2), Position(0, 5))
    assert feed(joins, *again, score(signal="task", session=1.0)) == [None] * 4
    assert joins.late == 4


def test_failed_scorer_is_done_without_where_the_rule_says_train() -> None:
    """The rollout has the other rewards, and none of that signal."""
    [joined] = ended([completion(), feedback(), score(failure="away")], ONE)
    assert joined.scores == ()


def test_failed_scorer_parks_the_session_where_the_rule_says_park() -> None:
    """Failures, however many, change nothing more; the score that comes at last does."""
    joins = Joins(TTL, {"judge": "park"})
    feed(joins, completion(), closed())
    assert joins.parked("s") == ()
    failures = [score(failure="away", attempt=i) for i in range(3)]
    assert feed(joins, *failures) == [None] * 3
    assert (joins.missing("s"), joins.parked("s"), joins.parked_signals()) == (("judge",), ("judge",), ["judge"])
    joined = joins.apply(score(session=1.0, attempt=3), Position(0, 5))
    assert joined is not None
    assert joined.scores == (Position(0, 5),)


def test_score_after_a_failure_counts_while_the_session_waits_for_others() -> None:
    """A resumed learner may score what failed before."""
    log: list[Joinable] = [completion(), closed(), score(failure="away"), score(session=1.0, attempt=1)]
    [joined] = ended([*log, score(signal="task", session=0.0)], TWO)
    assert joined.scores == (Position(0, 3), Position(0, 4))


def test_held_session_expires_in_event_time() -> None:
    """After the time to live since its last own event it is given up; its score is then late."""
    joins = Joins(TTL, {"judge": "park"})
    feed(joins, completion(seconds=0), closed(seconds=10), score(failure="away", seconds=60))
    assert joins.expire(moment(110)) == []
    assert joins.expire(moment(110.001)) == ["s"]
    assert joins.held() == []
    assert joins.apply(score(session=1.0, seconds=111), Position(0, 3)) is None
    assert joins.late == 1


def test_held_session_is_forgotten() -> None:
    """What is forgotten while it is scored is never trained on."""
    joins = Joins(TTL, ONE)
    assert feed(joins, completion(), feedback(), forget(), score(session=1.0))[2:] == [None, None]
    assert joins.held() == []


@pytest.mark.parametrize("late", [completion("s", "c1"), feedback("s", "f1"), closed()], ids=lambda event: event.type)
def test_held_session_takes_no_more_events_of_its_own(late: Joinable) -> None:
    """What is scored is what is trained on."""
    joins = Joins(TTL, ONE)
    assert feed(joins, completion(), feedback(), late)[2] is None
    joined = joins.apply(score(session=1.0), Position(0, 3))
    assert joined == Joined("s", (Position(0, 0),), (Position(0, 1),), (Position(0, 3),))
    assert joins.late == 1


def test_sessions_that_wait_for_a_scorer_that_is_gone_are_released() -> None:
    """After a change of the settings a session waits only for signals that still have a scorer."""
    before = Joins(TTL, TWO)
    feed(before, completion(), feedback(), score(session=0.5))
    state = json.loads(json.dumps(before.state()))
    after = Joins(TTL, ONE)
    after.load_state(state)
    assert after.release() == [Joined("s", (Position(0, 0),), (Position(0, 1),), (Position(0, 2),))]
    same = Joins(TTL, TWO)
    same.load_state(state)
    assert same.release() == []


def test_state_of_an_earlier_release_is_read() -> None:
    """A checkpoint from before there were scores has none."""
    old = Joins(TTL)
    feed(old, completion())
    state = old.state()
    del state["held"], state["pending"]["s"]["scores"]
    joins = Joins(TTL)
    joins.load_state(state)
    assert joins.apply(feedback(), Position(0, 1)) == Joined("s", (Position(0, 0),), (Position(0, 1),))
    assert Joined.from_state(["s", ["0:1"], ["0:2"]]) == Joined("s", (Position(0, 1),), (Position(0, 2),))


@st.composite
def streams(draw: st.DrawFn) -> list[Joinable]:
    """Events of two sessions at rising times, with scores of two signals, failures and redelivery."""
    log: list[Joinable] = []
    seconds = 0.0
    for _ in range(draw(st.integers(1, 25))):
        seconds += draw(st.sampled_from([0.0, 1.0, 30.0, 80.0]))
        session = draw(st.sampled_from("xy"))
        kind = draw(st.sampled_from(["completion", "feedback", "closed", "score", "score", "score", "forget"]))
        if kind == "completion":
            log.append(completion(session, session + draw(st.sampled_from("ab")), seconds=seconds))
        elif kind == "feedback":
            final = draw(st.booleans())
            log.append(feedback(session, f"{session}{final}", final=final, seconds=seconds))
        elif kind == "closed":
            log.append(closed(session, seconds=seconds))
        elif kind == "score":
            failure = draw(st.sampled_from([None, "away"]))
            signal = draw(st.sampled_from(["judge", "task"]))
            log.append(score(session, signal, session=None if failure else 1.0, failure=failure, seconds=seconds))
        elif draw(st.booleans()):
            log.append(forget(session, seconds=seconds))
    return log


class Reference:
    """The rules written down again, by scanning a session's whole history at each event."""

    def __init__(self) -> None:
        self.history: dict[str, list[tuple[int, Joinable]]] = {}
        self.complete: dict[str, int] = {}
        self.ended: dict[str, Any] = {}

    def step(self, event: Joinable, offset: int) -> tuple[list[str], Joined | None]:
        last = {s: max(e.at for _, e in self.own(s)) for s in self.history}
        expired = [s for s in self.history if last[s] < event.at - TTL]
        for session in expired:
            self.end(session, event.at)
        self.ended = {s: at for s, at in self.ended.items() if at >= event.at - TTL}
        return sorted(expired), self.take(event, offset)

    def own(self, session: str) -> list[tuple[int, Joinable]]:
        """Of a complete session, what came up to its end."""
        return [item for item in self.history[session] if item[0] <= self.complete.get(session, item[0])]

    def end(self, session: str, at: Any) -> None:
        self.history.pop(session, None)
        self.complete.pop(session, None)
        self.ended[session] = at

    def take(self, event: Joinable, offset: int) -> Joined | None:
        session = event.session_id
        if session in self.ended:
            return None
        if event.type == "forget":
            self.end(session, event.at)
            return None
        if session in self.complete and not isinstance(event, ScoreEvent):
            return None
        history = self.history.setdefault(session, [])
        history.append((offset, event))
        if session not in self.complete:
            kinds = {old.type for _, old in history}
            final = any(old.type == "feedback" and old.final for _, old in history)
            if "completion" not in kinds or not (final or "session_closed" in kinds):
                return None
            self.complete[session] = offset
        return self.release(session)

    def release(self, session: str) -> Joined | None:
        history = self.history[session]
        scores = [(offset, e) for offset, e in history if isinstance(e, ScoreEvent)]
        given: dict[str, int] = {}
        for offset, e in scores:
            if e.failure is None:
                given.setdefault(e.signal, offset)
        failed = {e.signal for _, e in scores if e.failure is not None}
        if "task" not in given or not ("judge" in given or "judge" in failed):
            return None
        at = max(e.at for offset, e in history if offset == self.complete[session])
        turns = {e.completion_id: o for o, e in reversed(history) if e.type == "completion"}
        judgements = {e.event_id: o for o, e in reversed(history) if e.type == "feedback"}
        self.end(session, at)
        columns = (sorted(turns.values()), sorted(judgements.values()), given.values())
        return Joined(session, *(tuple(Position(0, o) for o in column) for column in columns))


@given(streams())
def test_joins_with_scores_equal_the_rules_applied_to_the_whole_history(log: list[Joinable]) -> None:
    """Also when the state is written and read back at each step; a session is released once, with its first scores."""
    joins, reference = Joins(TTL, TWO), Reference()
    for offset, event in enumerate(log):
        state = json.loads(json.dumps(joins.state()))
        joins = Joins(TTL, TWO)
        joins.load_state(state)
        expired = joins.expire(event.at)
        joined = joins.apply(event, Position(0, offset))
        released = joined if joined is not None and not joins.missing(event.session_id) else None
        assert (sorted(expired), released) == reference.step(event, offset)
