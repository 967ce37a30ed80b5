"""Swaps are invisible to clients: a request keeps its version to its last token, and no request fails."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from app.events.schema import CompletionEvent
from app.settings import TINY_MODEL
from tests.publishing import Publisher
from tests.service import Service, eventually

SWAPS = 200
CLIENTS = 4
KEEP = 10
LONG = 400


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path, extra={"RIACHO_POLL_S": "0.02", "RIACHO_KEEP_VERSIONS": str(KEEP)}) as running:
        yield running


@pytest.fixture
def publisher(service: Service) -> Iterator[Publisher]:
    publisher = Publisher(service.home)
    yield publisher
    publisher.close()


@pytest.fixture
async def client(service: Service) -> Any:
    headers = {"Authorization": f"Bearer {service.client_key}"}
    async with httpx.AsyncClient(base_url=service.base_url, headers=headers, timeout=120) as client:
        yield client


async def stream(client: httpx.AsyncClient, started: asyncio.Event | None = None, **fields: Any) -> tuple[str, str]:
    """One streamed answer: its completion id and the version in its header; fails unless it ends with [DONE]."""
    body = {"model": "riacho", "messages": [{"role": "user", "content": "Write about the sea."}], "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=body | fields) as response:
        assert response.status_code == httpx.codes.OK, await response.aread()
        lines = []
        async for line in response.aiter_lines():
            if started is not None and len(lines) > 20:
                started.set()
            lines += [line.removeprefix("data: ")] if line else []
    assert lines[-1] == "[DONE]", lines[-1]
    return json.loads(lines[0])["id"], response.headers["x-riacho-version"]


def endless() -> dict[str, Any]:
    """A greedy answer that cannot end by itself."""
    eos = AutoTokenizer.from_pretrained(TINY_MODEL).eos_token_id
    return {"temperature": 0, "max_tokens": LONG, "logit_bias": {str(eos): -100}}


async def test_a_long_stream_keeps_its_version_across_publish_rollback_publish(
    service: Service, publisher: Publisher, client: httpx.AsyncClient
) -> None:
    """It ends with the version it began with, and its greedy tokens are those of an undisturbed run."""
    publisher.publish(1)
    await publisher.wait_live(1)
    await asyncio.sleep(0.1)
    undisturbed, version = await stream(client, **endless())
    assert version == "riacho@1"
    started = asyncio.Event()
    task = asyncio.create_task(stream(client, started, **endless()))
    await started.wait()
    publisher.publish(2)
    await publisher.wait_live(2)
    rollback = {"to": 1, "reason": "test"}
    async with httpx.AsyncClient(base_url=service.base_url, timeout=60) as admin:
        headers = {"Authorization": f"Bearer {service.admin_key}"}
        answer = await admin.post("/admin/policies/riacho/rollback", json=rollback, headers=headers)
    assert answer.status_code == httpx.codes.OK, answer.text
    publisher.publish(3, epoch=publisher.epoch)
    await publisher.wait_live(3)
    assert not task.done(), "the stream was too short to run across the swaps"
    disturbed, version = await task
    assert version == "riacho@1"
    calm, swapped = service.recorded(undisturbed), service.recorded(disturbed)
    assert swapped.version == calm.version == 1
    assert len(swapped.completion_ids) == LONG
    assert swapped.completion_ids == calm.completion_ids
    other, version = await stream(client, **endless())
    assert version == "riacho@3"
    assert service.recorded(other).completion_ids != calm.completion_ids


async def test_no_request_fails_in_200_swaps_under_load(
    service: Service, publisher: Publisher, client: httpx.AsyncClient
) -> None:
    """Clients stream all the while; every answer ends whole, under one version, and old versions are cleaned up."""
    done = asyncio.Event()
    seen: Counter[str] = Counter()

    async def talk() -> None:
        while not done.is_set():
            _, version = await stream(client, max_tokens=12)
            seen[version] += 1

    talkers = [asyncio.create_task(talk()) for _ in range(CLIENTS)]
    for number in range(1, SWAPS + 1):
        await asyncio.to_thread(publisher.publish, number)
        await publisher.wait_live(number)
        assert not any(talker.done() for talker in talkers)
    done.set()
    await asyncio.gather(*talkers)
    moves = service.admin.get("/admin/policies/riacho/deployments", params={"limit": 1000}).json()["deployments"]
    assert len(moves) == SWAPS
    assert len(seen) > SWAPS / 10
    assert all(e.trainable for e in service.events() if isinstance(e, CompletionEvent))
    assert service.metric("riacho_loaded_versions") <= 8
    assert service.metric("riacho_leases") == 0
    store = service.home / "adapters" / "riacho"
    eventually(lambda: len(list(store.iterdir())) <= KEEP, "old versions are deleted")
    assert (store / str(SWAPS)).is_dir()
