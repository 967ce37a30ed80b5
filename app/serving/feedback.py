"""Feedback and session ends: stored, promised and appended, each counting once."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from anyio import to_thread

from app.errors import InvalidRequest, NotFound
from app.events.schema import DEFAULT_SIGNAL, FeedbackEvent, SessionClosedEvent
from app.registry import Registry
from app.registry.records import FeedbackRecord, KeyRecord, NewFeedback
from app.security.receipts import WHOLE, Receipts
from app.serving.relay import Relay
from app.serving.sessions import internal_session, own_completion


@dataclass(frozen=True, slots=True)
class Judgement:
    """A judgement as it came, already of the right types: exactly one target, exactly one value."""

    reward: float
    signal: str = DEFAULT_SIGNAL
    completion_id: str | None = None
    session_id: str | None = None
    final: bool = True
    id: str | None = None
    comment: str | None = None
    metadata: dict[str, Any] | None = None


class FeedbackService:
    """One policy's feedback.

    Args:
        scored: whether reward functions judge sessions, so that one may be closed without any client's reward.
    """

    def __init__(
        self,
        registry: Registry,
        relay: Relay,
        receipts: Receipts,
        policy: str,
        clock: Callable[[], datetime],
        scored: bool = False,
    ) -> None:
        self._registry = registry
        self._relay = relay
        self._receipts = receipts
        self._policy = policy
        self._clock = clock
        self._scored = scored

    async def judge(self, key: KeyRecord, judgement: Judgement) -> FeedbackRecord:
        """Accept a judgement.

        Raises NotFound for an unknown or somebody else's completion, Conflict for a reused id or a closed rollout.
        """
        event = FeedbackEvent(
            event_id=uuid.uuid4().hex,
            policy=self._policy,
            session_id=self._session_of(key, judgement),
            at=self._clock(),
            completion_id=judgement.completion_id,
            signal=judgement.signal,
            reward=judgement.reward,
            final=judgement.final,
            key_id=key.id,
            comment=judgement.comment,
            metadata=judgement.metadata,
        )
        new = NewFeedback(
            id=judgement.id,
            policy=self._policy,
            session_id=event.session_id,
            completion_id=judgement.completion_id,
            signal=judgement.signal,
            reward=judgement.reward,
            final=judgement.final,
            closes=False,
            key_id=key.id,
            comment=judgement.comment,
            metadata=judgement.metadata,
        )
        return await self._store(new, event)

    async def close(self, key: KeyRecord, name: str) -> FeedbackRecord | None:
        """End a session: with rewards or reward functions its rollout is closed, else it waits for final feedback."""
        session = internal_session(key, name, "session id")
        event = SessionClosedEvent(event_id=uuid.uuid4().hex, policy=self._policy, session_id=session, at=self._clock())
        rewards = self._scored or await to_thread.run_sync(self._registry.feedback.has_rewards, self._policy, session)
        if not rewards:
            return None
        new = NewFeedback(
            id=None,
            policy=self._policy,
            session_id=session,
            completion_id=None,
            reward=None,
            final=False,
            closes=True,
            key_id=key.id,
        )
        return await self._store(new, event)

    async def _store(self, new: NewFeedback, event: FeedbackEvent | SessionClosedEvent) -> FeedbackRecord:
        stored = await to_thread.run_sync(self._registry.feedback.record, new, event)
        if not stored.duplicate:
            await self._relay.deliver(event)
        return stored

    def _session_of(self, key: KeyRecord, judgement: Judgement) -> str:
        if judgement.completion_id is None:
            return internal_session(key, judgement.session_id or "", "session_id")
        receipt = self._receipts.read(judgement.completion_id)
        if receipt.policy != self._policy:
            raise NotFound(
                f"the completion is of policy {receipt.policy!r}, this service has {self._policy!r}",
                param="completion_id",
            )
        own_completion(key, receipt.key_id, judgement.completion_id)
        if receipt.choice == WHOLE:
            raise InvalidRequest(
                "completion_id names an answer with several choices; judge one by its choices[i].completion_id",
                param="completion_id",
            )
        return receipt.session_id
