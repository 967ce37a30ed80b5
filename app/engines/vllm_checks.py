"""Is a vLLM server set up for learning? Asked by what it answers, before any traffic.

Each of these goes wrong without a word otherwise: the answers look fine and what is learned from them is not.
"""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, Field, ValidationError

from app.engines.base import EngineInfo
from app.engines.vllm_wire import ALTERNATIVES, CUT_OFF
from app.errors import SetupError
from app.fingerprint import fingerprint

MOST_ALTERNATIVES = ALTERNATIVES + 1  # and the sampled token
SHOWN = 120  # characters of a foreign answer
_START = "start it as `riacho vllm` does"
_RENDER = "/v1/chat/completions/render"
_HELLO = [{"role": "user", "content": "Hello"}]
_TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
# vLLM leaves out of a rendered request what has its own neutral value.
_NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}

log = logging.getLogger(__name__)


class _Card(BaseModel):
    """A model that the server lists: a base has a length, an adapter a parent."""

    id: str
    root: str = ""
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(BaseModel):
    data: list[_Card]


class _Rendered(BaseModel):
    """A request as the server would sample it."""

    token_ids: list[int]
    sampling_params: dict[str, Any]


class _Candidate(BaseModel):
    logprob: float


class _Entry(BaseModel):
    top_logprobs: list[_Candidate]


class _Logprobs(BaseModel):
    content: list[_Entry] = Field(min_length=1, max_length=1)


class _Choice(BaseModel):
    token_ids: list[int] | None = None
    logprobs: _Logprobs


class _Answer(BaseModel):
    """One token."""

    prompt_token_ids: list[int] | None = None
    choices: list[_Choice] = Field(min_length=1, max_length=1)


_Body = TypeVar("_Body", bound=BaseModel)


class NotReachable(SetupError):
    """Nothing answers at the address; it may still come up."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that passed: the base's served name, and what it can do."""

    base: str
    info: EngineInfo


async def inspect_server(http: httpx.AsyncClient, model: str, slots: int) -> Server:
    """Ask a server how it is set up; raises SetupError that names the flag or variable to change."""
    card = await _base_card(http)
    max_context = card.max_model_len or 0
    await _require_lora(http)
    await _require_neutral_defaults(http, card.id, max_context)
    await _require_free_tool_calls(http, card.id)
    await _require_sampled_logprobs(http, card.id)
    expected = await asyncio.to_thread(_fingerprint, model, card.root)
    return Server(card.id, EngineInfo(model, expected, "unknown", max_context, slots))


async def _base_card(http: httpx.AsyncClient) -> _Card:
    response = await _ask(http, "GET", "/v1/models")
    _require(response.is_success, http, f"GET /v1/models gives status {response.status_code}; is this vLLM?")
    bases = [card for card in _read(http, response, _Cards).data if card.max_model_len and not card.parent]
    _require(len(bases) >= 1, http, "it lists no base model")
    return bases[0]


async def _require_lora(http: httpx.AsyncClient) -> None:
    """An adapter that cannot exist tells which way loading fails; the engine is not hurt by it."""
    nowhere = {"lora_name": "riacho-start-check", "lora_path": "/nonexistent/riacho-start-check"}
    response = await _ask(http, "POST", "/v1/load_lora_adapter", nowhere)
    message = _message(response)
    _require(
        "not enabled" not in message,
        http,
        f"adapters cannot be loaded ({message}); {_START}, with --enable-lora",
    )
    _require(
        bool(message),
        http,
        f"it has no /v1/load_lora_adapter; {_START}, with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment",
    )


async def _require_neutral_defaults(http: httpx.AsyncClient, base: str, max_context: int) -> None:
    """What a request that says nothing is sampled with: a model's generation_config can cap and bend it."""
    response = await _ask(http, "POST", _RENDER, {"model": base, "messages": _HELLO})
    _require(
        response.is_success,
        http,
        f"{_RENDER} gives status {response.status_code}; {_START}, with --enable-scale-out",
    )
    rendered = _read(http, response, _Rendered)
    defaults = rendered.sampling_params
    bent = {key: defaults[key] for key, neutral in _NEUTRAL.items() if defaults.get(key, neutral) != neutral}
    room = max_context - len(rendered.token_ids)
    if defaults.get("max_tokens", room) < room:
        bent["max_tokens"] = defaults["max_tokens"]
    shown = ", ".join(f"{key} = {value}" for key, value in bent.items())
    _require(
        not bent,
        http,
        f"it samples with defaults of its own ({shown}); {_START}, with --generation-config vllm "
        "and without --override-generation-config",
    )


async def _require_free_tool_calls(http: httpx.AsyncClient, base: str) -> None:
    """What tools alone bring: a server or a tool parser may sample every call from a grammar."""
    response = await _ask(http, "POST", _RENDER, {"model": base, "messages": _HELLO, "tools": [_TOOL]})
    if not response.is_success:
        return  # it has no tool calls, which clients that send tools are told
    constrained = _read(http, response, _Rendered).sampling_params.get("structured_outputs")
    _require(
        not constrained,
        http,
        f"it samples tool calls from a grammar, and what is sampled so cannot be trained on; {_START}, without "
        "--tool-strict-level and with a --tool-call-parser that does not ask for it",
    )


async def _require_sampled_logprobs(http: httpx.AsyncClient, base: str) -> None:
    """With one token left to choose, the sampled distribution has no second: raw logprobs still show one."""
    body = {"model": base, "messages": _HELLO, "max_tokens": 1, "temperature": 1.0, "top_k": 1}
    body |= {"logprobs": True, "top_logprobs": MOST_ALTERNATIVES, "return_token_ids": True}
    response = await _ask(http, "POST", "/v1/chat/completions", body)
    if not response.is_success:
        advice = f"{_START}, with --max-logprobs {MOST_ALTERNATIVES}"
        if response.is_server_error:
            advice = "vLLM's own output says why"
        raise _wrong(http, f"a first answer fails ({_message(response)}); {advice}")
    answer = _read(http, response, _Answer)
    [choice] = answer.choices
    _require(
        bool(answer.prompt_token_ids) and len(choice.token_ids or ()) == 1,
        http,
        "it returns no token ids (return_token_ids); use a vLLM of at least 0.32",
    )
    [entry] = choice.logprobs.content
    possible = [other for other in entry.top_logprobs if other.logprob > CUT_OFF]
    _require(
        len(possible) == 1,
        http,
        f"its logprobs are not those of the sampled distribution; {_START}, with --logprobs-mode processed_logprobs",
    )


def _fingerprint(model: str, served: str) -> str:
    """The fingerprint of the base; raises SetupError where the server has another and that can be seen from here."""
    expected = fingerprint(model)
    if Path(served).is_dir():
        if fingerprint(served) != expected:
            raise SetupError(
                f"vLLM serves {served}, which is not the base model {model}: give `riacho vllm` and RIACHO_MODEL "
                "the same model",
                param="model",
            )
    elif served != model:
        log.warning("vLLM serves %s, which cannot be compared with %s from here", served, model)
    return expected


async def _ask(http: httpx.AsyncClient, method: str, path: str, body: Any = None) -> httpx.Response:
    try:
        return await http.request(method, path, json=body)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise NotReachable(
            f"engine_urls: no vLLM server answers at {http.base_url} ({type(error).__name__} {error}); "
            "start one with `riacho vllm`, or correct the address",
            param="engine_urls",
        ) from error


def _read(http: httpx.AsyncClient, response: httpx.Response, kind: type[_Body]) -> _Body:
    """The body of an answer; raises SetupError that shows it where it is not what vLLM answers."""
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as error:
        what = f"{response.request.method} {response.request.url.path}"
        field = ".".join(map(str, error.errors()[0]["loc"])) or "its JSON"
        raise _wrong(
            http,
            f"what answers is not vLLM, or another version: {what} gives {response.text[:SHOWN]!r}, where {field} is "
            f"amiss; correct the address, or {_START}",
        ) from error


def _message(response: httpx.Response) -> str:
    """The message of vLLM's error body; empty where the body is not vLLM's, as for a route that is not there."""
    try:
        body = response.json()
    except ValueError:
        return ""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message") or "") if isinstance(error, dict) else ""


def _require(holds: bool, http: httpx.AsyncClient, problem: str) -> None:
    if not holds:
        raise _wrong(http, problem)


def _wrong(http: httpx.AsyncClient, problem: str) -> SetupError:
    return SetupError(f"the vLLM server at {http.base_url} is not set up for learning: {problem}", param="engine_urls")
