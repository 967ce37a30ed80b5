"""Exactness while versions come and go: what each request recorded is what its own version gives."""

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest

from app.events.schema import CompletionEvent
from tests.publishing import Publisher
from tests.scoring import differences_by_version
from tests.service import POLICY, Service, stream_data
from tests.vllm.conftest import TOLERANCE

PUBLISHES = 20  # more than the slots, so that versions are evicted under load
CLIENTS = 8
LAST = 15
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Write a line about the sea."}],
    "stream": True,
    "max_tokens": 48,
}


async def talk(client: httpx.AsyncClient, model: str, done: asyncio.Event) -> None:
    """Stream answers until told to stop; each must end with [DONE]."""
    while not done.is_set():
        response = await client.post("/v1/chat/completions", json=BODY | {"model": model})
        assert response.status_code == httpx.codes.OK, response.text
        assert stream_data(response.text.splitlines())[-1] == "[DONE]"


@pytest.mark.timeout(600)
async def test_every_answer_is_exactly_its_versions(
    service: Service, publisher: Publisher, record_property: Any
) -> None:
    """20 publishes under 8 clients, 2 of them on the base: none fails, and every logprob is that of its version."""
    done = asyncio.Event()
    headers = {"Authorization": f"Bearer {service.client_key}"}
    async with httpx.AsyncClient(base_url=service.base_url, headers=headers, timeout=120) as client:
        async with asyncio.TaskGroup() as talkers:
            for number in range(CLIENTS):
                talkers.create_task(talk(client, POLICY if number % 4 else f"{POLICY}@base", done))
            for number in range(1, PUBLISHES + 1):
                await asyncio.to_thread(publisher.publish, number)
                await publisher.wait_live(number)
                await asyncio.sleep(0.3)
            done.set()
    events = [event for event in service.events() if isinstance(event, CompletionEvent)]
    assert all(event.trainable for event in events)
    counts = Counter(event.version for event in events)
    assert len(counts) > PUBLISHES / 2
    assert service.metric("riacho_loaded_versions") <= 8
    found = differences_by_version(service.home / "adapters" / POLICY, events, LAST)
    record_property("answers", len(events))
    record_property("worst", max(map(max, found.values())))
    for of_version in found.values():
        TOLERANCE.require(of_version)
