"""One chat call as the serving side sees it, and the answer that grows from it."""

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from app.engines.base import Chunk, FinishReason, GenerateRequest, TokenLogprob
from app.registry.records import KeyRecord
from app.security.receipts import WHOLE, Receipt


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A validated request: what to sample, how often, for whom.

    `pinned` is the version that the model name asked for; None follows the live one. `session` is the internal
    session id (`key:name`), None where the completion is its own session. `store` false means: serve, but
    neither log content nor train.
    """

    request: GenerateRequest
    pinned: int | None
    n: int
    key: KeyRecord
    uid: str
    policy: str
    at: datetime
    session: str | None = None
    store: bool = True
    trace_id: str | None = None

    def request_for(self, choice: int) -> GenerateRequest:
        """The request of one choice: a seed gives each choice an own, reproducible one."""
        request = replace(self.request, affinity=self.session)
        sampling = request.sampling
        if sampling.seed is None or choice == 0:
            return request
        return replace(request, sampling=sampling.model_copy(update={"seed": sampling.seed + choice}))

    def receipt(self, choice: int) -> Receipt:
        return Receipt(self.uid, self.policy, self.key.id, self.session, choice)

    @property
    def whole_receipt(self) -> Receipt:
        """The receipt of the answer: that of its only choice, or one that cannot be judged."""
        return self.receipt(0 if self.n == 1 else WHOLE)


def without_place(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call as OpenAI shows it in a whole answer: without its place in a stream."""
    return {name: value for name, value in call.items() if name != "index"}


@dataclass
class Answer:
    """All that was sampled for one choice, gathered chunk by chunk."""

    prompt_ids: tuple[int, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    details: list[TokenLogprob] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    finish_reason: FinishReason | None = None
    sampled: int | None = None

    @property
    def complete(self) -> bool:
        """Whether every token that the engine counted is here, with its logprob."""
        return len(self.token_ids) == len(self.logprobs) and self.sampled in (None, len(self.token_ids))

    def add(self, chunk: Chunk) -> None:
        if chunk.prompt_ids is not None:
            self.prompt_ids = chunk.prompt_ids
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.details += chunk.details
        for part in chunk.tool_calls:
            self._add_tool_call(part)
        self.text += chunk.text
        self.reasoning += chunk.reasoning
        self.sampled = chunk.sampled if chunk.sampled is not None else self.sampled
        self.finish_reason = chunk.finish_reason or self.finish_reason

    def _add_tool_call(self, part: dict[str, Any]) -> None:
        """Engines may send a call whole, or its head first and then its arguments piece by piece."""
        known = next((call for call in self.tool_calls if call["index"] == part["index"]), None)
        if known is None:
            self.tool_calls.append({**part, "function": {"arguments": "", **part["function"]}})
        else:
            known["function"]["arguments"] += part["function"].get("arguments") or ""
