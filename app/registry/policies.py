"""Policies: one base model each, one pointer to the live version."""

from collections.abc import Sequence

from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app.errors import NotFound, SetupError
from app.registry import audit
from app.registry.database import Database, changed
from app.registry.models import Policy
from app.registry.records import PolicyRecord, record_of


def unknown_policy(name: str) -> NotFound:
    return NotFound(f"there is no policy {name!r}", param="policy")


def locked(session: Session, name: str) -> Policy:
    """The policy, held by this transaction alone until it ends; raises NotFound."""
    # NO KEY UPDATE: inserts that only refer to the policy, such as feedback, need not wait.
    query = select(Policy).where(Policy.name == name).with_for_update(key_share=True)
    policy = session.scalars(query).one_or_none()
    if policy is None:
        raise unknown_policy(name)
    return policy


class PolicyStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def ensure(
        self, name: str, base_model: str, fingerprint: str, reward_min: float, reward_max: float
    ) -> PolicyRecord:
        """The policy, created at the first call; raises SetupError where it exists on other terms."""
        policy = Policy(
            name=name,
            base_model=base_model,
            fingerprint=fingerprint,
            live_version=0,
            epoch=0,
            learning_paused=False,
            reward_min=reward_min,
            reward_max=reward_max,
            created_at=self._database.now(),
        )
        try:
            with self._database.write() as session:
                session.add(policy)
        except IntegrityError:
            return _checked(self.get(name), base_model, fingerprint, reward_min, reward_max)
        return record_of(PolicyRecord, policy)

    def get(self, name: str) -> PolicyRecord:
        """One policy; raises NotFound."""
        with self._database.read() as session:
            policy = session.get(Policy, name)
            if policy is None:
                raise unknown_policy(name)
            return record_of(PolicyRecord, policy)

    def list(self) -> Sequence[PolicyRecord]:
        """All policies by name."""
        with self._database.read() as session:
            return [record_of(PolicyRecord, p) for p in session.scalars(select(Policy).order_by(Policy.name))]

    def set_paused(self, name: str, paused: bool, actor: str) -> None:
        """Stop or resume learning (serving goes on); audited. Raises NotFound."""
        with self._database.write() as session:
            if not changed(session, update(Policy).where(Policy.name == name).values(learning_paused=paused)):
                raise unknown_policy(name)
            action = "pause_learning" if paused else "resume_learning"
            audit.add_entry(session, self._database.now(), actor, action, name, {})


def _checked(
    policy: PolicyRecord, base_model: str, fingerprint: str, reward_min: float, reward_max: float
) -> PolicyRecord:
    if policy.fingerprint != fingerprint:
        raise SetupError(
            f"policy {policy.name!r} belongs to the base {policy.base_model} (fingerprint "
            f"{policy.fingerprint}), but this is {base_model} (fingerprint {fingerprint}): its adapters fit "
            "only the base that they were trained on; use another policy name, or the right base",
            param="model",
        )
    if (policy.reward_min, policy.reward_max) != (reward_min, reward_max):
        raise SetupError(
            f"policy {policy.name!r} was created with rewards from {policy.reward_min:g} to "
            f"{policy.reward_max:g}, not from {reward_min:g} to {reward_max:g}: what its critic learned holds "
            "for that range only; use another policy name, or the old range",
            param="reward_range",
        )
    return policy
