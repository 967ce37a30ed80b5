"""Chat through the front door: the `openai` client works unchanged."""

from collections import Counter
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.service import POLICY, Service, chunks_of, local_only, service_fixture, stream_data

service = service_fixture()

SEA: list[Any] = [{"role": "user", "content": "Write a line about the sea."}]
SEEDED: dict[str, Any] = {"model": POLICY, "messages": SEA, "seed": 7, "temperature": 1.0, "max_tokens": 24}
GREEDY: dict[str, Any] = {"model": POLICY, "messages": SEA, "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def client(service: Service) -> openai.OpenAI:
    return service.openai()


def streamed(client: openai.OpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    return list(client.chat.completions.create(stream=True, **fields))


def texts(chunks: list[ChatCompletionChunk]) -> dict[int, str]:
    """Each choice's text, put together from its deltas."""
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            found[choice.index] = found.get(choice.index, "") + (choice.delta.content or "")
    return found


def contents(answer: ChatCompletion) -> dict[int, str]:
    return {choice.index: choice.message.content or "" for choice in answer.choices}


def test_answer_has_openais_shape(client: openai.OpenAI) -> None:
    """A plain answer: one assistant choice with text, and usage that adds up."""
    answer = client.chat.completions.create(**SEEDED)
    [choice] = answer.choices
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert (choice.index, choice.message.role) == (0, "assistant")
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 0
    assert 0 < answer.usage.completion_tokens <= 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_version_is_named_in_header_and_body(client: openai.OpenAI) -> None:
    """X-Riacho-Version and `model` name the version that sampled, streamed or not."""
    raw = client.chat.completions.with_raw_response.create(**SEEDED)
    assert raw.headers["x-riacho-version"] == raw.parse().model == f"{POLICY}@base"
    with client.chat.completions.with_streaming_response.create(stream=True, **SEEDED) as response:
        assert response.headers["x-riacho-version"] == f"{POLICY}@base"
        response.read()


def test_base_can_be_named(client: openai.OpenAI) -> None:
    """`riacho@base` pins the base, which serves as long as nothing was learned: same seed, same answer."""
    pinned = client.chat.completions.create(**SEEDED | {"model": f"{POLICY}@base"})
    live = client.chat.completions.create(**SEEDED)
    assert pinned.model == live.model == f"{POLICY}@base"
    assert contents(pinned) == contents(live)


def test_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    """The same seed samples the same text; other seeds do not all sample it too."""
    first, again = (contents(client.chat.completions.create(**SEEDED)) for _ in range(2))
    assert first == again
    others = [contents(client.chat.completions.create(**SEEDED | {"seed": seed})) for seed in range(3)]
    assert any(other != first for other in others)


def test_stream_is_the_same_answer(client: openai.OpenAI) -> None:
    """The deltas of a stream concatenate to what the same seed gives as a whole; one finish_reason, last."""
    whole = client.chat.completions.create(**SEEDED)
    chunks = streamed(client, **SEEDED)
    assert texts(chunks) == contents(whole)
    assert len(chunks) > 3
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert reasons[-1] == whole.choices[0].finish_reason
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_ends_with_usage_and_done(service: Service) -> None:
    """include_usage adds a last chunk with no choices and the usage of the whole; [DONE] closes the stream."""
    whole = service.ask(seed=7)
    body = {"model": POLICY, "messages": SEA, "seed": 7, "max_tokens": 16, "stream": True}
    options = {"stream_options": {"include_usage": True}}
    with service.client.stream("POST", "/v1/chat/completions", json=body | options) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        data = stream_data(response.iter_lines())
    chunks = chunks_of(data)
    assert data.count("[DONE]") == 1
    assert data[-1] == "[DONE]"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["choices"] for chunk in chunks[:-1])


def test_stream_without_the_option_has_no_usage(client: openai.OpenAI) -> None:
    """No usage chunk surprises a client that did not ask for one."""
    assert all(chunk.choices and chunk.usage is None for chunk in streamed(client, **SEEDED))


def test_two_choices_differ_and_have_receipts_of_their_own(client: openai.OpenAI) -> None:
    """n = 2: two texts, a completion_id each, and usage that counts the prompt once and both answers."""
    answer = client.chat.completions.create(**SEEDED, n=2, logprobs=True)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    ids = {(choice.model_extra or {})["completion_id"] for choice in answer.choices}
    assert len(ids | {answer.id}) == 3
    sampled = [len(choice.logprobs.content or []) for choice in answer.choices if choice.logprobs]
    single = client.chat.completions.create(**SEEDED)
    assert answer.usage is not None
    assert single.usage is not None
    assert answer.usage.completion_tokens == sum(sampled)
    assert answer.usage.prompt_tokens == single.usage.prompt_tokens


def test_one_choice_has_one_receipt(client: openai.OpenAI) -> None:
    """With one choice the answer's id is the choice's receipt."""
    answer = client.chat.completions.create(**SEEDED)
    assert (answer.choices[0].model_extra or {})["completion_id"] == answer.id


def test_two_choices_stream_side_by_side(client: openai.OpenAI) -> None:
    """n = 2 streamed: each choice's deltas are its text, and each choice ends once, with its own receipt."""
    whole = client.chat.completions.create(**SEEDED, n=2)
    chunks = streamed(client, **SEEDED, n=2)
    assert texts(chunks) == contents(whole)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert Counter(choice.index for choice in choices if choice.finish_reason) == {0: 1, 1: 1}
    ids = {(choice.index, (choice.model_extra or {})["completion_id"]) for choice in choices}
    assert len(ids) == len({id for _, id in ids}) == 2


@pytest.mark.parametrize("many", [False, True], ids=["string", "list"])
def test_stop_cuts_the_text(client: openai.OpenAI, many: bool) -> None:
    """Nothing of a stop string or behind it is shown, whether answered as a whole or streamed."""
    text = contents(client.chat.completions.create(**GREEDY))[0]
    stop = text[len(text) // 2 :][:4]
    cut = text[: text.index(stop)]
    fields = GREEDY | {"stop": ["\N{SNOWMAN}\N{SNOWMAN}", stop] if many else stop}
    answer = client.chat.completions.create(**fields)
    assert contents(answer)[0] == cut
    assert answer.choices[0].finish_reason == "stop"
    assert texts(streamed(client, **fields))[0] == cut


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_limit_ends_the_answer(client: openai.OpenAI, name: str) -> None:
    """An answer of exactly the tokens asked for ends with `length`."""
    fields = {key: value for key, value in GREEDY.items() if key != "max_tokens"}
    answer = client.chat.completions.create(**fields | {name: 3})
    assert answer.usage is not None
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 3)


def test_logprobs_list_every_sampled_token(client: openai.OpenAI) -> None:
    """One entry a sampled token: the tokens spell the text, bytes are the token's, no logprob is above 0."""
    answer = client.chat.completions.create(**SEEDED | {"max_tokens": 6}, logprobs=True, top_logprobs=3)
    assert answer.usage is not None
    entries = answer.choices[0].logprobs.content if answer.choices[0].logprobs else None
    assert entries is not None
    assert len(entries) == answer.usage.completion_tokens
    assert "".join(entry.token for entry in entries).startswith(contents(answer)[0])
    for entry in entries:
        assert bytes(entry.bytes or []).decode() == entry.token
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        tops = [top.logprob for top in entry.top_logprobs]
        assert tops == sorted(tops, reverse=True)
        assert max(tops) >= entry.logprob


def test_greedy_takes_the_likeliest_token(client: openai.OpenAI) -> None:
    """At temperature 0 each token is the first of its top_logprobs, and its logprob is not degenerate."""
    answer = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=2)
    entries = (answer.choices[0].logprobs.content if answer.choices[0].logprobs else None) or []
    assert [entry.token for entry in entries] == [entry.top_logprobs[0].token for entry in entries]
    assert [entry.logprob for entry in entries] == [entry.top_logprobs[0].logprob for entry in entries]
    assert min(entry.logprob for entry in entries) < 0


def test_streamed_logprobs_are_the_same(client: openai.OpenAI) -> None:
    """A stream carries the logprob of every token too, in order."""
    whole = client.chat.completions.create(**SEEDED, logprobs=True)
    chunks = streamed(client, **SEEDED, logprobs=True)
    parts = [choice.logprobs.content or [] for chunk in chunks for choice in chunk.choices if choice.logprobs]
    entries = (whole.choices[0].logprobs.content if whole.choices[0].logprobs else None) or []
    assert [entry.token for part in parts for entry in part] == [entry.token for entry in entries]
    streamed_logprobs = [entry.logprob for part in parts for entry in part]
    assert streamed_logprobs == pytest.approx([entry.logprob for entry in entries], abs=1e-4)


def test_logprobs_are_absent_unless_asked_for(client: openai.OpenAI) -> None:
    """Without `logprobs` the field is null."""
    assert client.chat.completions.create(**SEEDED).choices[0].logprobs is None


def test_content_parts_are_the_text(client: openai.OpenAI) -> None:
    """Content as a list of text parts is the same prompt as the joined string."""
    parts: Any = [{"type": "text", "text": "Write a line "}, {"type": "text", "text": "about the sea."}]
    whole = client.chat.completions.create(**SEEDED)
    split = client.chat.completions.create(**SEEDED | {"messages": [{"role": "user", "content": parts}]})
    assert contents(split) == contents(whole)
    assert split.usage == whole.usage


def test_system_message_reaches_the_prompt(client: openai.OpenAI) -> None:
    """A system message makes the prompt longer and changes what is sampled."""
    system: Any = {"role": "system", "content": "Answer in the style of an old book, at length."}
    without = client.chat.completions.create(**SEEDED)
    with_system = client.chat.completions.create(**SEEDED | {"messages": [system, *SEA]})
    assert with_system.usage is not None
    assert without.usage is not None
    assert with_system.usage.prompt_tokens > without.usage.prompt_tokens + 5


def test_fields_without_effect_are_taken(client: openai.OpenAI) -> None:
    """What clients send by habit does not break a request, nor change the answer."""
    answer = client.chat.completions.create(
        **SEEDED, user="u-1", parallel_tool_calls=True, metadata={"app": "t"}, response_format={"type": "text"}, n=1
    )
    assert contents(answer) == contents(client.chat.completions.create(**SEEDED))


def test_logit_bias_forbids_a_token(client: openai.OpenAI, service: Service) -> None:
    """A bias of -100 keeps a token out."""
    first = client.chat.completions.create(**GREEDY | {"max_tokens": 1})
    token = service.recorded(first.id).completion_ids[0]
    biased = client.chat.completions.create(**GREEDY | {"max_tokens": 1}, logit_bias={str(token): -100})
    assert service.recorded(biased.id).completion_ids[0] != token


@local_only
def test_top_k_of_one_leaves_one_token(client: openai.OpenAI) -> None:
    """The logprob is that of the distribution that was drawn from: with one token left it is 0."""
    answer = client.chat.completions.create(**SEEDED, logprobs=True, top_logprobs=2, extra_body={"top_k": 1})
    entries = (answer.choices[0].logprobs.content if answer.choices[0].logprobs else None) or []
    assert [entry.logprob for entry in entries] == pytest.approx([0.0] * len(entries), abs=1e-6)
    assert all(len(entry.top_logprobs) == 1 for entry in entries)


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    """The list holds the policy and its base, and each listed model can be retrieved and asked."""
    listed = {model.id for model in client.models.list()}
    assert {POLICY, f"{POLICY}@base"} <= listed
    for name in listed:
        assert client.models.retrieve(name).id == name
        assert client.chat.completions.create(**SEEDED | {"model": name}).choices
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-4")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    "model",
    ["gpt-4", "riacho@99", "riacho@", "riacho@-1", "riacho@one", "other@base", "", "riacho@" + "9" * 30, "@1"],
)
def test_unknown_model_is_not_found(client: openai.OpenAI, model: str) -> None:
    """A name or version that is not there is a 404 that names it and says what to use."""
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(**SEEDED | {"model": model})
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    assert (model.partition("@")[2] or model)[:40] in refused.value.message
