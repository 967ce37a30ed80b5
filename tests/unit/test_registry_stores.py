"""Policies, keys, leases, the audit trail and the projections."""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.dialects import sqlite
from test_registry_support import START, Clock

from app.errors import NotFound, SetupError
from app.registry import Registry
from app.registry.database import make_engine
from app.registry.errors import LeaseLost
from app.registry.models import UtcDateTime
from app.registry.records import CompletionRow, CompletionState, Lease, UpdateRow

pytest_plugins = ["test_registry_support"]


# --- policies


def test_policy_is_created_once(registry: Registry) -> None:
    """ensure() at every start returns the policy as it was created."""
    first = registry.policies.get("p")
    assert (first.live_version, first.epoch, first.learning_paused, first.created_at) == (0, 0, False, START)
    assert registry.policies.ensure("p", "tiny", "f1", -1.0, 1.0) == first
    assert registry.policies.list() == [first]


def test_policy_stays_with_its_base(registry: Registry) -> None:
    """Another base's fingerprint is refused with both named and a way out."""
    with pytest.raises(SetupError, match=r"f1.*f2.*another policy name"):
        registry.policies.ensure("p", "other", "f2", -1.0, 1.0)


def test_policy_keeps_its_reward_range(registry: Registry) -> None:
    """Another reward range is refused with both named."""
    with pytest.raises(SetupError, match="from -1 to 1, not from 0 to 1"):
        registry.policies.ensure("p", "tiny", "f1", 0.0, 1.0)


def test_pausing_is_audited(registry: Registry) -> None:
    """Learning stops and resumes by name, with who did it on the trail."""
    registry.policies.set_paused("p", True, "ann")
    assert registry.policies.get("p").learning_paused
    registry.policies.set_paused("p", False, "bob")
    trail = [(entry.actor, entry.action, entry.policy) for entry in registry.audit.list(10)]
    assert trail == [("bob", "resume_learning", "p"), ("ann", "pause_learning", "p")]


def test_unknown_policy_is_not_found(registry: Registry) -> None:
    """Reading or pausing an unknown policy says so."""
    with pytest.raises(NotFound, match="'q'"):
        registry.policies.get("q")
    with pytest.raises(NotFound, match="'q'"):
        registry.policies.set_paused("q", True, "ann")


# --- keys


def test_key_is_found_by_itself_only(registry: Registry) -> None:
    """A key is found by its plain text, which is nowhere in the database."""
    key = registry.keys.add("rk-secret", "client", "laptop", store_content=False)
    assert registry.keys.find("rk-secret") == key
    assert registry.keys.find("rk-other") is None
    assert (len(key.id), key.role, key.store_content) == (8, "client", False)


def test_adding_a_key_again_changes_nothing(registry: Registry) -> None:
    """The first admin key may be added at every start."""
    key = registry.keys.add("rk-secret", "admin", "first")
    assert registry.keys.add("rk-secret", "client", "second") == key
    assert registry.keys.list() == [key]


def test_revoked_key_is_refused(registry: Registry) -> None:
    """A revoked key is not found any more and not revived by adding it; the revocation is audited once."""
    key = registry.keys.add("rk-secret", "admin", "first")
    assert registry.keys.any("admin")
    registry.keys.revoke(key.id, "ann")
    registry.keys.revoke(key.id, "bob")
    assert registry.keys.add("rk-secret", "admin", "first").revoked_at == START
    assert registry.keys.find("rk-secret") is None
    assert not registry.keys.any("admin")
    assert [(entry.actor, entry.detail) for entry in registry.audit.list(10)] == [("ann", {"key_id": key.id})]
    with pytest.raises(NotFound):
        registry.keys.revoke("00000000", "ann")


# --- leases


def test_lease_has_one_holder(registry: Registry, clock: Clock) -> None:
    """Others get nothing until the lease runs out, and then a higher token."""
    first = registry.leases.acquire("l", "one", 10)
    assert first is not None
    assert registry.leases.acquire("l", "two", 10) is None
    clock.tick(10)
    assert registry.leases.holder("l") is None
    second = registry.leases.acquire("l", "two", 10)
    assert second is not None
    assert second.token == first.token + 1
    assert registry.leases.holder("l") == second
    with pytest.raises(LeaseLost):
        registry.leases.renew(first, 10)


def test_holder_renews_its_lease(registry: Registry, clock: Clock) -> None:
    """Renewing, and acquiring what one holds, keep the token and move the end."""
    first = registry.leases.acquire("l", "one", 10)
    assert first is not None
    clock.tick(5)
    renewed = registry.leases.renew(first, 10)
    assert (renewed.token, renewed.expires_at) == (first.token, START + timedelta(seconds=15))
    assert registry.leases.acquire("l", "one", 20) == replace(renewed, expires_at=START + timedelta(seconds=25))


def test_released_lease_is_free_but_its_token_is_spent(registry: Registry) -> None:
    """After a release another may take the lease at once, and the former holder cannot renew."""
    first = registry.leases.acquire("l", "one", 10)
    assert first is not None
    registry.leases.release(first)
    with pytest.raises(LeaseLost):
        registry.leases.renew(first, 10)
    second = registry.leases.acquire("l", "two", 10)
    assert second is not None
    assert second.token == 2
    registry.leases.release(first)
    assert registry.leases.holder("l") == second


def test_twenty_threads_get_one_lease(registry: Registry) -> None:
    """Of 20 that want a lease that never existed, one gets it."""
    with ThreadPoolExecutor(20) as pool:
        leases = list(pool.map(lambda n: registry.leases.acquire("l", f"h{n}", 10), range(20)))
    assert sum(lease is not None for lease in leases) == 1


def _audit_many(url: str, count: int) -> None:
    with closing(Registry.open(url)) as registry:
        for n in range(count):
            registry.audit.add("process", "count", None, {"n": n})


def test_processes_write_at_once(registry: Registry, database_url: str) -> None:
    """Processes that write the same database wait for each other and lose nothing."""
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_audit_many, args=(database_url, 40)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(registry.audit.list(1000)) == 120


# --- projections


def completion(id: str, **changes: Any) -> CompletionRow:
    values: dict[str, Any] = {
        "id": id,
        "policy": "p",
        "session_id": "s",
        "key_id": "key",
        "version": 3,
        "position": "0:7",
        "at": START,
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "finish_reason": "stop",
        "trainable": True,
        "reason": None,
        "messages": [{"role": "user", "content": "hi"}],
        "output": "a\x00b",
        "state": "waiting",
    }
    return CompletionRow(**(values | changes))


def update_row(number: int, **changes: Any) -> UpdateRow:
    row = UpdateRow("p", number, 0, None, START, ["s"], {"loss": 0.5})
    return replace(row, **changes)


def contents(registry: Registry) -> tuple[Sequence[CompletionRow], Sequence[UpdateRow]]:
    return registry.projections.session("p", "s"), registry.projections.updates("p")


def test_projection_follows_a_completion_to_its_version(registry: Registry, lease: Lease) -> None:
    """A completion waits, is trained in an update, and then names the version that learned from it."""
    projections = registry.projections
    other = completion("c2", session_id="other", output=None, messages=None)
    projections.save("p", [completion("c" * 300), other], [update_row(1)], lease)
    projections.set_outcome("p", ["s"], "trained", 1, lease)
    projections.set_published("p", [1], 4, lease)
    expected = completion("c" * 300, state="trained", rollout_update=1, trained_version=4)
    assert projections.completion("c" * 300) == expected
    assert projections.session("p", "s") == [expected]
    assert projections.update("p", 1) == update_row(1, version=4)
    assert projections.completion("c2") == other
    assert projections.completion("none") is None
    assert projections.update("p", 2) is None


def test_outcome_is_given_once(registry: Registry, lease: Lease) -> None:
    """A completion that no longer waits keeps its outcome."""
    registry.projections.save("p", [completion("a", state="not_trainable"), completion("b")], [], lease)
    registry.projections.set_outcome("p", ["s"], "expired", None, lease)
    registry.projections.set_outcome("p", ["s"], "trained", 1, lease)
    assert [row.state for row in registry.projections.session("p", "s")] == ["not_trainable", "expired"]


def test_replay_writes_the_same_rows(registry: Registry, lease: Lease) -> None:
    """Saving, judging and publishing again in the order of the log ends with the same tables."""

    def fold() -> None:
        for start in (0, 200):
            rows = [completion(f"c{n:03}") for n in range(start, start + 200)]
            registry.projections.save("p", [*rows, rows[0]], [update_row(start + 1)], lease)
        registry.projections.set_outcome("p", ["s"], "trained", 1, lease)
        registry.projections.set_published("p", [1, 201], 2, lease)

    fold()
    once = contents(registry)
    fold()
    assert contents(registry) == once
    assert len(once[0]) == 400


def test_what_came_after_a_checkpoint_is_taken_back(registry: Registry, lease: Lease) -> None:
    """Later updates are gone, and what waits in the checkpoint waits again; earlier outcomes stay."""
    projections = registry.projections
    sessions = {"a": "trained", "b": "trained", "c": "dropped", "d": "expired", "e": "expired"}
    projections.save("p", [completion(id, session_id=id) for id in sessions], [update_row(1), update_row(2)], lease)
    projections.save("p", [completion("f", session_id="c", state="not_trainable")], [], lease)
    for session, update in (("a", 1), ("b", 2)):
        projections.set_outcome("p", [session], "trained", update, lease)
        projections.set_published("p", [update], update, lease)
    projections.set_outcome("p", ["c"], "dropped", None, lease)
    projections.set_outcome("p", ["d", "e"], "expired", None, lease)
    projections.take_back("p", 1, ["b", "c", "d", "f", "unknown"], lease)
    assert [row.number for row in projections.updates("p")] == [1]
    rows = {id: projections.completion(id) for id in [*sessions, "f"]}
    assert {id: (row.state, row.rollout_update, row.trained_version) for id, row in rows.items() if row} == {
        "a": ("trained", 1, 1),
        "b": ("waiting", None, None),
        "c": ("waiting", None, None),
        "d": ("waiting", None, None),
        "e": ("expired", None, None),
        "f": ("not_trainable", None, None),
    }


def test_sessions_that_wait_for_scores_are_counted_and_come_to_an_end(registry: Registry, lease: Lease) -> None:
    """Scoring and parked are states on the way: any outcome follows them, and only they count as held."""
    projections = registry.projections
    projections.save("p", [completion(id, session_id=id) for id in "abc"], [update_row(1)], lease)
    projections.save("p", [completion("d", session_id="a", state="not_trainable")], [], lease)
    projections.set_outcome("p", ["a", "b"], "scoring", None, lease)
    projections.set_outcome("p", ["b"], "parked", None, lease)
    assert projections.held("p") == {"scoring": 1, "parked": 1}
    projections.set_outcome("p", ["b"], "trained", 1, lease)
    projections.set_outcome("p", ["a"], "dropped", None, lease)
    assert projections.held("p") == {"scoring": 0, "parked": 0}
    rows = [projections.completion(id) for id in "abcd"]
    assert [row.state for row in rows if row] == ["dropped", "trained", "waiting", "not_trainable"]


def test_held_sessions_of_a_checkpoint_are_shown_again(registry: Registry, lease: Lease) -> None:
    """Whatever became of them after it; what was trained before it, or never could be, stays as it is."""
    projections = registry.projections
    states: list[CompletionState] = ["waiting", "dropped", "expired", "parked", "not_trainable"]
    projections.save("p", [completion(state, session_id="s", state=state) for state in states], [update_row(1)], lease)
    projections.save("p", [completion("old", session_id="old")], [], lease)
    projections.set_outcome("p", ["old"], "trained", 1, lease)
    projections.take_back("p", 1, [], lease)
    projections.hold("p", ["s", "old", "unknown"], "scoring", lease)
    rows = [projections.completion(id) for id in [*states, "old"]]
    assert [row.state for row in rows if row] == [*["scoring"] * 4, "not_trainable", "trained"]


def test_a_fenced_learner_shows_nothing(registry: Registry, lease: Lease, clock: Clock) -> None:
    """After a takeover the former learner's writes are refused, and what its successor shows stays."""
    clock.tick(3601)
    new = registry.leases.acquire("learner:p", "two", 3600)
    assert new is not None
    registry.projections.save("p", [completion("c")], [update_row(1)], new)
    registry.projections.set_outcome("p", ["s"], "trained", 1, new)
    registry.projections.set_published("p", [1], 4, new)
    shown = contents(registry)
    for write in (
        lambda: registry.projections.save("p", [completion("c")], [update_row(1)], lease),
        lambda: registry.projections.set_outcome("p", ["s"], "dropped", None, lease),
        lambda: registry.projections.set_published("p", [1], 5, lease),
        lambda: registry.projections.take_back("p", 0, ["c"], lease),
    ):
        with pytest.raises(LeaseLost, match="one no longer holds"):
            write()
    assert contents(registry) == shown


def test_updates_are_listed_newest_first_in_pages(registry: Registry, lease: Lease) -> None:
    """updates() goes down from the newest, and `before` continues it."""
    registry.projections.save("p", [], [update_row(n) for n in range(1, 6)], lease)
    assert [row.number for row in registry.projections.updates("p", 2)] == [5, 4]
    assert [row.number for row in registry.projections.updates("p", 2, before=4)] == [3, 2]


# --- times and the connection


@given(st.datetimes(), st.integers(-14 * 60 + 1, 14 * 60 - 1))
def test_times_keep_their_instant(naive: datetime, offset: int) -> None:
    """Any aware time is stored as UTC and comes back as the same instant in UTC, from either kind of column."""
    instant = naive.replace(year=2026, tzinfo=timezone(timedelta(minutes=offset)))
    kind, dialect = UtcDateTime(), sqlite.dialect()
    stored = kind.process_bind_param(instant, dialect)
    assert stored is not None
    assert stored == instant
    for read in (stored, stored.replace(tzinfo=None)):
        back = kind.process_result_value(read, dialect)
        assert back is not None
        assert (back, back.tzinfo) == (instant, UTC)


def test_times_without_an_offset_are_refused() -> None:
    """A time whose zone is unknown is not stored."""
    with pytest.raises(ValueError, match="no UTC offset"):
        UtcDateTime().process_bind_param(datetime(2026, 1, 1), sqlite.dialect())


def test_sqlite_is_durable_and_checks_references(tmp_path: Path) -> None:
    """SQLite connections use the write-ahead log, full syncs, foreign keys and a patient lock."""
    engine = make_engine(f"sqlite:///{tmp_path / 'registry.db'}")
    with engine.connect() as connection:
        pragmas = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        found = [connection.execute(text(f"PRAGMA {name}")).scalar() for name in pragmas]
    engine.dispose()
    assert found == ["wal", 2, 1, 30_000]
