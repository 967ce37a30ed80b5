"""What the log keeps of an answer: exactly what was read and sampled, before the client has its last byte."""

import json
from contextlib import suppress

import httpx
import pytest

from app.events.schema import CompletionEvent
from tests.service import POLICY, Service, eventually, service_fixture, stream_data

service = service_fixture()

LONG = {"model": POLICY, "messages": [{"role": "user", "content": "Tell me a very long story."}], "stream": True}


def test_event_is_what_was_sampled(service: Service) -> None:
    """Token ids, logprobs, version, parameters and text of the event are those of the answer."""
    answer = service.ask(temperature=0.9, seed=3, logprobs=True)
    event = service.recorded(answer["id"])
    entries = answer["choices"][0]["logprobs"]["content"]
    assert list(event.logprobs) == pytest.approx([entry["logprob"] for entry in entries], abs=1e-6)
    assert len(event.prompt_ids) == answer["usage"]["prompt_tokens"] == event.usage.prompt_tokens
    assert len(event.completion_ids) == answer["usage"]["completion_tokens"] == event.usage.completion_tokens
    assert (event.version, event.policy, event.finish_reason) == (0, POLICY, answer["choices"][0]["finish_reason"])
    assert (event.sampling.temperature, event.sampling.seed, event.sampling.max_tokens) == (0.9, 3, 16)
    assert event.output == answer["choices"][0]["message"]["content"]
    assert event.messages == [{"role": "user", "content": "Write a line about the sea."}]
    assert (event.trainable, event.not_trainable_reason) == (True, None)


def test_event_is_durable_before_done(service: Service) -> None:
    """When [DONE] arrives, the event is on the log."""
    with service.client.stream("POST", "/v1/chat/completions", json=LONG | {"max_tokens": 12}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                completion_id = json.loads(line.removeprefix("data: "))["choices"][0]["completion_id"]
            if line == "data: [DONE]":
                assert service.recorded(completion_id).usage.completion_tokens > 0
                break
        else:
            pytest.fail("no [DONE]")


def test_each_choice_has_an_event(service: Service) -> None:
    """n = 2 are two completions of two sessions, each with its own text."""
    answer = service.ask(n=2, seed=5)
    events = [service.recorded(choice["completion_id"]) for choice in answer["choices"]]
    assert [event.output for event in events] == [choice["message"]["content"] for choice in answer["choices"]]
    assert len({event.session_id for event in events}) == 2
    assert sum(event.usage.completion_tokens for event in events) == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_unstored_answer_leaves_no_content(service: Service, stream: bool) -> None:
    """store = false: answered as ever, but neither text nor tokens are kept, and nothing is trained on."""
    secret = "The password is zebra."
    response = service.post_chat(secret, store=False, stream=stream, seed=9)
    assert response.status_code == httpx.codes.OK
    text = response.text
    completion_id = json.loads(stream_data(text.splitlines())[0] if stream else text)["id"]
    event = service.recorded(completion_id)
    assert (event.messages, event.output) == (None, None)
    assert (event.prompt_ids, event.completion_ids, event.logprobs) == ((), (), ())
    assert not event.trainable
    assert "store" in (event.not_trainable_reason or "")
    assert "zebra" not in event.model_dump_json()
    assert event.usage.completion_tokens > 0


def test_key_without_content_trains_without_text(service: Service) -> None:
    """A key whose policy says no content keeps its texts out of the log; tokens stay, for training."""
    service.add_client("quiet-key", store_content=False)
    with service.http("quiet-key") as http:
        event = service.recorded(service.ask("My name is zebra.", http=http)["id"])
    assert (event.messages, event.output) == (None, None)
    assert event.completion_ids
    assert event.trainable


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"temperature": 0}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"presence_penalty": 0.5}, "penalty"),
        ({"frequency_penalty": -0.5}, "penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
    ],
    ids=lambda value: str(value),
)
def test_shaped_sampling_is_served_and_not_trained_on(service: Service, fields: dict[str, object], reason: str) -> None:
    """What the learner cannot recompute is answered, and marked not trainable with the reason."""
    event = service.recorded(service.ask(**fields)["id"])
    assert not event.trainable
    assert reason in (event.not_trainable_reason or "")
    assert len(event.completion_ids) == len(event.logprobs) > 0


def test_trace_id_is_kept(service: Service) -> None:
    """The caller's traceparent goes with the event."""
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = {"model": POLICY, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
    response = service.client.post("/v1/chat/completions", json=body, headers={"traceparent": trace})
    assert trace in (service.recorded(response.json()["id"]).trace_id or "")


def leave_after_some_text(service: Service) -> str:
    """Begin a long stream and hang up in its middle; the completion id."""
    body = LONG | {"max_tokens": 900, "logit_bias": ends_never(service)}
    with service.http(service.client_key) as http:
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            data = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            chunks = [json.loads(next(data)) for _ in range(4)]
    completion_id: str = chunks[0]["choices"][0]["completion_id"]
    return completion_id


def ends_never(service: Service) -> dict[str, int]:
    """A bias against the token that ended an earlier answer."""
    for seed in range(20):
        answer = service.ask(seed=seed, max_tokens=200)
        if answer["choices"][0]["finish_reason"] == "stop":
            return {str(service.recorded(answer["id"]).completion_ids[-1]): -100}
    pytest.fail("no answer ended by itself")


def test_client_that_leaves_a_stream_leaves_a_record(service: Service) -> None:
    """Half an answer is recorded as aborted, with the tokens so far, and its lease is given back."""
    completion_id = leave_after_some_text(service)

    def recorded() -> CompletionEvent | None:
        with suppress(AssertionError):
            return service.recorded(completion_id)
        return None

    event = eventually(recorded, "the record of an answer that was left")
    assert event is not None
    assert (event.finish_reason, event.trainable) == ("abort", False)
    assert 0 < len(event.completion_ids) < 900
    assert event.not_trainable_reason
    eventually(lambda: service.metric("riacho_leases") == 0, "no lease is left")


def test_client_that_leaves_before_the_answer_frees_its_lease(service: Service) -> None:
    """Hanging up on an answer that is not streamed stops the sampling, with a record too."""
    body = LONG | {"stream": False, "max_tokens": 900, "logit_bias": ends_never(service)}
    before = len(service.events())
    with service.http(service.client_key) as http, suppress(httpx.ReadTimeout):
        http.post("/v1/chat/completions", json=body, timeout=httpx.Timeout(60, read=0.5))
    eventually(lambda: len(service.events()) > before, "the record of an answer that was left")
    event = service.events()[-1]
    assert isinstance(event, CompletionEvent)
    assert event.finish_reason == "abort"
    eventually(lambda: service.metric("riacho_leases") == 0, "no lease is left")
