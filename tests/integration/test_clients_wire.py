"""What agent frameworks send and read: parallel calls, parts, roles, settings, sessions and branches."""

import asyncio
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import agents
import httpx
import openai
import pytest
from openai.types.shared import Reasoning
from transformers import AutoTokenizer

from app.events.schema import CompletionEvent
from app.settings import TINY_MODEL
from learner.rollouts import build_rollout, pack
from learner.tiny.tool_dialogues import CALCULATOR
from tests.clients import LOOPS, Loop, OpenAILoop, calculator, new_client
from tests.forced import forced
from tests.recording import CLIENT_KEY, RecordedService, recorded_service
from tests.service import POLICY

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Litestar's, about how handlers are declared

README = Path(__file__).parents[2] / "README.md"
README_URL, README_KEY = "http://127.0.0.1:8700", "rk-client-..."
ASK = "What is 12 + 30?"
TWO_CALLS = "\n".join(
    f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'
    for expression in ("12 + 30", "5 * 5")
)
END = "<|im_end|>"

each_loop = pytest.mark.parametrize("kind", LOOPS, ids=lambda kind: kind.name)
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedService]:
    with recorded_service(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_MODEL)


@pytest.fixture
def client(service: RecordedService) -> openai.AsyncOpenAI:
    return new_client(service.base_url, CLIENT_KEY)


def completions(service: RecordedService, session: str | None = None) -> list[CompletionEvent]:
    """The completions of a session on the log, or all, in order."""
    found = [event for event in service.events() if isinstance(event, CompletionEvent)]
    return [event for event in found if session is None or event.session_id.endswith(f":{session}")]


def scripted(tokenizer: Any, *answers: str) -> Any:
    """Answers of the next calls, given whole."""
    return forced(iter([tokenizer.encode(answer + END) for answer in answers]))


@each_loop
@streamed_or_not
async def test_parallel_calls_are_run_and_continued(
    service: RecordedService, client: openai.AsyncOpenAI, tokenizer: Any, kind: type[Loop], stream: bool
) -> None:
    """Two calls in one answer: both results go back, and the next prompt goes on from the sampled tokens."""
    session = f"parallel-{kind.name}-{stream}"
    loop = kind(client, session, where="header", stream=stream, max_tokens=64)
    with scripted(tokenizer, TWO_CALLS, "42 and 25."):
        await loop.ask(ASK)
    first, second = completions(service, session)
    assert (first.finish_reason, second.finish_reason) == ("tool_calls", "stop")
    prompt = tokenizer.decode(second.prompt_ids)
    assert "<tool_response>\n42\n</tool_response>\n<tool_response>\n25\n</tool_response>" in prompt
    assert len(pack(build_rollout(session, [first, second], []).turns)) == 1


@each_loop
@streamed_or_not
async def test_text_beside_a_call_comes_back_as_it_was(
    service: RecordedService, client: openai.AsyncOpenAI, tokenizer: Any, kind: type[Loop], stream: bool
) -> None:
    """An answer with text and a call is sent back by each client so that the sampled tokens go on."""
    session = f"beside-{kind.name}-{stream}"
    loop = kind(client, session, where="header", stream=stream, max_tokens=64)
    with scripted(tokenizer, "Let me see.\n" + TWO_CALLS, "42 and 25."):
        await loop.ask(ASK)
    turns = build_rollout(session, completions(service, session), []).turns
    assert len(turns) == 2
    assert len(pack(turns)) == 1


@pytest.mark.parametrize(
    "answer",
    [
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 + 30"}\n</tool_call>',
        '<tool_call>\n{"name": "calculator", "arguments": "12 + 30"}\n</tool_call>',
        '<tool_call>\n{"name": "abacus", "arguments": {"beads": 12}}\n</tool_call>',
        '<tool_call>\n{"name": "calculator", "arguments": {}}\n</tool_call>',
        "<tool_call>",
        "",
    ],
    ids=["no-json", "text", "unknown", "empty", "open", "nothing"],
)
@each_loop
@streamed_or_not
async def test_a_bad_call_does_not_end_the_conversation(
    service: RecordedService, client: openai.AsyncOpenAI, tokenizer: Any, kind: type[Loop], stream: bool, answer: str
) -> None:
    """Whatever the model writes, the client gets what its framework can handle, and the next question is answered."""
    loop = kind(client, None, where="header", stream=stream, max_tokens=24)
    with scripted(tokenizer, answer, *["I do not know."] * 8):
        await loop.ask(ASK)
        failures = len(loop.failures)
        await loop.ask(ASK)
    assert len(loop.failures) == failures, loop.failures
    assert loop.answers()


@streamed_or_not
async def test_one_call_at_a_time_where_the_client_says_so(
    service: RecordedService, client: openai.AsyncOpenAI, tokenizer: Any, stream: bool
) -> None:
    """parallel_tool_calls = false: the client sees the first call; all tokens are recorded and can be trained on."""
    session = f"single-{stream}"
    loop = OpenAILoop(client, session, where="header", stream=stream, max_tokens=64, parallel_tool_calls=False)
    with scripted(tokenizer, TWO_CALLS, "42."):
        await loop.ask(ASK)
    [called] = [message for message in loop.messages if message.get("tool_calls")]
    assert [call["function"]["arguments"] for call in called["tool_calls"]] == ['{"expression": "12 + 30"}']
    first = completions(service, session)[0]
    assert first.trainable
    assert tokenizer.decode(first.completion_ids) == TWO_CALLS + END


@each_loop
@streamed_or_not
async def test_completions_without_a_session_are_their_own(
    service: RecordedService, client: openai.AsyncOpenAI, tokenizer: Any, kind: type[Loop], stream: bool
) -> None:
    """Where a client names no session nothing is guessed: each completion is one."""
    before = len(completions(service))
    loop = kind(client, None, where="header", stream=stream, max_tokens=64)
    with scripted(tokenizer, TWO_CALLS, "42 and 25."):
        await loop.ask(ASK)
    made = completions(service)[before:]
    assert len({event.session_id for event in made}) == len(made) == 2


@each_loop
@pytest.mark.parametrize("where", ["header", "metadata"])
async def test_turns_are_in_the_order_of_their_ends(
    service: RecordedService, client: openai.AsyncOpenAI, kind: type[Loop], where: Any
) -> None:
    """Both ways of naming a session link its turns, one after the other."""
    session = f"order-{kind.name}-{where}"
    loop = kind(client, session, where=where, stream=False, max_tokens=8)
    for _ in range(3):
        await loop.ask(ASK)
    events = completions(service, session)
    recorded = [a for a in service.engine.answers if a.session is not None and a.session.endswith(f":{session}")]
    assert [event.completion_ids for event in events] == [answer.token_ids for answer in recorded]
    assert [event.at for event in events] == sorted(event.at for event in events)
    assert len(events) >= 3


async def test_requests_at_the_same_time_are_branches(
    service: RecordedService, client: openai.AsyncOpenAI, tokenizer: Any
) -> None:
    """Two at once in one session: each is a turn, in the order in which they end, in a sequence of its own."""
    long, short = "one two three four five six seven eight nine ten " * 3, "No."

    async def ask(text: str) -> None:
        loop = OpenAILoop(client, "branches", where="header", stream=False, max_tokens=128)
        await loop.ask(text)

    with scripted(tokenizer, long, short):
        slow = asyncio.create_task(ask("Count, please."))
        while not any(state.running for state in service.engine.states()):
            await asyncio.sleep(0.001)
        await asyncio.gather(slow, ask(ASK))
    events = completions(service, "branches")
    assert [tokenizer.decode(event.completion_ids) for event in events] == [short + END, long + END]
    assert len(pack(build_rollout("branches", events, []).turns)) == 2


def readme_example(name: str, service: RecordedService, names: dict[str, Any]) -> dict[str, Any]:
    """The README's lines for a client, run with this service's address and key; the names that they define."""
    section = README.read_text(encoding="utf-8").partition("### Agent frameworks\n")[2].partition("\n### ")[0]
    code = textwrap.dedent(section.partition(f"    # {name}\n")[2].partition("\n\n")[0])
    assert code.count("\n") < 5
    defined = dict(names)
    exec(code.replace(README_URL, service.base_url).replace(README_KEY, CLIENT_KEY), defined)
    return defined


def test_readme_configures_openai(service: RecordedService) -> None:
    """The README's lines give an answer in the session that they name."""
    names = {"messages": [{"role": "user", "content": ASK}], "tools": [CALCULATOR]}
    answer = readme_example("openai", service, names)["answer"]
    assert completions(service, "run-1")[-1].completion_id == answer.id


@pytest.mark.parametrize("name", ["openai-agents", "pydantic-ai"])
async def test_readme_configures_the_framework(service: RecordedService, tokenizer: Any, name: str) -> None:
    """The README's lines make an agent whose calls are in the session that they name."""
    tools = [agents.function_tool(calculator) if name == "openai-agents" else calculator]
    agent = readme_example(name, service, {"tools": tools})["agent"]
    before = len(completions(service, "run-1"))
    with scripted(tokenizer, TWO_CALLS, "42 and 25."):
        run = agents.Runner.run(agent, ASK) if name == "openai-agents" else agent.run(ASK)
        await run
    assert len(completions(service, "run-1")) == before + 2


MESSAGES: dict[str, tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]]] = {
    "developer": (
        [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": ASK}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}],
    ),
    "parts": (
        [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "12 + 30?"}]}],
        [{"role": "user", "content": ASK}],
    ),
    "name": ([{"role": "user", "name": "ann", "content": ASK}], [{"role": "user", "content": ASK}]),
}


def said(arguments: str, **fields: Any) -> dict[str, Any]:
    """An assistant's message with one call."""
    call = {"id": "call_1", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]} | fields


def called(message: dict[str, Any], result: Any = "42") -> list[dict[str, Any]]:
    tool = {"role": "tool", "tool_call_id": "call_1", "content": result}
    return [{"role": "user", "content": ASK}, message, tool]


CANONICAL = called(said('{"expression": "12 + 30"}'))
MESSAGES |= {
    "compact-arguments": (called(said('{"expression":"12 + 30"}')), CANONICAL),
    "no-content": (called({k: v for k, v in said('{"expression": "12 + 30"}').items() if k != "content"}), CANONICAL),
    "empty-content": (called(said('{"expression": "12 + 30"}', content="")), CANONICAL),
    "empty-parts": (called(said('{"expression": "12 + 30"}', content=[])), CANONICAL),
    "nulls": (
        called(said('{"expression": "12 + 30"}', refusal=None, audio=None, function_call=None, annotations=[])),
        CANONICAL,
    ),
    "result-parts": (
        called(said('{"expression": "12 + 30"}'), [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]),
        CANONICAL,
    ),
    "no-arguments": (called(said("")), called(said("{}"))),
    "no-calls": (
        [{"role": "user", "content": ASK}, {"role": "assistant", "content": "42.", "tool_calls": []}],
        [{"role": "user", "content": ASK}, {"role": "assistant", "content": "42."}],
    ),
}


@pytest.mark.parametrize("sent", MESSAGES)
async def test_messages_are_read_as_what_they_mean(
    service: RecordedService, client: openai.AsyncOpenAI, sent: str
) -> None:
    """However a client spells a conversation, the model reads the same tokens."""
    prompts = []
    for messages in MESSAGES[sent]:
        await client.chat.completions.create(
            model=POLICY,
            messages=messages,  # type: ignore[arg-type]
            tools=[CALCULATOR],  # type: ignore[list-item]
            max_tokens=1,
        )
        prompts.append(completions(service)[-1].prompt_ids)
    assert prompts[0] == prompts[1]


async def test_strict_tools_are_sampled_freely(service: RecordedService, client: openai.AsyncOpenAI) -> None:
    """`strict`, which openai-agents sets on every tool, is shown to neither model nor engine, and all is trainable."""
    prompts = []
    for extra in ({}, {"strict": True}, {"strict": None}):
        tool = {"type": "function", "function": CALCULATOR["function"] | extra}
        await client.chat.completions.create(
            model=POLICY,
            messages=[{"role": "user", "content": ASK}],
            tools=[tool],  # type: ignore[list-item]
            max_tokens=1,
        )
        event = completions(service)[-1]
        assert event.trainable
        prompts.append(event.prompt_ids)
    assert prompts[0] == prompts[1] == prompts[2]


@streamed_or_not
async def test_all_settings_of_openai_agents_are_taken(client: openai.AsyncOpenAI, stream: bool) -> None:
    """Every setting that its chat completions model sends, at once."""
    settings = agents.ModelSettings(
        temperature=0.9,
        top_p=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        tool_choice="auto",
        parallel_tool_calls=True,
        max_tokens=4,
        reasoning=Reasoning(effort="low"),
        verbosity="low",
        metadata={"session_id": f"settings-{stream}"},
        store=True,
        prompt_cache_retention="in_memory",
        include_usage=True,
        top_logprobs=2,
        extra_args={"seed": 1, "user": "ann", "service_tier": "auto", "safety_identifier": "x"},
    )
    agent = agents.Agent(
        "helper",
        model=agents.OpenAIChatCompletionsModel(POLICY, client),
        model_settings=settings,
        tools=[agents.function_tool(calculator)],
    )
    config = agents.RunConfig(tracing_disabled=True)
    run: Any
    if stream:
        run = agents.Runner.run_streamed(agent, ASK, run_config=config)
        async for _ in run.stream_events():
            pass
    else:
        run = await agents.Runner.run(agent, ASK, run_config=config)
    assert run.context_wrapper.usage.output_tokens > 0


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_retention": "24h"},
        {"prompt_cache_options": {"ttl": "1h"}},
        {"prediction": {"type": "content", "content": "42"}},
        {"modalities": ["text"]},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"response_format": {"type": "text"}},
        {
            "tools": None,
            "tool_choice": None,
            "parallel_tool_calls": None,
            "stop": None,
            "store": None,
            "metadata": None,
        },
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_that_change_nothing_are_taken(service: RecordedService, fields: dict[str, Any]) -> None:
    """What clients send for OpenAI's sake is no error."""
    body = {"model": POLICY, "messages": [{"role": "user", "content": ASK}], "max_tokens": 1} | fields
    headers = {"Authorization": f"Bearer {CLIENT_KEY}"}
    response = httpx.post(f"{service.base_url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert response.status_code == httpx.codes.OK, response.text


@pytest.mark.parametrize("field", ["functions", "audio", "web_search_options", "moderation"])
def test_fields_that_would_change_the_answer_are_refused(service: RecordedService, field: str) -> None:
    """What this service cannot do is refused by name and not passed over."""
    body = {"model": POLICY, "messages": [{"role": "user", "content": ASK}], "max_tokens": 1, field: {}}
    headers = {"Authorization": f"Bearer {CLIENT_KEY}"}
    response = httpx.post(f"{service.base_url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert response.status_code == httpx.codes.BAD_REQUEST
    assert response.json()["error"]["param"] == field
