"""One vLLM server over HTTP: it samples, this asks; no torch on this side."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx

from app.engines.adapter_options import require_slot
from app.engines.adapter_shapes import base_shapes, check_adapter
from app.engines.base import BASE_VERSION, Adapter, Chunk, Engine, GenerateRequest
from app.engines.vllm_checks import inspect_server
from app.engines.vllm_wire import chat_body, chunk_of, event_data, refusal
from app.errors import AdapterRejected, InvalidRequest, Unavailable
from app.fingerprint import model_directory

CONNECT_S = 5.0
SILENCE_S = 300.0  # a prompt may wait for long behind others, but a dead connection must end some time
LOAD_S = 120.0
HEALTH_S = 5.0
KEEP_ALIVE_S = 2.0  # below vLLM's own 5 s, so that no request goes out on a connection that it is just closing

log = logging.getLogger(__name__)


class VllmEngine(Engine):
    """Serves the adapter versions of one policy through one vLLM server.

    Args:
        url: the server's address, such as http://127.0.0.1:8000.
        model: the base as this machine has it, for the fingerprint and to check adapters against.
        policy: whose adapters these are; others are refused.
        store: the directory with the policy's versions, at the same path on the server's machine.
        slots: how many versions may be loaded at once.
    """

    def __init__(self, url: str, *, model: str, policy: str, store: Path, slots: int) -> None:
        self._url = url
        self._model = model
        self._policy = policy
        self._store = store
        self._slots = slots
        self._loaded: set[int] = set()
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEP_ALIVE_S),
            trust_env=False,  # a proxy to the outside has no place between the app and its engine
        )

    async def start(self) -> None:
        server = await inspect_server(self._http, self._model, self._slots)
        self._base, self.info = server.base, server.info
        self._shapes = await asyncio.to_thread(lambda: base_shapes(model_directory(self._model)))
        await self._reconcile()

    async def generate(self, request: GenerateRequest, version: int) -> AsyncGenerator[Chunk, None]:
        body = chat_body(request, self._name(version), self.info.max_context)
        last: Chunk | None = None
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise await self._refusal(response, version)
                async with aclosing(event_data(response.aiter_bytes())) as events:
                    async for data in events:
                        chunk = chunk_of(data, request.top_logprobs)
                        if chunk is not None and chunk.finish_reason is not None:
                            last = chunk  # read on to the stream's end, so that the connection can serve again
                        elif chunk is not None:
                            yield chunk
        except httpx.TransportError as error:
            raise Unavailable(f"The connection to the engine was lost: {_name_of(error)}. Send it again.") from error
        if last is None:
            raise Unavailable("The engine's answer ended before it was whole. Send the request again.")
        yield last

    async def load(self, adapter: Adapter) -> None:
        if adapter.policy != self._policy:
            raise AdapterRejected(f"{adapter.name} belongs to another policy than {self._policy}.")
        if adapter.version in self._loaded:
            return  # a version never changes, so it is the same
        require_slot(adapter, self._loaded, self._slots)
        await asyncio.to_thread(check_adapter, adapter, self._shapes)
        names = {"lora_name": adapter.name, "lora_path": str(adapter.path)}
        response = await self._post("/v1/load_lora_adapter", names)
        if response.status_code != httpx.codes.OK:
            await self._settle_failed_load(adapter, response)
        self._loaded.add(adapter.version)

    async def unload(self, version: int) -> None:
        if version not in self._loaded:
            return
        response = await self._post("/v1/unload_lora_adapter", {"lora_name": self._name(version)})
        if response.status_code not in (httpx.codes.OK, httpx.codes.NOT_FOUND):
            raise refusal(response.status_code, _json(response))
        self._loaded.discard(version)

    def loaded(self) -> frozenset[int]:
        return frozenset(self._loaded)

    async def healthy(self) -> bool:
        try:
            response = await self._http.get("/health", timeout=HEALTH_S)
        except httpx.TransportError:
            return False
        return response.status_code == httpx.codes.OK

    async def close(self) -> None:
        await self._http.aclose()

    def _name(self, version: int) -> str:
        return self._base if version == BASE_VERSION else f"{self._policy}@{version}"

    async def _reconcile(self) -> None:
        """Take over what the server holds from an earlier app; a version from another store is another adapter."""
        for name, path in (await self._served()).items():
            policy, _, number = name.partition("@")
            if policy != self._policy or not number.isdigit():
                continue
            self._loaded.add(int(number))
            if Path(path) != self._store / number:
                log.warning("the engine holds %s from %s, not from %s: it is unloaded", name, path, self._store)
                await self.unload(int(number))

    async def _served(self) -> dict[str, str]:
        """The adapters that the server has names for, and their paths."""
        try:
            response = await self._http.get("/v1/models")
        except httpx.TransportError as error:
            raise Unavailable(f"The engine at {self._url} does not answer: {_name_of(error)}.") from error
        return {card["id"]: card["root"] for card in response.json()["data"] if card.get("parent") or "@" in card["id"]}

    async def _settle_failed_load(self, adapter: Adapter, response: httpx.Response) -> None:
        """Returns if the server has this adapter after all: another app process, or an answer that got lost."""
        if (await self._served()).get(adapter.name) == str(adapter.path):
            return
        reason = refusal(response.status_code, _json(response)).message
        if not await self.healthy():  # then the failure says nothing about the adapter
            raise Unavailable(f"The engine stopped while it loaded {adapter.name}: {reason}")
        raise AdapterRejected(f"vLLM refuses {adapter.name}: {reason}")

    async def _refusal(self, response: httpx.Response, version: int) -> Unavailable | InvalidRequest | Exception:
        await response.aread()
        if response.status_code == httpx.codes.NOT_FOUND and version != BASE_VERSION:
            self._loaded.discard(version)  # the server has been restarted; the deployer loads it again
            return Unavailable(f"{self._name(version)} is being loaded again; retry in a moment.")
        return refusal(response.status_code, _json(response))

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        try:
            return await self._http.post(path, json=body, timeout=LOAD_S)
        except httpx.TransportError as error:
            raise Unavailable(f"The engine at {self._url} does not answer: {_name_of(error)}.") from error


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None


def _name_of(error: httpx.TransportError) -> str:
    return f"{type(error).__name__} {error}".strip()
