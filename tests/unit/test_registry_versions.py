"""Versions and the live pointer: fenced writers, one live version, rollback in one piece."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_registry_support import START, Clock, new_version, publish, rollback_event

from app.errors import Conflict, NotFound
from app.events.schema import RollbackEvent
from app.registry import Registry
from app.registry.errors import LeaseLost
from app.registry.records import Lease

pytest_plugins = ["test_registry_support"]


def states(registry: Registry) -> dict[int, str]:
    return {version.number: version.state for version in registry.versions.list("p")}


def test_version_comes_back_as_it_was_stored(registry: Registry, lease: Lease) -> None:
    """A version keeps every field, and a metric that is not finite becomes null."""
    registry.versions.add(new_version(1, metrics={"kl": 0.1, "explained": float("nan")}), lease)
    stored = registry.versions.get("p", 1)
    assert stored.metrics == {"kl": 0.1, "explained": None}
    assert (stored.position, stored.settings, stored.created_at) == ({"0": 1}, {"lr": 1e-4}, START)
    assert (stored.state, stored.rejected_by, stored.pinned, stored.deleted_at) == ("candidate", None, False, None)


def test_replayed_version_is_the_same_version(registry: Registry, lease: Lease) -> None:
    """The same number and hash again changes nothing, whatever state the version has by now."""
    published = publish(registry, lease, 1)
    assert registry.versions.add(new_version(1), lease) == published


def test_a_number_never_stands_for_two_versions(registry: Registry, lease: Lease) -> None:
    """The same number with another hash is refused."""
    registry.versions.add(new_version(1), lease)
    with pytest.raises(Conflict, match="never used twice"):
        registry.versions.add(new_version(1, sha256="f" * 64), lease)


def test_paused_writer_cannot_add_after_a_takeover(registry: Registry, lease: Lease, clock: Clock) -> None:
    """A writer whose lease went to another cannot add a version, even if it holds the lease's old token."""
    clock.tick(3601)
    new = registry.leases.acquire("learner:p", "two", 3600)
    assert new is not None
    with pytest.raises(LeaseLost, match="one no longer holds"):
        registry.versions.add(new_version(1), lease)
    registry.versions.add(new_version(1), new)
    assert registry.versions.latest_number("p") == 1


def test_lapsed_writer_cannot_add(registry: Registry, lease: Lease, clock: Clock) -> None:
    """A lease that ran out fences its holder, also while nobody else has taken it."""
    clock.tick(3600)
    with pytest.raises(LeaseLost):
        registry.versions.add(new_version(1), lease)
    registry.versions.add(new_version(1), registry.leases.renew(lease, 10))


def test_make_live_retires_what_came_before(registry: Registry, lease: Lease) -> None:
    """Going live retires the former live version and older candidates, and leaves younger ones."""
    publish(registry, lease, 1)
    for number in (2, 3, 4):
        registry.versions.add(new_version(number), lease)
    moved = registry.versions.make_live("p", 3, "deployer", "loaded", 0)
    assert moved is not None
    assert (moved.from_version, moved.to_version, moved.kind, moved.epoch) == (1, 3, "publish", 0)
    assert states(registry) == {1: "retired", 2: "retired", 3: "live", 4: "candidate"}
    assert registry.versions.get("p", 2).reason == "superseded"
    assert registry.policies.get("p").live_version == 3
    assert registry.versions.deployments("p")[0] == moved


def test_make_live_with_a_stale_epoch_changes_nothing(registry: Registry, lease: Lease) -> None:
    """A deployer that did not see a rollback moves nothing."""
    publish(registry, lease, 1)
    registry.versions.rollback("p", 0, "ann", "worse", rollback_event(0))
    registry.versions.add(new_version(2, epoch=1), lease)
    before = (states(registry), registry.policies.get("p"), registry.versions.deployments("p"))
    assert registry.versions.make_live("p", 2, "deployer", "loaded", 0) is None
    assert (states(registry), registry.policies.get("p"), registry.versions.deployments("p")) == before


def test_only_a_candidate_goes_live(registry: Registry, lease: Lease) -> None:
    """make_live on a rejected, live or unknown version moves nothing."""
    publish(registry, lease, 1)
    registry.versions.add(new_version(2), lease)
    registry.versions.reject("p", 2, "an engine did not load it", "engine")
    assert [registry.versions.make_live("p", n, "d", "", 0) for n in (1, 2, 9)] == [None, None, None]
    assert registry.policies.get("p").live_version == 1


def test_version_of_a_past_epoch_is_stored_as_rejected(registry: Registry, lease: Lease) -> None:
    """A version that was under way during a rollback never goes live, but is a checkpoint to resume from."""
    publish(registry, lease, 1)
    registry.versions.rollback("p", 0, "ann", "worse", rollback_event(0))
    late = registry.versions.add(new_version(2), lease)
    assert (late.state, late.rejected_by) == ("rejected", "epoch")
    assert late.reason == "epoch 0 is over: the policy was rolled back"
    assert registry.versions.newest_candidate("p") is None
    assert registry.versions.newest_checkpoint("p") == late


def test_version_of_a_future_epoch_is_refused(registry: Registry, lease: Lease) -> None:
    """A registry restored from an old backup says so, instead of keeping versions that can never go live."""
    with pytest.raises(Conflict, match="older than the event log"):
        registry.versions.add(new_version(1, epoch=2), lease)


def test_newest_checkpoint_skips_the_learners_own_rejections(registry: Registry, lease: Lease) -> None:
    """A learner resumes from the newest version that it did not reject and whose files are there."""
    registry.versions.add(new_version(1), lease)
    registry.versions.add(new_version(2), lease)
    registry.versions.add(new_version(3), lease)
    registry.versions.add(new_version(4, state="rejected", reason="KL over the limit"), lease)
    registry.versions.mark_deleted("p", 3)
    registry.versions.reject("p", 2, "an engine did not load it", "engine")
    newest = registry.versions.newest_checkpoint("p")
    assert newest is not None
    assert newest.number == 2


def test_newest_candidate_is_of_the_present_epoch(registry: Registry, lease: Lease) -> None:
    """After a rollback only versions of the new epoch are offered, also below the live version's number."""
    for number in (1, 2, 5):
        publish(registry, lease, number)
    registry.versions.add(new_version(6), lease)
    registry.versions.rollback("p", 5, "ann", "worse", rollback_event(5))
    assert registry.versions.newest_candidate("p") is None
    registry.versions.add(new_version(4, epoch=1), lease)
    newest = registry.versions.newest_candidate("p")
    assert newest is not None
    assert newest.number == 4


def test_rollback_moves_everything_at_once(registry: Registry, lease: Lease) -> None:
    """Pointer, epoch, states, deployment, event and audit entry change together."""
    for number in (1, 2, 3):
        publish(registry, lease, number)
    registry.versions.add(new_version(4), lease)
    moved = registry.versions.rollback("p", 1, "ann", "worse", rollback_event(1))
    assert (moved.from_version, moved.to_version, moved.kind, moved.epoch) == (3, 1, "rollback", 1)
    assert states(registry) == {1: "live", 2: "retired", 3: "rolled_back", 4: "rolled_back"}
    policy = registry.policies.get("p")
    assert (policy.live_version, policy.epoch) == (1, 1)
    [pending] = registry.outbox.pending("p", START, 10)
    assert isinstance(pending.event, RollbackEvent)
    assert (pending.event.to, pending.event.epoch) == (1, 1)
    [entry] = registry.audit.list(10, "p")
    assert (entry.actor, entry.action, entry.detail["to"]) == ("ann", "rollback", 1)


def test_rollback_that_fails_late_changes_nothing(registry: Registry, lease: Lease) -> None:
    """An error while the event is made leaves pointer, epoch, states and trail as they were."""
    publish(registry, lease, 1)
    before = (states(registry), registry.policies.get("p"), registry.versions.deployments("p"))

    def fails(epoch: int) -> RollbackEvent:
        raise RuntimeError(f"epoch {epoch}")

    with pytest.raises(RuntimeError, match="epoch 1"):
        registry.versions.rollback("p", 0, "ann", "worse", fails)
    assert (states(registry), registry.policies.get("p"), registry.versions.deployments("p")) == before
    assert not registry.audit.list(10)


def test_rollback_to_the_live_version_begins_an_epoch(registry: Registry, lease: Lease) -> None:
    """Rolling back to what is live keeps it live and restarts learning from it."""
    publish(registry, lease, 1)
    moved = registry.versions.rollback("p", 1, "ann", "restart", rollback_event(1))
    assert (moved.from_version, moved.to_version, moved.epoch) == (1, 1, 1)
    assert states(registry) == {1: "live"}


def test_rollback_refuses_what_cannot_serve(registry: Registry, lease: Lease) -> None:
    """Unknown, rejected and deleted versions are refused with the reason, and nothing moves."""
    for number in (1, 3):
        publish(registry, lease, number)
    registry.versions.add(new_version(2, state="rejected", reason="KL over the limit"), lease)
    registry.versions.mark_deleted("p", 1)
    for to, error, words in [
        (9, NotFound, "no version 9"),
        (2, Conflict, r"rejected \(KL over the limit\)"),
        (1, Conflict, r"files of version 1 .* \(retired\) were deleted"),
    ]:
        with pytest.raises(error, match=words):
            registry.versions.rollback("p", to, "ann", "worse", rollback_event(to))
    assert registry.policies.get("p").epoch == 0
    with pytest.raises(NotFound, match="no policy 'q'"):
        registry.versions.rollback("q", 0, "ann", "worse", rollback_event(0))


def test_rollback_race_gives_each_its_epoch(registry: Registry, lease: Lease) -> None:
    """Rollbacks at once happen one after the other: no epoch is given twice."""
    publish(registry, lease, 1)
    with ThreadPoolExecutor(8) as pool:
        moved = list(pool.map(lambda _: registry.versions.rollback("p", 1, "a", "r", rollback_event(1)), range(8)))
    assert sorted(move.epoch for move in moved) == list(range(1, 9))
    assert registry.policies.get("p").epoch == 8


def test_moves_at_once_form_one_chain(registry: Registry, lease: Lease) -> None:
    """Publishing and rolling back from 12 threads: every move starts where the one before it ended.

    A version of an epoch that is over never goes live but by a rollback to it.
    """
    for number in range(1, 41):
        registry.versions.add(new_version(number), lease)

    def move(n: int) -> None:
        epoch = registry.policies.get("p").epoch
        if n % 5:
            registry.versions.make_live("p", n, "deployer", "loaded", epoch)
        else:
            registry.versions.rollback("p", n // 2 if n % 10 else 0, "ann", "worse", rollback_event(n))
            latest = registry.versions.latest_number("p")
            with suppress(Conflict):  # another thread took the number, or the epoch has moved on
                registry.versions.add(new_version(latest + 1, epoch=epoch + 1, sha256=f"{n:064x}"), lease)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(move, range(1, 61)))
    moves = registry.versions.deployments("p")[::-1]
    assert [move.from_version for move in moves] == [0, *(move.to_version for move in moves[:-1])]
    assert sum(move.kind == "rollback" for move in moves) == registry.policies.get("p").epoch == 12
    assert [move.epoch for move in moves] == sorted(move.epoch for move in moves)
    epochs = {version.number: version.epoch for version in registry.versions.list("p")}
    assert all(epochs[move.to_version] == move.epoch for move in moves if move.kind == "publish")
    pointer = registry.policies.get("p").live_version
    assert pointer == moves[-1].to_version
    assert [number for number, state in states(registry).items() if state == "live"] == ([pointer] if pointer else [])


def test_the_live_version_cannot_be_rejected(registry: Registry, lease: Lease) -> None:
    """Rejecting what serves is refused; a version rejected twice keeps its first reason."""
    publish(registry, lease, 1)
    with pytest.raises(Conflict, match="is live"):
        registry.versions.reject("p", 1, "late", "engine")
    registry.versions.add(new_version(2), lease)
    registry.versions.reject("p", 2, "first", "engine")
    assert registry.versions.reject("p", 2, "second", "learner").reason == "first"
    with pytest.raises(NotFound):
        registry.versions.reject("p", 3, "no such", "engine")


def test_live_and_pinned_files_stay(registry: Registry, lease: Lease) -> None:
    """Files of a live or pinned version cannot be marked as deleted; pinning is audited."""
    publish(registry, lease, 1)
    publish(registry, lease, 2)
    registry.versions.set_pinned("p", 1, True, "ann")
    for number, words in ((1, "pinned"), (2, "live")):
        with pytest.raises(Conflict, match=words):
            registry.versions.mark_deleted("p", number)
    registry.versions.set_pinned("p", 1, False, "ann")
    registry.versions.mark_deleted("p", 1)
    assert registry.versions.get("p", 1).deleted_at == START
    assert [entry.action for entry in registry.audit.list(10)] == ["unpin_version", "pin_version"]


def test_versions_are_listed_newest_first_in_pages(registry: Registry, lease: Lease) -> None:
    """list() goes down from the newest, and `before` continues it."""
    for number in range(1, 6):
        registry.versions.add(new_version(number), lease)
    page = registry.versions.list("p", limit=2)
    assert [version.number for version in page] == [5, 4]
    assert [v.number for v in registry.versions.list("p", limit=2, before=4)] == [3, 2]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.sampled_from(["add", "live", "back"]), st.integers(0, 6)), max_size=15))
def test_the_pointer_and_the_states_agree(registry: Registry, lease: Lease, steps: list[Any]) -> None:
    """Whatever the order of adds, publishes and rollbacks, the live version is the one pointed at, or the base."""
    policy = f"p{len(registry.policies.list())}"
    registry.policies.ensure(policy, "tiny", "f1", -1, 1)
    versions = registry.versions
    for step, n in steps:
        epoch = registry.policies.get(policy).epoch
        if step == "add":
            versions.add(new_version(versions.latest_number(policy) + 1, policy=policy, epoch=epoch), lease)
        elif step == "live":
            versions.make_live(policy, n, "d", "", epoch)
        elif n <= versions.latest_number(policy):
            versions.rollback(
                policy,
                n,
                "a",
                "r",
                lambda e: RollbackEvent(policy=policy, session_id="r", at=START, to=0, epoch=e, reason="r"),
            )
        live = [version.number for version in versions.list(policy) if version.state == "live"]
        pointer = registry.policies.get(policy).live_version
        assert live == ([pointer] if pointer else [])
    moves = versions.deployments(policy)
    assert [move.from_version for move in moves[:-1]] == [move.to_version for move in moves[1:]]
