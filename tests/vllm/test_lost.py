"""A vLLM server that dies: clients hear of it, and the service goes on when it is back."""

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.events.schema import CompletionEvent
from tests.publishing import Publisher
from tests.service import POLICY, Service, eventually, stream_data
from tests.vllm.conftest import vllm_metric

LONG: dict[str, Any] = {
    "model": POLICY,
    "messages": [{"role": "user", "content": "Write about the sea."}],
    "stream": True,
    "temperature": 1,
    "max_tokens": 900,
    "logit_bias": {"3065": -100},  # the tiny model's end of turn
}


@pytest.mark.timeout(600)
def test_a_killed_server_is_an_error_event_and_comes_back(own_vllm: Any, tmp_path: Path) -> None:
    """No silent end; the answer is recorded as aborted; after a restart the live version serves again."""
    with Service(tmp_path, extra={"RIACHO_ENGINE_URLS": own_vllm.url}) as service:
        with closing(Publisher(service.home)) as publisher:
            publisher.publish(1)
            asyncio.run(publisher.wait_live(1))
        eventually(lambda: service.ask()["model"] == "riacho@1", "version 1 serves")
        lines: list[str] = []
        with service.client.stream("POST", "/v1/chat/completions", json=LONG) as response:
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) == 40:
                    own_vllm.kill()
        *chunks, last = stream_data(lines)
        assert json.loads(last)["error"]["code"] == "unavailable"
        completion_id = json.loads(chunks[0])["id"]
        eventually(lambda: any(getattr(e, "completion_id", "") == completion_id for e in service.events()), "a record")
        event: CompletionEvent = service.recorded(completion_id)
        assert (event.finish_reason, event.trainable) == ("abort", False)
        assert service.post_chat().status_code == httpx.codes.SERVICE_UNAVAILABLE
        assert not service.ready()
        own_vllm.start()
        eventually(lambda: service.post_chat().is_success, "it serves again", 60)
        assert service.ask()["model"] == "riacho@1"
        assert service.ready()


def test_a_client_that_leaves_stops_the_sampling(service: Service, vllm: str) -> None:
    """Closing the stream aborts the request in vLLM, long before its last token."""
    with service.client.stream("POST", "/v1/chat/completions", json=LONG) as response:
        for count, _ in enumerate(response.iter_lines()):
            if count == 10:
                break

    def aborted() -> list[CompletionEvent]:
        return [e for e in service.events() if isinstance(e, CompletionEvent) and e.finish_reason == "abort"]

    eventually(lambda: vllm_metric(vllm, "num_requests_running") == 0, "nothing runs in vLLM")
    eventually(aborted, "the record of the broken answer")
    [event] = aborted()
    assert 0 < len(event.completion_ids) < LONG["max_tokens"]
