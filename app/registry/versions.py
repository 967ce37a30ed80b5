"""Versions: what the learner published, in which state it is, and which one is live."""

from collections.abc import Callable, Mapping, Sequence

from sqlalchemy import func, or_, select, update

from app.errors import Conflict
from app.events.schema import RollbackEvent
from app.registry import audit, deployments
from app.registry.database import Database, changed
from app.registry.deployments import unknown_version
from app.registry.errors import NumberTaken
from app.registry.leases import fence
from app.registry.models import Deployment, Policy, Version
from app.registry.policies import locked
from app.registry.records import (
    DeploymentRecord,
    Lease,
    NewVersion,
    RejectedBy,
    VersionRecord,
    record_of,
    values_of,
)


class VersionStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, new: NewVersion, lease: Lease) -> VersionRecord:
        """Store a version, if `lease` still holds; the same number and hash again returns what is stored.

        A version of an epoch that is over is stored as rejected. Raises LeaseLost, NotFound (policy),
        NumberTaken for a number that has another hash, and Conflict for an epoch that the registry has not reached.
        """
        with self._database.write() as session:
            fence(session, self._database, lease)
            epoch = locked(session, new.policy).epoch
            stored = session.get(Version, (new.policy, new.number))
            if stored is None:
                stored = self._row(new, epoch)
                session.add(stored)
            elif stored.sha256 != new.sha256:
                raise NumberTaken(
                    f"version {new.number} of {new.policy!r} exists with sha256 {stored.sha256}, not "
                    f"{new.sha256}: a number is never used twice; publish under a new one"
                )
            return record_of(VersionRecord, stored)

    def get(self, policy: str, n: int) -> VersionRecord:
        """One version; raises NotFound."""
        with self._database.read() as session:
            version = session.get(Version, (policy, n))
            if version is None:
                raise unknown_version(policy, n)
            return record_of(VersionRecord, version)

    def list(self, policy: str, limit: int = 200, before: int | None = None) -> Sequence[VersionRecord]:
        """The newest versions first, with numbers below `before`."""
        query = select(Version).where(Version.policy == policy).order_by(Version.number.desc()).limit(limit)
        if before is not None:
            query = query.where(Version.number < before)
        with self._database.read() as session:
            return [record_of(VersionRecord, version) for version in session.scalars(query)]

    def latest_number(self, policy: str) -> int:
        """The highest number given so far; 0 if none."""
        with self._database.read() as session:
            return session.scalar(select(func.max(Version.number)).where(Version.policy == policy)) or 0

    def newest_checkpoint(self, policy: str) -> VersionRecord | None:
        """Where a learner starts: the newest version with files that the learner did not itself reject.

        One that an engine or the end of an epoch rejected is sound; replay from it meets the rollback.
        """
        query = (
            select(Version)
            .where(
                Version.policy == policy,
                or_(Version.rejected_by.is_(None), Version.rejected_by != "learner"),
                Version.deleted_at.is_(None),
            )
            .order_by(Version.number.desc())
            .limit(1)
        )
        with self._database.read() as session:
            version = session.scalars(query).one_or_none()
            return None if version is None else record_of(VersionRecord, version)

    def lag(self, policy: str, ends: Mapping[int, int]) -> int:
        """Events between the newest checkpoint and the log's end positions."""
        newest = self.newest_checkpoint(policy)
        position = newest.position if newest else {}
        return sum(end - position.get(str(part), 0) for part, end in ends.items())

    def newest_candidate(self, policy: str) -> VersionRecord | None:
        """What should go live next: the newest candidate of the policy's present epoch."""
        query = (
            select(Version)
            .join(Policy, (Policy.name == Version.policy) & (Policy.epoch == Version.epoch))
            .where(Version.policy == policy, Version.state == "candidate")
            .order_by(Version.number.desc())
            .limit(1)
        )
        with self._database.read() as session:
            version = session.scalars(query).one_or_none()
            return None if version is None else record_of(VersionRecord, version)

    def reject(self, policy: str, n: int, reason: str, by: RejectedBy) -> VersionRecord:
        """Keep a version from ever serving; one that is rejected already keeps its first reason.

        Raises NotFound, and Conflict for the live version.
        """
        reject = (
            update(Version)
            .where(Version.policy == policy, Version.number == n, Version.state.not_in(("rejected", "live")))
            .values(state="rejected", reason=reason, rejected_by=by)
        )
        with self._database.write() as session:
            session.execute(reject)
            version = session.get(Version, (policy, n))
            if version is None:
                raise unknown_version(policy, n)
            if version.state == "live":
                raise Conflict(f"version {n} of {policy!r} is live; roll back to another version first")
            return record_of(VersionRecord, version)

    def set_pinned(self, policy: str, n: int, pinned: bool, actor: str) -> None:
        """Keep a version's files from clean-up, or let go of them; audited. Raises NotFound."""
        pin = update(Version).where(Version.policy == policy, Version.number == n).values(pinned=pinned)
        with self._database.write() as session:
            if not changed(session, pin):
                raise unknown_version(policy, n)
            action = "pin_version" if pinned else "unpin_version"
            audit.add_entry(session, self._database.now(), actor, action, policy, {"version": n})

    def mark_deleted(self, policy: str, n: int) -> None:
        """Say that a version's files are gone. Call it before deleting them.

        Raises NotFound, and Conflict for a version that is live or pinned: its files must stay.
        """
        mark = (
            update(Version)
            .where(Version.policy == policy, Version.number == n)
            .where(Version.state != "live", Version.pinned.is_(False), Version.deleted_at.is_(None))
            .values(deleted_at=self._database.now())
        )
        with self._database.write() as session:
            session.execute(mark)
            version = session.get(Version, (policy, n))
            if version is None:
                raise unknown_version(policy, n)
            if version.deleted_at is None:
                why = "pinned" if version.pinned else version.state
                raise Conflict(f"version {n} of {policy!r} is {why}: its files must stay")

    def make_live(self, policy: str, n: int, actor: str, reason: str, expected_epoch: int) -> DeploymentRecord | None:
        """Point the policy at a candidate that the engines have loaded; its predecessors are retired.

        None, and no change, if the policy's epoch is another by now or the version is no candidate any more.
        """
        with self._database.write() as session:
            moved = deployments.publish(session, self._database.now(), policy, n, actor, reason, expected_epoch)
            return None if moved is None else record_of(DeploymentRecord, moved)

    def rollback(
        self, policy: str, to: int, actor: str, reason: str, event_factory: Callable[[int], RollbackEvent]
    ) -> DeploymentRecord:
        """Point the policy back at version `to` (0 = base) and begin a new epoch; audited.

        `event_factory` makes the event for the new epoch, which goes to the outbox in the same transaction. The
        version that is live may be `to`: learning then starts again from it. Raises NotFound, and Conflict
        for a version that is rejected or whose files are gone.
        """
        with self._database.write() as session:
            now = self._database.now()
            moved = deployments.roll_back(session, now, policy, to, actor, reason, event_factory)
            return record_of(DeploymentRecord, moved)

    def deployments(self, policy: str, limit: int = 200) -> Sequence[DeploymentRecord]:
        """The newest moves of the live pointer first."""
        query = select(Deployment).where(Deployment.policy == policy)
        with self._database.read() as session:
            rows = session.scalars(query.order_by(Deployment.id.desc()).limit(limit))
            return [record_of(DeploymentRecord, row) for row in rows]

    def _row(self, new: NewVersion, epoch: int) -> Version:
        if new.epoch > epoch:
            raise Conflict(
                f"version {new.number} of {new.policy!r} is of epoch {new.epoch}, but the registry is at epoch "
                f"{epoch}: it is older than the event log; restore a newer backup of the registry"
            )
        row = Version(**values_of(new), pinned=False, created_at=self._database.now(), deleted_at=None)
        row.rejected_by = "learner" if new.state == "rejected" else None
        if new.epoch < epoch and new.state == "candidate":
            row.state, row.rejected_by = "rejected", "epoch"
            row.reason = f"epoch {new.epoch} is over: the policy was rolled back"
        return row
