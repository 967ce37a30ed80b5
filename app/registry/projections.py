"""Tables that the learner writes from the log, for people to read; a replay writes them again."""

from collections.abc import Sequence

import sqlalchemy as sa

from app.registry.database import Database
from app.registry.leases import fence
from app.registry.models import HELD, HELD_STATES, Completion, Update
from app.registry.records import CompletionRow, CompletionState, Lease, UpdateRow, record_of, values_of

BATCH = 1000
UNSETTLED = ("waiting", *HELD_STATES)
UNTRAINED = (*UNSETTLED, "dropped", "expired")


class ProjectionStore:
    """Every write sets what the log says and can be repeated. One process writes for a policy: the learner, whose
    lease fences each write (LeaseLost): one that was paused too long must not undo what its successor has shown.

    Update numbers are a policy's own and never used twice, also not after a rollback.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def save(
        self, policy: str, completions: Sequence[CompletionRow], updates: Sequence[UpdateRow], lease: Lease
    ) -> None:
        """Insert rows, or replace those with the same key, in one transaction; made for batches up to 200."""
        by_id = {row.id: values_of(row) for row in completions}
        by_number = {row.number: values_of(row) for row in updates}
        with self._database.write() as session:
            fence(session, self._database, lease)
            if by_id:
                session.execute(sa.delete(Completion).where(Completion.id.in_(by_id)))
                session.execute(sa.insert(Completion), list(by_id.values()))
            if by_number:
                session.execute(sa.delete(Update).where(Update.policy == policy, Update.number.in_(by_number)))
                session.execute(sa.insert(Update), list(by_number.values()))

    def set_outcome(
        self, policy: str, session_ids: Sequence[str], state: CompletionState, update: int | None, lease: Lease
    ) -> None:
        """Say what became of the completions of these sessions that still wait, for their end or for scores."""
        with self._database.write() as session:
            fence(session, self._database, lease)
            session.execute(
                sa.update(Completion)
                .where(
                    Completion.policy == policy,
                    Completion.session_id.in_(session_ids),
                    Completion.state.in_(UNSETTLED),
                )
                .values(state=state, rollout_update=update)
            )

    def take_back(self, policy: str, updates_after: int, waiting: Sequence[str], lease: Lease) -> None:
        """Forget what was shown after a checkpoint: later updates, and what became of completions that wait in it.

        The events after the checkpoint need not be read in the same order again, and so need not end the same.
        """
        with self._database.write() as session:
            fence(session, self._database, lease)
            session.execute(sa.delete(Update).where(Update.policy == policy, Update.number > updates_after))
            unsettled = sa.update(Completion).values(state="waiting", rollout_update=None, trained_version=None)
            session.execute(unsettled.where(Completion.policy == policy, Completion.rollout_update > updates_after))
            gone = unsettled.where(Completion.state.in_(UNTRAINED))
            for start in range(0, len(waiting), BATCH):
                session.execute(gone.where(Completion.id.in_(waiting[start : start + BATCH])))

    def hold(self, policy: str, session_ids: Sequence[str], state: CompletionState, lease: Lease) -> None:
        """Show the sessions that a checkpoint holds for scores, whatever became of them after it."""
        shown = sa.update(Completion).values(state=state).where(Completion.state.in_(UNTRAINED))
        with self._database.write() as session:
            fence(session, self._database, lease)
            for start in range(0, len(session_ids), BATCH):
                some = Completion.session_id.in_(session_ids[start : start + BATCH])
                session.execute(shown.where(Completion.policy == policy, some))

    def set_published(self, policy: str, updates: Sequence[int], version: int, lease: Lease) -> None:
        """Name the version that these updates went into, on them and on what they were trained on."""
        with self._database.write() as session:
            fence(session, self._database, lease)
            session.execute(
                sa.update(Update).where(Update.policy == policy, Update.number.in_(updates)).values(version=version)
            )
            session.execute(
                sa.update(Completion)
                .where(Completion.policy == policy, Completion.rollout_update.in_(updates))
                .values(trained_version=version)
            )

    def held(self, policy: str) -> dict[str, int]:
        """How many completions wait for scores, by state: `scoring` and `parked`."""
        query = sa.select(Completion.state, sa.func.count()).where(Completion.policy == policy, HELD)
        with self._database.read() as session:
            counts = {state: count for state, count in session.execute(query.group_by(Completion.state))}
        return {state: counts.get(state, 0) for state in HELD_STATES}

    def completion(self, id: str) -> CompletionRow | None:
        """One completion, if the learner has met it."""
        with self._database.read() as session:
            row = session.get(Completion, id)
            return None if row is None else record_of(CompletionRow, row)

    def session(self, policy: str, session_id: str) -> list[CompletionRow]:
        """A session's completions in the order of their times."""
        query = (
            sa.select(Completion)
            .where(Completion.policy == policy, Completion.session_id == session_id)
            .order_by(Completion.at, Completion.id)
        )
        with self._database.read() as session:
            return [record_of(CompletionRow, row) for row in session.scalars(query)]

    def updates(self, policy: str, limit: int = 200, before: int | None = None) -> list[UpdateRow]:
        """The newest updates first, with numbers below `before`."""
        query = sa.select(Update).where(Update.policy == policy).order_by(Update.number.desc()).limit(limit)
        if before is not None:
            query = query.where(Update.number < before)
        with self._database.read() as session:
            return [record_of(UpdateRow, row) for row in session.scalars(query)]

    def update(self, policy: str, number: int) -> UpdateRow | None:
        """One update, if the learner has made it."""
        with self._database.read() as session:
            row = session.get(Update, (policy, number))
            return None if row is None else record_of(UpdateRow, row)
