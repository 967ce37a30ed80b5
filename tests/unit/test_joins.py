"""Joins: every order of arrival gives the same rollout, each event counts once, and time is event time."""

import json
from collections.abc import Sequence
from datetime import timedelta
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.events.log import Position
from app.events.schema import CompletionEvent, FeedbackEvent, ForgetEvent, SessionClosedEvent
from learner.joins import Joined, Joins
from learner.rollouts import Rollout, build_rollout
from tests.builders import closed, completion, feedback, forget, moment

TTL = timedelta(seconds=100)
Joinable = CompletionEvent | FeedbackEvent | SessionClosedEvent | ForgetEvent


def _rollout(joined: Joined, log: Sequence[Joinable]) -> Rollout:
    """The rollout that the joined positions name, read from the log again."""
    completions = [log[p.offset] for p in joined.completions]
    judgements = [log[p.offset] for p in joined.feedback]
    return build_rollout(
        joined.session_id,
        [event for event in completions if isinstance(event, CompletionEvent)],
        [event for event in judgements if isinstance(event, FeedbackEvent)],
    )


def _run(log: Sequence[Joinable]) -> list[Rollout]:
    joins = Joins(TTL)
    found = [joins.apply(event, Position(0, offset)) for offset, event in enumerate(log)]
    return [_rollout(joined, log) for joined in found if joined]


def _feed(joins: Joins, *events: Joinable, start: int = 0) -> list[Joined | None]:
    return [joins.apply(event, Position(0, start + i)) for i, event in enumerate(events)]


@pytest.mark.parametrize("judged", ["c0", None])
def test_feedback_may_come_before_its_completion(judged: str | None) -> None:
    """Either order of one completion and its final feedback gives the same rollout, with the second event."""
    answer, reward = completion(), feedback(completion_id=judged, reward=0.5)
    [first] = _run([answer, reward])
    assert _run([reward, answer]) == [first]
    assert first.total_reward == 0.5


def test_every_order_of_completions_and_feedback_gives_the_same_rollout() -> None:
    """Two judged turns and a close: wherever the feedback lies, the rollout has the same turns and rewards."""
    log: list[Joinable] = [
        completion("s", "a"),
        completion("s", "b"),
        feedback("s", "fa", completion_id="a", reward=0.25, final=False),
        feedback("s", "fb", completion_id="b", reward=0.5),
    ]
    for order in permutations(range(4)):
        in_time_order = order.index(0) < order.index(1) and order.index(2) < order.index(3)
        if in_time_order:
            [rollout] = _run([log[i] for i in order])
            assert [(t.completion_id, t.reward) for t in rollout.turns] == [("a", 0.25), ("b", 0.5)]


def test_sessions_do_not_touch_each_other() -> None:
    """Interleaved sessions give one rollout each, with their own completions."""
    log: list[Joinable] = [
        completion("s", "a"),
        completion("t", "b"),
        feedback("t", "ft", reward=0.0),
        feedback("s", "fs", reward=1.0),
    ]
    assert [(r.session_id, r.turns[0].completion_id, r.session_reward) for r in _run(log)] == [
        ("t", "b", 0.0),
        ("s", "a", 1.0),
    ]


def test_redelivered_events_count_once() -> None:
    """A completion and a feedback that arrive twice are one turn and one reward."""
    answer = completion("s", "a")
    turn_reward = feedback("s", "fa", completion_id="a", reward=0.25, final=False)
    [rollout] = _run([answer, turn_reward, answer, turn_reward, feedback("s", "f", reward=0.5)])
    assert (len(rollout.turns), rollout.total_reward) == (1, 0.75)
    [*_, joined] = _feed(Joins(TTL), answer, turn_reward, answer, turn_reward, feedback("s", "f", reward=0.5))
    assert joined == Joined("s", (Position(0, 0),), (Position(0, 1), Position(0, 4)))


def test_redelivery_after_the_end_gives_no_second_rollout() -> None:
    """Both events again, after their rollout, train nothing and are counted as late."""
    joins = Joins(TTL)
    events: list[Joinable] = [completion(), feedback()]
    found = _feed(joins, *events, *events)
    assert [joined is not None for joined in found] == [False, True, False, False]
    assert joins.late == 2


def test_completion_without_feedback_waits() -> None:
    """Absence of feedback is no reward of 0: nothing is complete."""
    joins = Joins(TTL)
    assert _feed(joins, completion("s", "a"), completion("s", "b")) == [None, None]
    assert len(joins) == 1


def test_feedback_that_is_not_final_waits_for_the_end() -> None:
    """A turn's reward does not end its session; the close does, and no further event is needed."""
    joins = Joins(TTL)
    turn_reward = feedback(completion_id="c0", final=False)
    assert _feed(joins, completion(), turn_reward) == [None, None]
    assert joins.apply(closed(), Position(0, 2)) == Joined("s", (Position(0, 0),), (Position(0, 1),))


def test_close_without_rewards_waits_for_one() -> None:
    """A closed session without rewards is not a rollout until a reward comes, final or not."""
    joins = Joins(TTL)
    assert _feed(joins, completion(), closed()) == [None, None]
    assert joins.apply(feedback(final=False), Position(0, 2)) is not None


def test_final_feedback_without_a_completion_waits() -> None:
    """A judgement of nothing is no rollout."""
    assert _feed(Joins(TTL), feedback(), closed()) == [None, None]


def test_judged_completion_that_has_not_arrived_is_waited_for() -> None:
    """A final judgement of turn b does not end the session with turn a alone."""
    joins = Joins(TTL)
    assert _feed(joins, completion("s", "a"), feedback("s", "f", completion_id="b")) == [None, None]
    joined = joins.apply(completion("s", "b"), Position(0, 2))
    assert joined == Joined("s", (Position(0, 0), Position(0, 2)), (Position(0, 1),))


def test_session_expires_in_event_time() -> None:
    """A session whose last event is older than the time to live is given up; exactly as old, it still waits."""
    joins = Joins(TTL)
    _feed(joins, completion("s", "a", seconds=0), completion("s", "b", seconds=50))
    assert list(joins.expire(moment(150))) == []
    assert list(joins.expire(moment(150.001))) == ["s"]
    assert len(joins) == 0


def test_feedback_after_expiry_is_late() -> None:
    """Feedback for a session that was given up is counted and makes no rollout."""
    joins = Joins(TTL)
    _feed(joins, completion(seconds=0))
    assert list(joins.expire(moment(101))) == ["s"]
    assert joins.apply(feedback(seconds=102), Position(0, 1)) is None
    assert (joins.late, len(joins)) == (1, 0)


def test_only_old_sessions_expire() -> None:
    """A session that heard something lately stays, although it began first."""
    joins = Joins(TTL)
    _feed(joins, completion("s", "a", seconds=0), completion("t", "b", seconds=10), completion("s", "c", seconds=90))
    assert list(joins.expire(moment(120))) == ["t"]
    assert joins.apply(feedback("s", "f", seconds=120), Position(0, 3)) is not None


def test_expiry_does_not_depend_on_the_order_of_arrival() -> None:
    """An old session expires also where one with a later time stands before it, as partitions can bring it."""
    joins = Joins(TTL)
    _feed(joins, completion("late", "a", seconds=500), completion("old", "b", seconds=0))
    assert list(joins.expire(moment(300))) == ["old"]


def test_ended_sessions_are_forgotten_after_the_time_to_live() -> None:
    """What is remembered of ended sessions does not grow for ever."""
    joins = Joins(TTL)
    _feed(joins, completion(seconds=0), feedback(seconds=0))
    list(joins.expire(moment(50)))
    assert list(joins.state()["ended"]) == ["s"]
    list(joins.expire(moment(101)))
    assert joins.state()["ended"] == {}


def test_forgotten_session_is_never_trained_on() -> None:
    """Nothing that waits for the session, and nothing that comes after, becomes a rollout."""
    joins = Joins(TTL)
    assert _feed(joins, completion(), forget(), feedback(), completion("s", "b"), closed()) == [None] * 5
    assert len(joins) == 0


def test_forget_leaves_other_sessions_alone() -> None:
    """Only the named session is dropped."""
    joins = Joins(TTL)
    _feed(joins, completion("s", "a"), completion("t", "b"), forget("s"))
    assert joins.apply(feedback("t", "f"), Position(0, 3)) == Joined("t", (Position(0, 1),), (Position(0, 3),))


def test_joined_round_trips_as_json() -> None:
    """A complete rollout that waits for its update lies in the checkpoint as positions."""
    joined = Joined("s", (Position(0, 3), Position(2, 10)), (Position(0, 4),))
    assert Joined.from_state(json.loads(json.dumps(joined.state()))) == joined


@st.composite
def _streams(draw: st.DrawFn) -> list[Joinable]:
    """Events of a few sessions at rising times, with redelivery, closing and forgetting."""
    log: list[Joinable] = []
    seconds = 0.0
    for _ in range(draw(st.integers(1, 25))):
        seconds += draw(st.sampled_from([0.0, 1.0, 30.0, 80.0]))
        session = draw(st.sampled_from("zyx"))
        turn = draw(st.sampled_from("cba"))
        kind = draw(st.sampled_from(["completion", "completion", "feedback", "feedback", "closed", "forget"]))
        if kind == "completion":
            log.append(completion(session, session + turn, seconds=seconds))
        elif kind == "feedback":
            judged = draw(st.sampled_from([None, session + turn]))
            final = draw(st.booleans())
            name = f"{session}{judged}{final}"
            log.append(feedback(session, name, completion_id=judged, final=final, seconds=seconds))
        elif kind == "closed":
            log.append(closed(session, seconds=seconds))
        elif draw(st.booleans()):
            log.append(forget(session, seconds=seconds))
    return log


def _step(joins: Joins, event: Joinable, offset: int) -> tuple[list[str], Joined | None]:
    return list(joins.expire(event.at)), joins.apply(event, Position(0, offset))


@given(_streams())
def test_state_round_trip_at_every_step_changes_nothing(log: list[Joinable]) -> None:
    """A learner that is stopped and resumed at each event gives what an undisturbed one gives."""
    undisturbed, resumed = Joins(TTL), Joins(TTL)
    for offset, event in enumerate(log):
        state: dict[str, Any] = json.loads(json.dumps(resumed.state()))
        resumed = Joins(TTL)
        resumed.load_state(state)
        assert _step(resumed, event, offset) == _step(undisturbed, event, offset)
        assert json.dumps(resumed.state()) == json.dumps(undisturbed.state())


class _Reference:
    """The rules written down again, by scanning a session's whole history at each event."""

    def __init__(self) -> None:
        self.history: dict[str, list[tuple[int, Joinable]]] = {}
        self.ended: dict[str, Any] = {}

    def step(self, event: Joinable, offset: int) -> tuple[list[str], Joined | None]:
        expired = [s for s, h in self.history.items() if max(e.at for _, e in h) < event.at - TTL]
        for session in expired:
            del self.history[session]
            self.ended[session] = event.at
        self.ended = {s: at for s, at in self.ended.items() if at >= event.at - TTL}
        return expired, self._take(event, offset)

    def _take(self, event: Joinable, offset: int) -> Joined | None:
        session = event.session_id
        if session in self.ended:
            return None
        if isinstance(event, ForgetEvent):
            self.history.pop(session, None)
            self.ended[session] = event.at
            return None
        seen = [*self.history.pop(session, []), (offset, event)]
        turns: dict[str, int] = {}
        judgements: dict[str, int] = {}
        for position, old in seen:
            if isinstance(old, CompletionEvent) and old.completion_id not in turns:
                turns[old.completion_id] = position
            if isinstance(old, FeedbackEvent) and old.event_id not in judgements:
                judgements[old.event_id] = position
        final = any(isinstance(old, FeedbackEvent) and old.final for _, old in seen)
        over = any(isinstance(old, SessionClosedEvent) for _, old in seen) and judgements
        judged = {old.completion_id for _, old in seen if isinstance(old, FeedbackEvent) and old.completion_id}
        if turns and (final or over) and judged <= turns.keys():
            self.ended[session] = event.at
            places = tuple(Position(0, p) for p in turns.values()), tuple(Position(0, p) for p in judgements.values())
            return Joined(session, *places)
        self.history[session] = seen
        return None


@given(_streams())
def test_joins_equal_the_rules_applied_to_the_whole_history(log: list[Joinable]) -> None:
    """Incremental joining gives the rollouts and expiries that a scan of everything gives."""
    joins, reference = Joins(TTL), _Reference()
    for offset, event in enumerate(log):
        assert _step(joins, event, offset) == reference.step(event, offset)
