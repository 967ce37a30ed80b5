"""Two real replicas: versions come and go under load, and one dies and returns, without a failed request elsewhere."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from transformers import AutoTokenizer

from app.events.schema import CompletionEvent
from app.settings import TINY_MODEL
from tests.publishing import Publisher
from tests.scoring import differences_by_version
from tests.service import POLICY, Service, eventually, stream_data
from tests.vllm.conftest import TOLERANCE, VllmProcess, vllm_metric

PUBLISHES, ROLLBACKS = 50, 5
STREAMS = 16
SLOTS = 8
COMPARED = 8
PROMPT = "Write about the sea, the rain, the wind and the moon over the hills. " * 9  # longer than a cache block
SAMPLED: dict[str, Any] = {"temperature": 1, "max_tokens": 24}


def endless() -> dict[str, int]:
    """A logit bias that forbids the end of turn."""
    return {str(AutoTokenizer.from_pretrained(TINY_MODEL).eos_token_id): -100}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmProcess]]:
    pair = [VllmProcess(tmp_path_factory.mktemp("replica")) for _ in range(2)]
    try:
        for server in pair:
            server.start()
        yield pair
    finally:
        for server in pair:
            server.stop()


@pytest.fixture
def service(servers: list[VllmProcess], tmp_path: Path) -> Iterator[Service]:
    urls = ",".join(server.url for server in servers)
    with Service(tmp_path, extra={"RIACHO_ENGINE_URLS": urls}) as running:
        yield running


@asynccontextmanager
async def client_of(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {service.client_key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=service.base_url, headers=headers, timeout=120, limits=limits) as client:
        yield client


async def stream(client: httpx.AsyncClient, **fields: Any) -> str:
    """One streamed answer that ends well; its completion id."""
    body = {"model": POLICY, "messages": [{"role": "user", "content": PROMPT}], "stream": True} | fields
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == httpx.codes.OK, response.text
    *chunks, last = stream_data(response.text.splitlines())
    assert last == "[DONE]", last
    completion_id: str = json.loads(chunks[0])["id"]
    return completion_id


def adapters_in(server: VllmProcess) -> int:
    cards = httpx.get(f"{server.url}/v1/models").json()["data"]
    return sum("@" in card["id"] for card in cards)


def memory_mib(server: VllmProcess) -> float:
    """The memory of a server's processes that they do not share."""
    root = psutil.Process(server.pid)
    return sum(process.memory_full_info().uss for process in (root, *root.children(recursive=True))) / 2**20


@pytest.mark.timeout(900)
async def test_fifty_publishes_and_five_rollbacks_under_sixteen_streams(
    servers: list[VllmProcess], service: Service, record_property: Any
) -> None:
    """No request fails, each is one version's, greedy ones as undisturbed, the slots hold and memory stays level."""
    done = asyncio.Event()
    greedy = {"temperature": 0, "max_tokens": 40, "logit_bias": endless()}
    asked: dict[str, list[str]] = {"greedy": [], "sampled": []}
    most_adapters, memory = 0, []

    async def talk(client: httpx.AsyncClient, kind: str, fields: dict[str, Any]) -> None:
        while not done.is_set():
            asked[kind].append(await stream(client, **fields))

    with closing(Publisher(service.home)) as publisher:
        async with client_of(service) as client, asyncio.TaskGroup() as talkers:
            for number in range(STREAMS):
                kind = "greedy" if number % 2 else "sampled"
                talkers.create_task(talk(client, kind, greedy if number % 2 else SAMPLED))
            for number in range(1, PUBLISHES + 1):
                await asyncio.to_thread(publisher.publish, number, publisher.epoch)
                await publisher.wait_live(number)
                if number % (PUBLISHES // ROLLBACKS) == 0:
                    body = {"to": number - 2, "reason": "test"}
                    answer = await asyncio.to_thread(
                        service.admin.post, f"/admin/policies/{POLICY}/rollback", json=body
                    )
                    assert answer.status_code == httpx.codes.OK, answer.text
                    assert publisher.live == number - 2
                most_adapters = max(most_adapters, *(adapters_in(server) for server in servers))
                if number >= PUBLISHES // 5:
                    memory.append(sum(memory_mib(server) for server in servers))
            done.set()
        events = {e.completion_id: e for e in service.events() if isinstance(e, CompletionEvent)}
        assert events.keys() == {*asked["greedy"], *asked["sampled"]}
        sampled = [events[id] for id in asked["sampled"]]
        assert all(event.trainable for event in sampled)
        found = differences_by_version(service.home / "adapters" / POLICY, sampled, COMPARED)
        async with client_of(service) as client:
            undisturbed = await greedy_tokens(service, client, greedy, {events[id].version for id in asked["greedy"]})
    for id in asked["greedy"]:
        assert events[id].completion_ids == undisturbed[events[id].version], f"{id} of version {events[id].version}"
    moves = service.admin.get(f"/admin/policies/{POLICY}/deployments", params={"limit": 1000}).json()["deployments"]
    assert len(moves) == PUBLISHES + ROLLBACKS
    versions = Counter(event.version for event in events.values())
    record_property("answers", len(events))
    record_property("versions", len(versions))
    record_property("worst", max(map(max, found.values())))
    record_property("memory_mib", [round(value) for value in memory])
    assert len(versions) > PUBLISHES / 2
    assert most_adapters <= SLOTS
    for of_version in found.values():
        TOLERANCE.require(of_version)
    assert memory[-1] < memory[0] * 1.1
    assert all(requests_of(server) > len(events) / 5 for server in servers), "both replicas serve"


async def greedy_tokens(
    service: Service, client: httpx.AsyncClient, fields: dict[str, Any], versions: set[int]
) -> dict[int, tuple[int, ...]]:
    """What each version answers to the same request when nothing else goes on."""
    ids = {v: await stream(client, **fields, model=f"{POLICY}@{v or 'base'}") for v in sorted(versions)}
    return {version: service.recorded(id).completion_ids for version, id in ids.items()}


def requests_of(server: VllmProcess) -> float:
    """Requests that a server has finished."""
    return vllm_metric(server.url, "request_success_total")


@pytest.mark.timeout(900)
async def test_a_killed_replica_costs_its_own_streams_alone(servers: list[VllmProcess], service: Service) -> None:
    """Its streams end with an error event, all other requests go on, and it returns by itself with the live version."""
    with closing(Publisher(service.home)) as publisher:
        publisher.publish(1)
        await publisher.wait_live(1)
        await asyncio.to_thread(eventually, lambda: all_serve(service, 1), "both replicas serve version 1")
        async with client_of(service) as client:
            begun = [asyncio.Event() for _ in range(8)]
            streams = [asyncio.create_task(raw(client, event)) for event in begun]
            await asyncio.gather(*(event.wait() for event in begun))
            servers[0].kill()
            ends = [lines[-1] for lines in await asyncio.gather(*streams)]
            lost = [end for end in ends if end != "[DONE]"]
            assert 0 < len(lost) < len(ends)
            assert all(json.loads(end)["error"]["code"] == "unavailable" for end in lost)
            for _ in range(10):
                await stream(client, max_tokens=4)
            assert service.ready()
            publisher.publish(2)
            await publisher.wait_live(2)
            await asyncio.to_thread(servers[0].start)
            await asyncio.to_thread(eventually, lambda: all_serve(service, 2), "it is back with version 2")
            assert adapters_in(servers[0]) == 2
            before = requests_of(servers[0])
            versions = [service.recorded(await stream(client, max_tokens=4)).version for _ in range(10)]
    assert versions == [2] * 10
    assert requests_of(servers[0]) > before


async def raw(client: httpx.AsyncClient, begun: asyncio.Event) -> list[str]:
    """The events of a long stream, however it ends; `begun` is set at its first token."""
    body = {"model": POLICY, "messages": [{"role": "user", "content": "Go on."}], "stream": True, "max_tokens": 900}
    lines: list[str] = []
    async with client.stream("POST", "/v1/chat/completions", json=body | {"logit_bias": endless()}) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            if '"content":' in line:
                begun.set()
    return stream_data(lines)


def all_serve(service: Service, version: int) -> bool:
    """Whether every replica is in service with a version: one that was slow to load comes back by itself."""
    engines = service.admin.get("/admin/engines").json()["engines"]
    return all(engine["serving"] and version in engine["versions"] for engine in engines)
