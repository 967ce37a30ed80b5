"""Agent loops as their users write them: the plain `openai` client, openai-agents and pydantic-ai, all unchanged.

Each keeps its conversation in the form of its framework, so that what is sent is what the framework makes of it.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Sequence
from typing import Any, Literal

import agents
import openai
from agents.exceptions import AgentsException
from agents.items import TResponseInputItem
from openai.types.chat import ChatCompletionMessage
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import AgentStreamEvent, RunContext, UsageLimits
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.messages import ModelMessage, ModelMessagesTypeAdapter, ModelResponse, TextPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings
from pydantic_ai.providers.openai import OpenAIProvider

from learner.tiny.tool_dialogues import CALCULATOR, calculate
from tests.service import POLICY, REQUEST_S

Where = Literal["header", "metadata"]

CALLS = 4  # model calls for one question; a model that goes on calling is stopped by its loop
INSTRUCTIONS = "Use the calculator."


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: The expression, such as 2 + 3.
    """
    return calculate(expression)


class Loop(ABC):
    """One conversation with an agent.

    Args:
        session: its name; None where the client gives none.
        where: how the client gives it.
        fields: what the framework calls its model settings.
    """

    name: str

    def __init__(
        self, client: openai.AsyncOpenAI, session: str | None, *, where: Where, stream: bool, **fields: Any
    ) -> None:
        self.client, self.stream, self.fields = client, stream, fields
        self.headers = {"X-Riacho-Session": session} if session is not None and where == "header" else {}
        self.metadata = {"session_id": session} if session is not None and where == "metadata" else {}
        self.failures: list[str] = []

    @abstractmethod
    async def ask(self, text: str) -> None:
        """One question with all its tool calls; what the framework gives up on is noted and leaves the history."""

    @abstractmethod
    def answers(self) -> int:
        """How many messages of the assistant's the conversation has."""

    @abstractmethod
    def drop_answer(self) -> None:
        """Take the first message of the assistant's out, with what belongs to it."""

    @abstractmethod
    def rewrite_answer(self, text: str) -> None:
        """Put other words into the assistant's last message that has any."""

    @abstractmethod
    def saved(self) -> str:
        """The conversation as JSON."""

    @abstractmethod
    def resume(self, saved: str) -> None:
        """Go on from a saved conversation."""


class OpenAILoop(Loop):
    """The loop that every tutorial has."""

    name = "openai"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}]

    async def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        for _ in range(CALLS):
            message = await self._complete()
            self.messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or []:
                self.messages.append({"role": "tool", "tool_call_id": call.id, "content": _called(call)})
            if not message.tool_calls:
                return
        self.failures.append("too many calls")

    async def _complete(self) -> ChatCompletionMessage:
        request: dict[str, Any] = {
            "model": POLICY,
            "messages": self.messages,
            "tools": [CALCULATOR],
            "extra_headers": self.headers,
            **({"metadata": self.metadata} if self.metadata else {}),
            **self.fields,
        }
        if not self.stream:
            answer = await self.client.chat.completions.create(**request)
            return answer.choices[0].message
        try:
            async with self.client.chat.completions.stream(**request) as stream:
                return (await stream.get_final_completion()).choices[0].message
        except openai.LengthFinishReasonError as error:
            return error.completion.choices[0].message

    def answers(self) -> int:
        return len(self._answers())

    def drop_answer(self) -> None:
        first = self._answers()[0]
        end = first + 1
        while end < len(self.messages) and self.messages[end]["role"] == "tool":
            end += 1
        del self.messages[first:end]

    def rewrite_answer(self, text: str) -> None:
        spoken = [at for at in self._answers() if not self.messages[at].get("tool_calls")]
        self.messages[spoken[-1]] = {"role": "assistant", "content": text}

    def saved(self) -> str:
        return json.dumps(self.messages)

    def resume(self, saved: str) -> None:
        self.messages = json.loads(saved)

    def _answers(self) -> list[int]:
        return [at for at, message in enumerate(self.messages) if message["role"] == "assistant"]


class AgentsLoop(Loop):
    """openai-agents with its chat completions model."""

    name = "openai-agents"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.items: list[TResponseInputItem] = []
        self.agent = agents.Agent(
            "helper",
            instructions=INSTRUCTIONS,
            model=agents.OpenAIChatCompletionsModel(POLICY, self.client),
            model_settings=agents.ModelSettings(
                extra_headers=self.headers, metadata=self.metadata or None, include_usage=True, **self.fields
            ),
            tools=[agents.function_tool(calculator)],
        )

    async def ask(self, text: str) -> None:
        conversation = [*self.items, {"role": "user", "content": text}]
        config = agents.RunConfig(tracing_disabled=True)
        run: Any
        try:
            if self.stream:
                run = agents.Runner.run_streamed(self.agent, conversation, max_turns=CALLS, run_config=config)
                async for _ in run.stream_events():
                    pass
            else:
                run = await agents.Runner.run(self.agent, conversation, max_turns=CALLS, run_config=config)
        except AgentsException as error:  # it asked for a tool that is not there, said nothing, or went on and on
            self.failures.append(repr(error))
            return
        self.items = run.to_input_list()

    def answers(self) -> int:
        return len(self._spoken()) + sum(item.get("type") == "function_call" for item in self.items)

    def drop_answer(self) -> None:
        calls = [item for item in self.items if item.get("type") == "function_call"]
        if not calls:
            del self.items[self._spoken()[0]]
            return
        call_id = calls[0]["call_id"]  # type: ignore[typeddict-item]
        self.items = [item for item in self.items if item.get("call_id") != call_id]

    def rewrite_answer(self, text: str) -> None:
        self.items[self._spoken()[-1]] = {"role": "assistant", "content": text}

    def saved(self) -> str:
        return json.dumps(self.items)

    def resume(self, saved: str) -> None:
        self.items = json.loads(saved)

    def _spoken(self) -> list[int]:
        return [at for at, item in enumerate(self.items) if item.get("role") == "assistant"]


class PydanticLoop(Loop):
    """pydantic-ai with its OpenAI chat model."""

    name = "pydantic-ai"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.messages: list[ModelMessage] = []
        settings = OpenAIChatModelSettings(extra_headers=self.headers, **self.fields)
        if self.metadata:
            settings["extra_body"] = {"metadata": self.metadata}
        model = OpenAIChatModel(POLICY, provider=OpenAIProvider(openai_client=self.client), settings=settings)
        self.agent = PydanticAgent(model, instructions=INSTRUCTIONS, tools=[calculator])

    async def ask(self, text: str) -> None:
        try:
            result = await self.agent.run(
                text,
                message_history=self.messages,
                usage_limits=UsageLimits(request_limit=CALLS),
                event_stream_handler=_read if self.stream else None,
            )
            self.messages = result.all_messages()
        except AgentRunError as error:  # it asked for a tool that is not there, said nothing, or went on and on
            self.failures.append(repr(error))

    def answers(self) -> int:
        return len(self._answers())

    def drop_answer(self) -> None:
        first = self._answers()[0]
        calls = any(part.part_kind == "tool-call" for part in self.messages[first].parts)
        del self.messages[first : first + (2 if calls else 1)]

    def rewrite_answer(self, text: str) -> None:
        self.messages[self._answers()[-1]] = ModelResponse(parts=[TextPart(text)])

    def saved(self) -> str:
        return ModelMessagesTypeAdapter.dump_json(self.messages).decode()

    def resume(self, saved: str) -> None:
        self.messages = ModelMessagesTypeAdapter.validate_json(saved)

    def _answers(self) -> list[int]:
        return [at for at, message in enumerate(self.messages) if isinstance(message, ModelResponse)]


LOOPS: Sequence[type[Loop]] = (OpenAILoop, AgentsLoop, PydanticLoop)


def new_client(base_url: str, key: str) -> openai.AsyncOpenAI:
    """The public client; it does not hide errors behind retries."""
    return openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key, max_retries=0, timeout=REQUEST_S)


async def _read(_: RunContext[None], events: AsyncIterable[AgentStreamEvent]) -> None:
    """pydantic-ai streams where somebody reads."""
    async for _event in events:
        pass


def _called(call: Any) -> str:
    """What the tool says to a call; to one that it cannot read, what is wrong."""
    try:
        return calculator(**json.loads(call.function.arguments))
    except (TypeError, ValueError) as error:
        return f"error: {error}"
