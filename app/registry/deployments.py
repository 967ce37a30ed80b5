"""Moves of a policy's live pointer, inside a transaction that is under way.

Both moves first take the policy's row, so that they happen one after the other.
"""

from collections.abc import Callable
from datetime import datetime

from sqlalchemy import update
from sqlalchemy.orm import Session

from app.errors import Conflict, NotFound
from app.events.schema import RollbackEvent
from app.registry import audit, outbox
from app.registry.database import changed
from app.registry.models import Deployment, Policy, Version
from app.registry.policies import locked
from app.registry.records import DeploymentKind


def unknown_version(policy: str, number: int) -> NotFound:
    return NotFound(f"policy {policy!r} has no version {number}", param="version")


def publish(
    session: Session, at: datetime, name: str, number: int, actor: str, reason: str, expected_epoch: int
) -> Deployment | None:
    """Make a candidate live, or change nothing and return None if it may not go live any more."""
    policy = locked(session, name)
    if policy.epoch != expected_epoch:
        return None
    # A candidate is always of the present epoch: a rollback leaves none behind, and none of the past is added.
    goes_live = (
        update(Version)
        .where(
            Version.policy == name,
            Version.number == number,
            Version.state == "candidate",
            Version.deleted_at.is_(None),
        )
        .values(state="live")
    )
    if not changed(session, goes_live):
        return None
    others = update(Version).where(Version.policy == name, Version.number != number)
    session.execute(others.where(Version.state == "live").values(state="retired"))
    session.execute(
        others.where(Version.state == "candidate", Version.number < number).values(state="retired", reason="superseded")
    )
    return _move(session, at, policy, number, actor, reason, "publish")


def roll_back(
    session: Session,
    at: datetime,
    name: str,
    to: int,
    actor: str,
    reason: str,
    event_factory: Callable[[int], RollbackEvent],
) -> Deployment:
    """Make version `to` (0 = base) live whatever came after it, and begin a new epoch.

    Raises NotFound for an unknown policy or version, Conflict for a version that cannot serve.
    """
    policy = locked(session, name)
    if to != 0:
        _restore(session, name, to)
    # Candidates below `to` go too: they belong to the epoch that ends here and can never be live.
    session.execute(
        update(Version)
        .where(Version.policy == name, Version.number != to, Version.state.in_(("live", "candidate")))
        .values(state="rolled_back", reason=f"rolled back to {to}: {reason}")
    )
    policy.epoch += 1
    outbox.add_entry(session, at, event_factory(policy.epoch))
    deployment = _move(session, at, policy, to, actor, reason, "rollback")
    detail = {"from": deployment.from_version, "to": to, "reason": reason, "epoch": policy.epoch}
    audit.add_entry(session, at, actor, "rollback", name, detail)
    return deployment


def _restore(session: Session, name: str, number: int) -> None:
    restore = (
        update(Version)
        .where(
            Version.policy == name,
            Version.number == number,
            Version.state != "rejected",
            Version.deleted_at.is_(None),
        )
        .values(state="live", reason=None)
    )
    if changed(session, restore):
        return
    version = session.get(Version, (name, number))
    if version is None:
        raise unknown_version(name, number)
    if version.state == "rejected":
        raise Conflict(
            f"version {number} of {name!r} is rejected ({version.reason}); choose one that has served", param="to"
        )
    raise Conflict(
        f"the files of version {number} of {name!r} ({version.state}) were deleted at "
        f"{version.deleted_at}; choose a newer version, or 0 for the base",
        param="to",
    )


def _move(
    session: Session, at: datetime, policy: Policy, to: int, actor: str, reason: str, kind: DeploymentKind
) -> Deployment:
    deployment = Deployment(
        policy=policy.name,
        at=at,
        actor=actor,
        from_version=policy.live_version,
        to_version=to,
        reason=reason,
        kind=kind,
        epoch=policy.epoch,
    )
    policy.live_version = to
    session.add(deployment)
    session.flush()
    return deployment
