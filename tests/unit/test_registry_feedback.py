"""Feedback in the registry: counted once, closed once, and never without its event."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_registry_support import START, Clock, feedback_event, new_feedback

from app.errors import Conflict
from app.registry import Registry
from app.registry.errors import RolloutClosed
from app.registry.records import FeedbackRecord, NewFeedback

pytest_plugins = ["test_registry_support"]


def record(registry: Registry, new: NewFeedback) -> FeedbackRecord:
    return registry.feedback.record(new, feedback_event(new))


def test_feedback_and_its_event_are_stored_together(registry: Registry) -> None:
    """A stored judgement has a pending event with the id that its record names."""
    stored = record(registry, new_feedback(comment="good", metadata={"page": 3}))
    [pending] = registry.outbox.pending("p", START, 10)
    assert pending.id == pending.event.event_id == stored.event_id
    assert not stored.duplicate
    assert registry.feedback.list("p", "s") == [stored]


def test_same_id_and_content_is_the_same_feedback(registry: Registry) -> None:
    """A retry gets the stored row back, with the first event's id, and adds no second event."""
    first = record(registry, new_feedback(metadata={"a": 1, "b": [2]}))
    again = record(registry, new_feedback(metadata={"b": [2], "a": 1}))
    assert again == replace(first, duplicate=True)
    assert len(registry.outbox.pending("p", START, 10)) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"reward": -1.0},
        {"session_id": "other"},
        {"completion_id": "c"},
        {"signal": "other"},
        {"final": False},
        {"reward": None, "final": False, "closes": True},
        {"comment": "no"},
        {"metadata": {}},
    ],
)
def test_same_id_with_other_content_conflicts(registry: Registry, change: dict[str, Any]) -> None:
    """An idempotency key stands for one content: any other is refused and not stored."""
    record(registry, new_feedback())
    with pytest.raises(Conflict, match="'k1' was already used for other content"):
        record(registry, new_feedback(**change))
    assert len(registry.outbox.pending("p", START, 10)) == 1


def test_an_id_belongs_to_one_api_key(registry: Registry) -> None:
    """Two API keys may use the same idempotency key for different judgements."""
    record(registry, new_feedback(session_id="s1"))
    assert not record(registry, new_feedback(session_id="s2", key_id="key2")).duplicate


@pytest.mark.parametrize(
    "later",
    [new_feedback("k2"), new_feedback("k2", final=False), new_feedback("k2", reward=None, final=False, closes=True)],
    ids=["final", "per turn", "close"],
)
@pytest.mark.parametrize(
    "last", [new_feedback(), new_feedback(reward=None, final=False, closes=True)], ids=["final", "close"]
)
def test_a_closed_rollout_takes_no_more(registry: Registry, last: NewFeedback, later: NewFeedback) -> None:
    """After a final feedback or a close, every further judgement is told that the rollout is closed."""
    record(registry, last)
    with pytest.raises(RolloutClosed, match="closed") as refused:
        record(registry, later)
    assert (refused.value.status, refused.value.code) == (409, "rollout_closed")
    assert len(registry.feedback.list("p", "s")) == 1


def test_turns_are_judged_before_the_close(registry: Registry) -> None:
    """Feedback that is not final leaves the rollout open, and its retry succeeds even after the close."""
    turn = new_feedback("k0", final=False, completion_id="c1")
    record(registry, turn)
    record(registry, new_feedback("k1"))
    assert record(registry, turn).duplicate
    assert [row.client_id for row in registry.feedback.list("p", "s")] == ["k0", "k1"]


def test_judgements_without_an_id_are_separate(registry: Registry) -> None:
    """Without an idempotency key every judgement counts, and another session's close does not matter."""
    record(registry, new_feedback(None, session_id="other"))
    for _ in range(2):
        assert not record(registry, new_feedback(None, final=False)).duplicate
    assert len(registry.feedback.list("p", "s")) == 2


def test_rewards_are_found_and_a_bare_close_is_none(registry: Registry) -> None:
    """has_rewards tells a session with a judgement from one that was only closed."""
    record(registry, new_feedback("a", session_id="s1", reward=0.0, final=False))
    record(registry, new_feedback("b", session_id="s2", reward=None, final=False, closes=True))
    assert [registry.feedback.has_rewards("p", s) for s in ("s1", "s2", "s3")] == [True, False, False]


def test_twenty_posts_at_once_store_one_row(registry: Registry) -> None:
    """The same feedback from 20 threads becomes one row and one event; everyone gets that row."""
    with ThreadPoolExecutor(20) as pool:
        records = list(pool.map(lambda _: record(registry, new_feedback()), range(20)))
    assert len({stored.event_id for stored in records}) == 1
    assert sum(not stored.duplicate for stored in records) == 1
    assert len(registry.feedback.list("p", "s")) == len(registry.outbox.pending("p", START, 10)) == 1


def test_twenty_different_final_judgements_at_once_store_one(registry: Registry) -> None:
    """Of 20 threads that close one rollout with different judgements, one succeeds."""

    def post(n: int) -> str:
        try:
            return record(registry, new_feedback(f"k{n}", reward=n / 20)).event_id
        except RolloutClosed:
            return "closed"

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(post, range(20)))
    assert answers.count("closed") == 19
    assert len(registry.feedback.list("p", "s")) == 1


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_of_judgements_keeps_the_rules(registry: Registry, data: st.DataObject) -> None:
    """Whatever is sent, a session has one closing row, an id one row, and every row one pending event."""
    policy = f"p{len(registry.policies.list())}"
    registry.policies.ensure(policy, "tiny", "f1", -1, 1)
    sent = st.builds(
        lambda id, session, reward, final: new_feedback(
            id, policy=policy, session_id=session, reward=reward, final=final
        ),
        st.sampled_from(["a", "b", "c", None]),
        st.sampled_from(["s1", "s2"]),
        st.sampled_from([0.0, 1.0]),
        st.booleans(),
    )
    for new in data.draw(st.lists(sent, max_size=12)):
        with suppress(Conflict):
            record(registry, new)
    rows = [row for session in ("s1", "s2") for row in registry.feedback.list(policy, session)]
    ids = [row.client_id for row in rows if row.client_id]
    assert len(ids) == len(set(ids))
    for session in ("s1", "s2"):
        assert [row.final for row in rows if row.session_id == session].count(True) <= 1
    events = {pending.id for pending in registry.outbox.pending(policy, START, 100)}
    assert events == {row.event_id for row in rows}


def test_outbox_gives_old_promises_until_they_are_kept(registry: Registry, clock: Clock) -> None:
    """pending() skips the young, keeps the order, and forgets what was marked; marking again is harmless."""
    for n in range(3):
        record(registry, new_feedback(f"k{n}", session_id=f"s{n}"))
        clock.tick(10)
    old = [pending.event.session_id for pending in registry.outbox.pending("p", clock.now, 2)]
    assert old == ["s0", "s1"]
    [first] = registry.outbox.pending("p", START, 10)
    registry.outbox.mark_appended(first.id)
    registry.outbox.mark_appended(first.id)
    assert [p.event.session_id for p in registry.outbox.pending("p", clock.now, 10)] == ["s1", "s2"]


def test_comment_may_hold_any_character(registry: Registry) -> None:
    """U+0000 and emoji in a comment come back as they were, on every database."""
    assert record(registry, new_feedback(comment="a\x00b \N{SLIGHTLY SMILING FACE}")).comment == (
        registry.feedback.list("p", "s")[0].comment
    )


def test_signals_are_judged_apart(registry: Registry) -> None:
    """Several signals of one turn are several judgements, each under its name."""
    for signal in ("style", "task"):
        record(registry, new_feedback(signal, signal=signal, completion_id="c", final=False))
    assert [row.signal for row in registry.feedback.list("p", "s")] == ["style", "task"]
