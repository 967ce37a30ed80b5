"""A scripted vLLM server behind the real client: for servers that are slow, dead or wrong just when a test needs it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from app.engines.base import Adapter, EngineInfo
from app.engines.vllm import VllmClient
from app.probe import Context, Probe

PROBE = Probe([Context(prompt_ids=[1], token_ids=[2, 3], logprobs=[-1.0, -2.0], base_logprobs=[-3.0, -3.5])])
HEAD = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1, 2]}


def token_event(id: int, text: str, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    """One sampled token as vLLM streams it."""
    entry = {"token": text, "logprob": -0.5, "top_logprobs": []}
    choice = {"index": 0, "delta": {"content": text, **delta}, "token_ids": [id], "finish_reason": finish}
    return {"choices": [choice | {"logprobs": {"content": [entry]}}]}


def adapter(store: Path, version: int, policy: str = "riacho") -> Adapter:
    """A directory with a probe; the weights are not looked at here."""
    path = store / str(version)
    path.mkdir(parents=True, exist_ok=True)
    (path / "probe.json").write_bytes(PROBE.encode())
    return Adapter(policy, version, path)


class ScriptedVllm:
    """What a server holds, and how it misbehaves.

    Attributes:
        names: the adapters that it has, name to path.
        down: nothing answers.
        healthy: what /health says.
        frozen: it takes connections and says nothing; streams hang where `gate` is set.
        hang: adapter calls wait until this event is set.
        refuse: what a load is refused with.
        ignores: adapters load, and the base answers.
        dies_at: a stream breaks off before this token.
        gate: streams wait at event `gate_at` until it is set.
    """

    def __init__(self, name: str) -> None:
        self.url = f"http://{name}"
        self.names: dict[str, str] = {}
        self.down = False
        self.healthy = True
        self.frozen = False
        self.hang: asyncio.Event | None = None
        self.refuse = ""
        self.ignores = False
        self.dies_at: int | None = None
        self.answered: list[str] = []
        self.gate: asyncio.Event | None = None
        self.gate_at = 1

    def client(self, store: Path, slots: int = 4) -> VllmClient:
        """A client of this server; its start asks what the server holds and no more."""
        client = VllmClient(self.url, model="base", policy="riacho", store=store, slots=slots)
        client._http = httpx.AsyncClient(base_url=self.url, transport=httpx.MockTransport(self.answer))
        client._base, client.info = "base", EngineInfo("base", "f", "float32", 64, slots)
        client._shapes = {}
        client.start = client._reconcile  # type: ignore[method-assign]
        return client

    async def answer(self, request: httpx.Request) -> httpx.Response:
        """Any request."""
        if self.down:
            raise httpx.ConnectError("refused", request=request)
        if self.frozen and request.url.path in ("/health", "/v1/models"):
            raise httpx.ReadTimeout("silence", request=request)
        body = json.loads(request.content or b"{}")
        match request.url.path:
            case "/health":
                return httpx.Response(200 if self.healthy else 503)
            case "/v1/models":
                cards = [{"id": name, "root": path, "parent": "base"} for name, path in self.names.items()]
                return httpx.Response(200, json={"data": cards})
            case "/v1/load_lora_adapter":
                return await self._load(body["lora_name"], body["lora_path"])
            case "/v1/unload_lora_adapter":
                return httpx.Response(200 if self.names.pop(body["lora_name"], None) else 404, json={})
            case "/v1/completions":
                return self._score(body)
            case _:
                return await self._chat(body["model"])

    async def _load(self, name: str, path: str) -> httpx.Response:
        if self.hang is not None:
            await self.hang.wait()
        if self.refuse:
            return httpx.Response(500, json={"error": {"message": self.refuse}})
        self.names[name] = path
        return httpx.Response(200, text="loaded")

    def _score(self, body: dict[str, Any]) -> httpx.Response:
        scores = PROBE.base_logprobs if self.ignores or body["model"] == "base" else PROBE.logprobs
        top = {f"token_id:{token}": score for token, score in zip((2, 3), scores, strict=True)}
        return httpx.Response(200, json={"choices": [{"index": 0, "logprobs": {"top_logprobs": [top]}}]})

    async def _chat(self, model: str) -> httpx.Response:
        if model != "base" and model not in self.names:
            return httpx.Response(404, json={"error": {"message": "no such model"}})
        self.answered.append(model)

        async def body() -> Any:
            for at, event in enumerate((HEAD, token_event(5, "a"), token_event(6, "b", "stop"))):
                if self.dies_at == at:
                    raise httpx.ReadError("reset")
                if at == self.gate_at and self.gate is not None:
                    await self.gate.wait()
                yield f"data: {json.dumps(event)}\n\n".encode()
            yield b"data: [DONE]\n\n"

        return httpx.Response(200, content=body())
