"""A plain tool loop: ask, run the tools that were called, ask again, until the model answers in words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from learner.study.agent_task import Call, Fault, Task, fault, malformed_call, right, run_tool
from learner.tiny.messages import Message, user

# A right call and its answer take two; the rest is room for second tries.
TURNS = 4


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the model; `message` is what goes back as history, `version` 0 is the base."""

    completion_id: str
    version: int
    message: Message
    calls: tuple[Call, ...]

    @property
    def text(self) -> str:
        return self.message.get("content") or ""


@dataclass(frozen=True, slots=True)
class Episode:
    """One session as its client saw it: its last turn, and the calls and faults of all its turns."""

    session: str
    completion_id: str
    version: int
    text: str
    success: bool
    calls: int
    faults: tuple[Fault, ...]

    @property
    def reward(self) -> float:
        """1 where the last answer is right, else 0."""
        return float(self.success)


Ask = Callable[[Sequence[Message]], Reply]
Tool = Callable[[Call], str]


def converse(task: Task, ask: Ask, tool: Tool = run_tool) -> Episode:
    """Put the task's question and go on until the model answers in words, or for TURNS turns."""
    messages = [user(task.problem.question)]
    replies: list[Reply] = []
    for _ in range(TURNS):
        reply = ask(messages)
        replies.append(reply)
        messages.append(reply.message)
        if not reply.calls:
            break
        messages += [{"role": "tool", "tool_call_id": call.id, "content": tool(call)} for call in reply.calls]
    return _episode(task, replies)


def _episode(task: Task, turns: Sequence[Reply]) -> Episode:
    last = turns[-1]
    calls = [call for reply in turns for call in reply.calls]
    malformed: list[Fault] = ["malformed" for reply in turns if malformed_call(reply.text)]
    faults = [found for call in calls if (found := fault(call, task.problem)) is not None]
    return Episode(
        task.session,
        last.completion_id,
        last.version,
        last.text,
        success=not last.calls and right(last.text, task.problem),
        calls=len(calls) + len(malformed),
        faults=(*faults, *malformed),
    )
