"""A plain tool loop: ask, run the tools that were called, ask again, until the model answers in words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from learner.study.agent_task import Call, Fault, Task, fault, malformed_call, right, run_tool
from learner.tiny.messages import Message, user
from learner.tiny.tool_dialogues import Problem

# A right call and its answer take two; the rest is room for second tries.
TURNS_A_QUESTION = 4


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
class Outcome:
    """How one question ended: `completion_id` is of its last turn, `calls` and `faults` of all its turns."""

    completion_id: str
    right: bool
    calls: int
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True)
class Episode:
    """One session as its client saw it; `version` answered its last turn, with `text`."""

    session: str
    version: int
    text: str
    outcomes: tuple[Outcome, ...]

    @property
    def success(self) -> bool:
        """Whether every question was answered right."""
        return all(outcome.right for outcome in self.outcomes)

    @property
    def rewards(self) -> dict[str, float]:
        """By completion: 1 where a question's last answer is right, else 0."""
        return {outcome.completion_id: float(outcome.right) for outcome in self.outcomes}

    @property
    def reward(self) -> float:
        """The session's mean over its questions, in [0, 1]."""
        return sum(self.rewards.values()) / len(self.outcomes)

    @property
    def calls(self) -> int:
        return sum(outcome.calls for outcome in self.outcomes)

    @property
    def bad_calls(self) -> int:
        return sum(len(outcome.faults) for outcome in self.outcomes)


Ask = Callable[[Sequence[Message]], Reply]
Tool = Callable[[Call], str]


def converse(task: Task, ask: Ask, tool: Tool = run_tool) -> Episode:
    """Put the task's questions one after the other, each in a conversation of its own.

    The base has never seen a second question in one conversation: it repeats the first one's numbers there, and
    hardly learned otherwise in 200 sessions.
    """
    worked = [(_work([user(problem.question)], ask, tool), problem) for problem in task.problems]
    last = worked[-1][0][-1]
    outcomes = tuple(_outcome(turns, problem) for turns, problem in worked)
    return Episode(task.session, last.version, last.text, outcomes)


def _work(messages: list[Message], ask: Ask, tool: Tool) -> list[Reply]:
    """Answer the last message; the conversation grows by what was said and by what the tools returned."""
    replies: list[Reply] = []
    for _ in range(TURNS_A_QUESTION):
        reply = ask(messages)
        replies.append(reply)
        messages.append(reply.message)
        if not reply.calls:
            break
        messages += [{"role": "tool", "tool_call_id": call.id, "content": tool(call)} for call in reply.calls]
    return replies


def _outcome(turns: Sequence[Reply], problem: Problem) -> Outcome:
    last = turns[-1]
    calls = [call for reply in turns for call in reply.calls]
    malformed: list[Fault] = ["malformed" for reply in turns if malformed_call(reply.text)]
    faults = [found for call in calls if (found := fault(call, problem)) is not None]
    answered = not last.calls and not malformed_call(last.text) and right(last.text, problem)
    return Outcome(last.completion_id, answered, len(calls) + len(malformed), (*faults, *malformed))
