"""A vLLM server that is set up wrongly is refused at start, and the message names the flag."""

import json
from typing import Any

import httpx
import pytest

from app.engines.vllm_checks import inspect_server
from app.errors import SetupError
from app.fingerprint import fingerprint
from app.settings import TINY_MODEL

MODEL = str(TINY_MODEL)
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 1010}
LOAD = "/v1/load_lora_adapter"
RENDER = "/v1/chat/completions/render"
TOOLS = f"{RENDER} with tools"
CHAT = "/v1/chat/completions"
MODELS = "/v1/models"
Answers = dict[str, tuple[int, Any]]


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "x", "param": None, "code": 1}}


def card(root: str) -> dict[str, Any]:
    return {"data": [{"id": "base", "root": root, "parent": None, "max_model_len": 1024}]}


def first_answer(second: float) -> dict[str, Any]:
    """One token at top_k = 1, with the logprob that the next likeliest is listed at."""
    tops = [{"token": "a", "logprob": 0.0}, {"token": "b", "logprob": second}]
    entry = {"token": "a", "logprob": 0.0, "top_logprobs": tops}
    return {"prompt_token_ids": [1], "choices": [{"token_ids": [2], "logprobs": {"content": [entry]}}]}


GOOD: Answers = {
    MODELS: (200, card(MODEL)),
    LOAD: (404, error("Loading lora failed: No adapter found for /nonexistent")),
    RENDER: (200, {"token_ids": [0] * 14, "sampling_params": NEUTRAL}),
    TOOLS: (200, {"token_ids": [0] * 99, "sampling_params": NEUTRAL}),
    CHAT: (200, first_answer(-9999.0)),
}


async def inspect(answers: Answers) -> Any:
    def server(request: httpx.Request) -> httpx.Response:
        tools = b'"tools"' in request.content
        status, body = answers[TOOLS if tools else request.url.path]
        return httpx.Response(status, content=body if isinstance(body, bytes) else json.dumps(body))

    async with httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(server)) as http:
        return await inspect_server(http, MODEL, 8)


async def test_a_good_server_passes() -> None:
    """Its served name, context length and the base's fingerprint are what the app goes on with."""
    server = await inspect(GOOD)
    assert (server.base, server.info.max_context, server.info.slots) == ("base", 1024, 8)
    assert server.info.fingerprint == fingerprint(MODEL)


async def test_a_server_without_tool_calls_passes() -> None:
    """vLLM refuses tools where it has no parser for calls; that is no reason not to serve."""
    assert (await inspect(GOOD | {TOOLS: (400, error('"auto" tool choice requires --enable-auto-tool-choice'))})).base


def rendered(**params: Any) -> tuple[int, Any]:
    return 200, {"token_ids": [0] * 14, "sampling_params": NEUTRAL | params}


WRONG: dict[str, tuple[Answers, str]] = {
    "no runtime loading": ({LOAD: (404, {"detail": "Not Found"})}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    "no LoRA": ({LOAD: (500, error("LoRA is not enabled. Use --enable-lora"))}, "--enable-lora"),
    "top_k of the model": ({RENDER: rendered(top_k=20)}, "top_k = 20.*--generation-config vllm"),
    "temperature of the model": ({RENDER: rendered(temperature=0.6)}, "--generation-config vllm"),
    "length of the model": ({RENDER: rendered(max_tokens=96)}, "max_tokens = 96.*--generation-config vllm"),
    "no rendering": ({RENDER: (404, {"detail": "Not Found"})}, "--enable-scale-out"),
    "calls from a grammar": ({TOOLS: rendered(structured_outputs={"structural_tag": "{}"})}, "--tool-strict-level"),
    "raw logprobs": ({CHAT: (200, first_answer(-2.5))}, "--logprobs-mode processed_logprobs"),
    "few alternatives": ({CHAT: (400, error("greater than max allowed: 20"))}, "--max-logprobs 21"),
    "dead engine": ({CHAT: (500, error("EngineCore encountered an issue"))}, "EngineCore.*vLLM's own output"),
    "no token ids": ({CHAT: (200, first_answer(-9999.0) | {"prompt_token_ids": None})}, "token ids"),
    "no vLLM": ({MODELS: (404, {})}, "is this vLLM"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_wrong_server_is_refused(case: str) -> None:
    """Each of these would learn from answers that are not what was sampled."""
    changed, message = WRONG[case]
    with pytest.raises(SetupError, match=message):
        await inspect(GOOD | changed)


FOREIGN: dict[str, Answers] = {
    "a web page": {MODELS: (200, b"<html>nginx</html>")},
    "other JSON": {MODELS: (200, {"models": ["nginx"]})},
    "a list": {MODELS: (200, ["nginx"])},
    "models of another server": {MODELS: (200, {"data": ["nginx"]})},
    "another rendering": {RENDER: (200, {"prompt": "nginx"})},
    "another answer": {CHAT: (200, {"choices": [], "server": "nginx"})},
    "no logprobs": {CHAT: (200, {"choices": [{"logprobs": None}], "server": "nginx"})},
}


@pytest.mark.parametrize("case", FOREIGN)
async def test_what_is_not_vllm_is_shown(case: str) -> None:
    """A web page, or another server of OpenAI's API: the message has what it answers and names the setting."""
    with pytest.raises(SetupError, match=r"not vLLM.*nginx") as refused:
        await inspect(GOOD | FOREIGN[case])
    assert refused.value.param == "engine_urls"


async def test_a_foreign_error_is_no_crash() -> None:
    """An error body of another shape than vLLM's counts as a route that is not there."""
    with pytest.raises(SetupError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        await inspect(GOOD | {LOAD: (404, ["nginx"])})


async def test_another_base_is_refused(tmp_path: Any) -> None:
    """The served directory is compared with the app's own, where both can be read."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes((TINY_MODEL / "model.safetensors").read_bytes())
    with pytest.raises(SetupError, match="RIACHO_MODEL"):
        await inspect(GOOD | {MODELS: (200, card(str(tmp_path)))})


async def test_no_server_is_said() -> None:
    """A wrong address names the setting and the command."""
    async with httpx.AsyncClient(base_url="http://127.0.0.1:9") as http:
        with pytest.raises(SetupError, match=r"engine_urls.*riacho vllm"):
            await inspect_server(http, MODEL, 8)
