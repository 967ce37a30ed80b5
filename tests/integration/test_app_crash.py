"""SIGKILL of the app while answers stream: every answer that ended for its client is in the log."""

import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.events.schema import CompletionEvent, FeedbackEvent
from tests.service import Service

CLIENTS = 6
KILLS = 3


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path) as running:
        yield running


class Talker(threading.Thread):
    """Streams answers and judges each one, until the service is gone; remembers what ended and what was accepted."""

    def __init__(self, service: Service) -> None:
        super().__init__(daemon=True)
        self._http = service.http(service.client_key)
        self.ended: list[str] = []
        self.accepted: list[str] = []

    def run(self) -> None:
        try:
            while True:
                self._one()
        except httpx.TransportError:
            return

    def _one(self) -> None:
        body = {"model": "riacho", "messages": [{"role": "user", "content": "Write about the sea."}], "stream": True}
        with self._http.stream("POST", "/v1/chat/completions", json=body | {"max_tokens": 24}) as response:
            lines = [line for line in response.iter_lines() if line]
        if lines and lines[-1] == "data: [DONE]":
            completion_id = json.loads(lines[0].removeprefix("data: "))["id"]
            self.ended.append(completion_id)
            answer = self._http.post("/v1/feedback", json={"completion_id": completion_id, "reward": 0.5})
            if answer.status_code == httpx.codes.OK:
                self.accepted.append(completion_id)


def test_every_answer_that_ended_is_in_the_log(service: Service) -> None:
    """Killed three times under load: all answers that ended and all accepted feedback are on the log."""
    rng = random.Random(7)
    ended: list[str] = []
    accepted: list[str] = []
    for _ in range(KILLS):
        talkers = [Talker(service) for _ in range(CLIENTS)]
        for talker in talkers:
            talker.start()
        time.sleep(rng.uniform(2, 4))
        service.kill()
        for talker in talkers:
            talker.join()
            ended += talker.ended
            accepted += talker.accepted
        service.start()
    time.sleep(4)  # the relay appends what the kills left in the outbox
    events = service.events()
    completions = [event.completion_id for event in events if isinstance(event, CompletionEvent)]
    judged = {event.completion_id: event.event_id for event in events if isinstance(event, FeedbackEvent)}
    assert len(ended) > CLIENTS * KILLS
    assert set(ended) <= set(completions)
    assert len(completions) == len(set(completions))
    assert set(accepted) <= set(judged)
