"""Request bodies. Types are strict: `true` is no number and `"1"` is none either."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from app.events.schema import DEFAULT_SIGNAL, Signal

MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Message(BaseModel):
    """One message; fields that only the chat template reads pass through."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    reasoning_content: str | None = Field(None, description="what the model thought before this, for the template")


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool = False


Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


class ChatRequest(StrictModel):
    """`POST /v1/chat/completions`, as OpenAI's, with `top_k` and `min_p` as vLLM's."""

    model: str
    messages: list[Message] = Field(min_length=1)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = 1.0
    top_k: int | None = Field(None, ge=-1)
    min_p: Probability | None = None
    presence_penalty: Penalty | None = 0.0
    frequency_penalty: Penalty | None = 0.0
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: only the first tool call is shown")
    modalities: list[Literal["text"]] | None = None
    # Without effect on an answer here; clients send them.
    user: str | None = None
    service_tier: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    safety_identifier: str | None = None

    @field_validator("stop")
    @classmethod
    def _stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        strings = [stop] if isinstance(stop, str) else stop or []
        if len(strings) > 4 or not all(strings):
            raise ValueError("give at most 4 strings, none of them empty")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _logit_bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        if bias and not all(token.isascii() and token.isdigit() for token in bias):
            raise ValueError("the keys are token ids, such as '42'")
        return bias

    @model_validator(mode="after")
    def _dependent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream = true")
        return self


class FeedbackRequest(StrictModel):
    """`POST /v1/feedback`: a reward or a thumb, on one completion or on a session."""

    completion_id: str | None = Field(None, max_length=512)
    session_id: str | None = Field(None, max_length=128)
    reward: float | None = Field(None, allow_inf_nan=False)
    thumb: Literal["up", "down"] | None = None
    signal: Signal = Field(DEFAULT_SIGNAL, description="which of the policy's rewards this is")
    final: bool = True
    id: str | None = Field(None, min_length=1, max_length=128, description="idempotency key")
    comment: str | None = Field(None, max_length=4096)
    metadata: dict[str, Any] | None = None

    @field_validator("id")
    @classmethod
    def _printable(cls, id: str | None) -> str | None:
        if id is not None and not id.isprintable():
            raise ValueError("use printable characters only")
        return id

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        if (self.completion_id is None) == (self.session_id is None):
            raise ValueError("give either completion_id or session_id")
        if (self.reward is None) == (self.thumb is None):
            raise ValueError("give either reward or thumb; leave feedback out where there is no judgement")
        return self


class RollbackRequest(StrictModel):
    """`POST /admin/policies/{policy}/rollback`."""

    to: Annotated[int, Field(ge=0, lt=2**31)] | Literal["base"]
    reason: str = Field(min_length=1, max_length=1024)


class PinRequest(StrictModel):
    pinned: bool
