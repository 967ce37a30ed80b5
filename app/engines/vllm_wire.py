"""vLLM's chat completions on the wire: requests out of ours, chunks and errors out of theirs."""

import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, get_args

from app.engines.base import Chunk, FinishReason, GenerateRequest, TokenLogprob
from app.engines.messages import joined_parts
from app.errors import ContextTooLong, InvalidRequest, RiachoError, Unavailable

# vLLM lists a token that was cut off (top_k, top_p, grammar) at this value, since JSON has no -inf.
CUT_OFF = -9999.0
ALTERNATIVES = 20  # OpenAI's limit
_TOO_LONG = ("input_tokens", "maximum context length")


def chat_body(request: GenerateRequest, model: str, max_context: int) -> dict[str, Any]:
    """A streamed request that names every sampling parameter, so that no default of the server has a say."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "messages": [_message(message) for message in request.messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "logprobs": True,
        # vLLM puts the sampled token among the first N, likely or not: one more, so that the likeliest N are there.
        "top_logprobs": request.top_logprobs + 1 if request.top_logprobs else 0,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": 1.0,
        # vLLM shortens an answer to the room that the prompt leaves, but refuses more than the whole context.
        "max_tokens": min(sampling.max_tokens, max_context),
        "stop": list(sampling.stop),
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if request.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in request.logit_bias.items()}
    if request.response_format is not None:
        body["response_format"] = request.response_format
    if request.tools and request.tool_choice != "none":  # vLLM would show the model tools that it may not call
        body |= {"tools": request.tools, "tool_choice": request.tool_choice or "auto"}
    return body


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its content as one string, and its reasoning under the name that vLLM has for it."""
    message = joined_parts(message)
    if "reasoning_content" not in message:
        return message
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {"reasoning": message["reasoning_content"], **rest}


async def event_data(pieces: AsyncIterator[bytes]) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON of server-sent events, up to `[DONE]`.

    Split at line feeds only: httpx's own lines also end at U+2028 and its like, which JSON may hold as they are.
    """
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield json.loads(data)


def chunk_of(data: dict[str, Any], alternatives: int) -> Chunk | None:
    """The chunk in one event; None for one without a choice. Raises what an error event says."""
    if "error" in data:
        raise refusal(data["error"].get("code") or 500, data)
    if not data.get("choices"):
        return None
    [choice] = data["choices"]
    entries = (choice.get("logprobs") or {}).get("content") or []
    details = tuple(_detail(entry, alternatives) for entry in entries)
    prompt_ids = data.get("prompt_token_ids")
    return Chunk(
        text=choice["delta"].get("content") or "",
        token_ids=tuple(choice.get("token_ids") or ()),
        logprobs=tuple(detail.logprob for detail in details),
        details=details,
        tool_calls=tuple(choice["delta"].get("tool_calls") or ()),
        prompt_ids=None if prompt_ids is None else tuple(prompt_ids),
        finish_reason=_finish_reason(choice.get("finish_reason")),
        reasoning=choice["delta"].get("reasoning") or "",
    )


def sampled_tokens(data: dict[str, Any]) -> int | None:
    """How many tokens vLLM counted, in the event that says so after the last choice's end; None in any other."""
    count: int | None = (data.get("usage") or {}).get("completion_tokens")
    return count


def distributions_body(prompts: Sequence[Sequence[int]], model: str) -> dict[str, Any]:
    """A request for the likeliest next tokens after each prompt.

    Not through prompt_logprobs, which with LoRA in a mixed batch kill the engine (vLLM issues 16668 and 29955), nor
    through logprob_token_ids, which take the alternatives away from the other requests of their batch.
    """
    body = {"model": model, "prompt": [list(prompt) for prompt in prompts], "max_tokens": 1, "temperature": 1.0}
    return body | {"logprobs": ALTERNATIVES, "return_tokens_as_token_ids": True}


def distributions_of(answer: dict[str, Any]) -> list[dict[int, float]]:
    """For each prompt the likeliest next tokens with their logprobs."""
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    tops = [choice["logprobs"]["top_logprobs"][0] for choice in choices]
    return [{int(name.removeprefix("token_id:")): float(value) for name, value in top.items()} for top in tops]


def refusal(status: int, body: Any) -> RiachoError:
    """What vLLM's error response means for the client."""
    error = body.get("error") if isinstance(body, dict) else None
    error = error if isinstance(error, dict) else {}
    message, param = str(error.get("message") or f"vLLM answers with status {status}"), error.get("param")
    if status not in (400, 422):
        return Unavailable(f"The engine cannot answer now: {message}")
    if param == _TOO_LONG[0] or _TOO_LONG[1] in message:
        return ContextTooLong(message, param="messages")
    return InvalidRequest(message, param=_field(param) if isinstance(param, str) else None)


def _field(param: str) -> str:
    """The request's field in vLLM's `body.tools.0.function`; what it counts without a name is a message."""
    path = param.removeprefix("body.")
    return f"messages.{path}" if path[:1].isdigit() else path


def _detail(entry: dict[str, Any], alternatives: int) -> TokenLogprob:
    logprob = math.nan if entry["logprob"] is None else float(entry["logprob"])
    top = [(other["token"], float(other["logprob"])) for other in entry.get("top_logprobs") or ()]
    possible = sorted((pair for pair in top if pair[1] > CUT_OFF), key=lambda pair: -pair[1])
    return TokenLogprob(entry["token"], logprob, tuple(possible[:alternatives]))


def _finish_reason(reason: str | None) -> FinishReason | None:
    if reason is None:
        return None
    if reason not in get_args(FinishReason):
        raise Unavailable(f"The engine ended the answer for a reason that is not known here: {reason}.")
    return reason  # type: ignore[return-value]  # just checked
