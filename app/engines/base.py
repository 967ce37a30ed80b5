"""The Engine's interface: sample with an adapter version, load it, unload it."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from app.errors import Unavailable
from app.events.schema import Sampling

FinishReason = Literal["stop", "length", "tool_calls", "abort"]
BASE_VERSION = 0


@dataclass(frozen=True, slots=True)
class Adapter:
    """One immutable adapter version on disk (a peft directory)."""

    policy: str
    version: int
    path: Path

    @property
    def name(self) -> str:
        return f"{self.policy}@{self.version}"


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One choice to sample: the conversation as the client sent it, and how to sample."""

    messages: list[dict[str, Any]]
    sampling: Sampling
    tools: list[dict[str, Any]] | None = None
    top_logprobs: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    response_format: dict[str, Any] | None = None
    tool_choice: Any = None
    affinity: str | None = None  # requests with the same one share a long prompt prefix


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token with the alternatives, for the client's `logprobs`."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one answer.

    The first chunk carries `prompt_ids`. `token_ids` and `logprobs` have equal length and include tokens
    that give no text (end of turn, the inside of a stop string). `text` is what the client may see, `reasoning` what
    the model thought before it, where the engine tells them apart. The last chunk, and only it, has a `finish_reason`;
    `sampled` is there how many tokens the engine counted over the whole answer, None where it does not say.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    details: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[dict[str, Any], ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    finish_reason: FinishReason | None = None
    reasoning: str = ""
    sampled: int | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine serves: checked against the policy before traffic."""

    model: str
    fingerprint: str
    dtype: str
    max_context: int
    slots: int


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine as an operator sees it; `problem` says why it is not in service."""

    name: str
    serving: bool
    problem: str
    running: int
    versions: tuple[int, ...]


class EngineLost(Unavailable):
    """The connection to the engine failed."""


class EngineSlow(EngineLost):
    """The engine did not answer in time; it may still be there."""


class VersionMissing(Unavailable):
    """The engine has lost a version that it is asked to sample from; loading it again helps."""


class Engine(ABC):
    """Samples tokens from one base model under many adapter versions at once."""

    info: EngineInfo

    @abstractmethod
    async def start(self) -> None:
        """Make ready to serve; raises SetupError with what to do where it cannot."""

    @abstractmethod
    def generate(self, request: GenerateRequest, version: int) -> AsyncGenerator[Chunk, None]:
        """Sample one answer under a loaded version (0 = base).

        Closing the iterator early stops the generation. Raises InvalidRequest or ContextTooLong before the
        first chunk for what the engine cannot do.
        """

    @abstractmethod
    async def load(self, adapter: Adapter) -> None:
        """Make a version ready to sample, once it has reproduced its probe (app/probe.py).

        Raises AdapterRejected with the reason, leaving the others as they were, and Unavailable where the engine
        cannot be reached or is too slow.
        """

    @abstractmethod
    async def unload(self, version: int) -> None:
        """Forget a version that no request uses any more; nothing happens if it is not there."""

    @abstractmethod
    def loaded(self) -> frozenset[int]:
        """The adapter versions that can be sampled from now, without the base."""

    @abstractmethod
    def may_read(self, version: int) -> bool:
        """Whether an engine may still read the version's files, so that they must stay."""

    @abstractmethod
    def states(self) -> list[EngineState]:
        """Every engine behind this one."""

    @abstractmethod
    async def healthy(self) -> bool:
        """Whether the engine can answer now."""

    @abstractmethod
    async def close(self) -> None:
        """Stop; generations under way end with finish_reason `abort`."""
