"""One vLLM server over HTTP: it samples, this asks; no torch on this side."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from app.engines.adapter_options import require_slot
from app.engines.adapter_shapes import base_shapes, check_adapter
from app.engines.base import (
    BASE_VERSION,
    Adapter,
    Chunk,
    EngineInfo,
    EngineLost,
    EngineSlow,
    GenerateRequest,
    VersionMissing,
)
from app.engines.probe import require_reproduced
from app.engines.vllm_checks import inspect_server
from app.engines.vllm_wire import (
    chat_body,
    chunk_of,
    distributions_body,
    distributions_of,
    event_data,
    refusal,
    sampled_tokens,
)
from app.errors import AdapterRejected, RiachoError, Unavailable
from app.fingerprint import model_directory
from app.probe import Probe

CONNECT_S = 5.0
SILENCE_S = 300.0  # a prompt may wait for long behind others, but a dead connection must end some time
LOAD_S = 120.0
HEALTH_S = 5.0
KEEP_ALIVE_S = 2.0  # below vLLM's own 5 s, so that no request goes out on a connection that it is just closing

log = logging.getLogger(__name__)


class VllmClient:
    """Serves the adapter versions of one policy through one vLLM server.

    Args:
        url: the server's address, such as http://127.0.0.1:8000.
        model: the base as this machine has it, for the fingerprint and to check adapters against.
        policy: whose adapters these are; others are refused.
        store: the directory with the policy's versions, at the same path on the server's machine.
        slots: how many versions may be loaded at once.
    """

    info: EngineInfo

    def __init__(self, url: str, *, model: str, policy: str, store: Path, slots: int) -> None:
        self.url = url
        self._model = model
        self._policy = policy
        self._store = store
        self._slots = slots
        self._held: set[int] = set()  # names that the server may have
        self._loaded: dict[int, Adapter] = {}  # those of them that are proved
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEP_ALIVE_S),
            trust_env=False,  # a proxy to the outside has no place between the app and its engine
        )

    async def start(self) -> None:
        """Check how the server is set up, and what it holds.

        Raises SetupError that names what to change, NotReachable where nothing answers.
        """
        server = await inspect_server(self._http, self._model, self._slots)
        self._base, self.info = server.base, server.info
        self._shapes = await asyncio.to_thread(lambda: base_shapes(model_directory(self._model)))
        await self._reconcile()

    async def generate(self, request: GenerateRequest, version: int) -> AsyncGenerator[Chunk, None]:
        """As Engine.generate; EngineLost where the connection fails, VersionMissing where the server lost it."""
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
                        elif last is not None:
                            last = replace(last, sampled=sampled_tokens(data))
        except httpx.TransportError as error:
            raise EngineLost(f"The connection to the engine was lost: {_name_of(error)}. Send it again.") from error
        if last is None:
            raise Unavailable("The engine's answer ended before it was whole. Send the request again.")
        yield last

    async def load(self, adapter: Adapter) -> None:
        """As Engine.load."""
        if adapter.policy != self._policy:
            raise AdapterRejected(f"{adapter.name} belongs to another policy than {self._policy}.")
        if adapter.version in self._loaded:
            return  # a version never changes, so it is the same
        require_slot(adapter, self._loaded.keys(), self._slots)
        await asyncio.to_thread(check_adapter, adapter, self._shapes)
        probe = await asyncio.to_thread(Probe.read, adapter.path)
        self._held.add(adapter.version)
        names = {"lora_name": adapter.name, "lora_path": str(adapter.path)}
        response = await self._post("/v1/load_lora_adapter", names)
        if response.status_code != httpx.codes.OK:
            await self._settle_failed_load(adapter, response)
        await self._prove(adapter, probe)

    async def unload(self, version: int) -> None:
        """Take a name out of the server; requests under way finish with its weights. Raises EngineLost."""
        response = await self._post("/v1/unload_lora_adapter", {"lora_name": self._name(version)})
        if response.status_code not in (httpx.codes.OK, httpx.codes.NOT_FOUND):
            raise refusal(response.status_code, _json(response))
        self._loaded.pop(version, None)
        self._held.discard(version)

    def adapter(self, version: int) -> Adapter:
        """A loaded version as it lies in the store."""
        return self._loaded[version]

    def loaded(self) -> frozenset[int]:
        """The versions that this server has proved."""
        return frozenset(self._loaded)

    def held(self) -> frozenset[int]:
        """All versions that the server may have, as far as is known: proved, on their way, or from before."""
        return frozenset(self._held)

    async def refresh(self) -> None:
        """Find out which versions the server has lost; raises EngineLost, EngineSlow."""
        served = dict(self._own(await self._served()))
        self._loaded = {version: adapter for version, adapter in self._loaded.items() if version in served}

    async def healthy(self) -> bool:
        """Whether the server says that it can answer; raises EngineLost, EngineSlow if it says nothing for seconds."""
        with self._reached():
            response = await self._http.get("/health", timeout=HEALTH_S)
        return response.status_code == httpx.codes.OK

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def _name(self, version: int) -> str:
        return self._base if version == BASE_VERSION else f"{self._policy}@{version}"

    async def _reconcile(self) -> None:
        """Take over what the server holds from before, where it proves to be what this store has."""
        served = dict(self._own(await self._served()))
        self._held, self._loaded = set(served), {}
        for version, path in served.items():
            adapter = Adapter(self._policy, version, path)
            try:
                if path.parent != self._store:
                    raise AdapterRejected(f"it is from {path}, not from {self._store}")
                await self._prove(adapter, await asyncio.to_thread(Probe.read, path))
            except AdapterRejected as error:
                log.warning("%s holds %s, which is unloaded: %s", self.url, adapter.name, error.message)
                await self.unload(version)

    def _own(self, served: dict[str, str]) -> list[tuple[int, Path]]:
        """This policy's versions among the names that a server has, and their paths."""
        named = [(*name.partition("@"), Path(path)) for name, path in served.items()]
        return [(int(n), path) for policy, _, n, path in named if policy == self._policy and n.isdigit()]

    async def _prove(self, adapter: Adapter, probe: Probe) -> None:
        """Count a version as loaded once it reproduces its probe; else take it out of the server."""
        try:
            adapted, base = [await self._score(version, probe) for version in (adapter.version, BASE_VERSION)]
            require_reproduced(adapter, probe, adapted, base)
        except AdapterRejected:
            await self.unload(adapter.version)
            raise
        self._loaded[adapter.version] = adapter

    async def _served(self) -> dict[str, str]:
        """The adapters that the server has names for, and their paths."""
        with self._reached():
            response = await self._http.get("/v1/models", timeout=HEALTH_S)
        return {card["id"]: card["root"] for card in response.json()["data"] if card.get("parent") or "@" in card["id"]}

    async def _settle_failed_load(self, adapter: Adapter, response: httpx.Response) -> None:
        """Returns if the server has this adapter after all: another app process, or an answer that got lost."""
        if (await self._served()).get(adapter.name) == str(adapter.path):
            return
        reason = refusal(response.status_code, _json(response)).message
        if not await self.healthy():  # then the failure says nothing about the adapter
            raise Unavailable(f"The engine stopped while it loaded {adapter.name}: {reason}")
        raise AdapterRejected(f"vLLM refuses {adapter.name}: {reason}")

    async def _score(self, version: int, probe: Probe) -> list[float]:
        """The logprobs of the probe's tokens under a version."""
        prompts = [context.prompt_ids for context in probe.contexts]
        response = await self._post("/v1/completions", distributions_body(prompts, self._name(version)))
        if response.status_code != httpx.codes.OK:
            error = refusal(response.status_code, _json(response))
            raise error if isinstance(error, Unavailable) else AdapterRejected(f"its probe is refused: {error.message}")
        return probe.chosen(distributions_of(response.json()))

    async def _refusal(self, response: httpx.Response, version: int) -> RiachoError:
        await response.aread()
        if response.status_code == httpx.codes.NOT_FOUND and version != BASE_VERSION:
            self._loaded.pop(version, None)  # the server has been restarted, or another app has unloaded it
            return VersionMissing(f"{self._name(version)} is being loaded again; retry in a moment.")
        return refusal(response.status_code, _json(response))

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        with self._reached():
            return await self._http.post(path, json=body, timeout=LOAD_S)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Failures of the connection as EngineLost and EngineSlow."""
        try:
            yield
        except httpx.TransportError as error:
            kind = EngineSlow if isinstance(error, httpx.TimeoutException) else EngineLost
            raise kind(f"The engine at {self.url} does not answer: {_name_of(error)}.") from error


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None


def _name_of(error: httpx.TransportError) -> str:
    return f"{type(error).__name__} {error}".strip()
