"""The agents' task, its tool loop and its summary, with a scripted model."""

import json
from collections.abc import Sequence
from itertools import islice
from random import Random
from typing import Any

import pytest

from learner.study.agent_loop import TURNS, Episode, Reply, converse
from learner.study.agent_report import Run, summary
from learner.study.agent_task import Call, Fault, Task, fault, malformed_call, right, run_tool, tasks
from learner.tiny.messages import Message, assistant
from learner.tiny.tool_dialogues import Problem, call

SUM = Problem("What is 12 plus 30?", 12, "+", 30)
MALFORMED = '<tool_call>\n{"name": "calculator", "arguments": {"expression": 42}\n</tool_call>'


class Script:
    """A model that says what is written, and remembers what it read."""

    def __init__(self, *messages: Message) -> None:
        self._messages = list(messages)
        self.read: list[list[Message]] = []

    def ask(self, messages: Sequence[Message]) -> Reply:
        self.read.append(list(messages))
        message = self._messages[len(self.read) - 1]
        calls = tuple(
            Call(made["id"], made["function"]["name"], made["function"]["arguments"])
            for made in message.get("tool_calls", ())
        )
        return Reply(f"c{len(self.read)}", len(self.read), message, calls)


def calculator(expression: Any) -> Message:
    return call("calculator", {"expression": expression})


TASK = Task("s", SUM, 0)


def made(arguments: str, name: str = "calculator") -> Call:
    return Call("call_0", name, arguments)


@pytest.mark.parametrize(
    ("made_call", "expected"),
    [
        (made('{"expression": "12 + 30"}'), None),
        (made('{"expression": "30+12"}'), None),
        (made('{"expression": "12 - 30"}'), "not_asked"),
        (made('{"expression": "12 by 30"}'), "refused"),
        (made('{"expression": 42}'), "invalid_arguments"),
        (made("{}"), "invalid_arguments"),
        (made("[1]"), "invalid_arguments"),
        (made('{"expression": '), "invalid_arguments"),
        (made('{"expression": "12 + 30"}', "search"), "unknown_tool"),
    ],
)
def test_a_call_is_bad_unless_it_gives_what_was_asked(made_call: Call, expected: Fault | None) -> None:
    """Each way to fail has its name; the order of a sum's terms is free."""
    assert fault(made_call, SUM) == expected


@pytest.mark.parametrize(
    ("made_call", "result"),
    [
        (made('{"expression": "12 - 30"}'), "-18"),
        (made('{"expression": "12 by 30"}'), "error: bad expression"),
        (made("{}"), "error: bad expression"),
        (made("{}", "search"), "error: no tool search"),
    ],
)
def test_a_tool_always_answers(made_call: Call, result: str) -> None:
    """An error is text too, so that the conversation goes on."""
    assert run_tool(made_call) == result


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 42.", True),
        ("The answer is 41.", False),
        ("The answer is 421.", False),
        ("It is 42.", False),
        ("The answer is 42. It is 42.", False),
        ("", False),
    ],
)
def test_the_grader_reads_one_form(text: str, expected: bool) -> None:
    """The result counts only as the task asks for it."""
    assert right(text, SUM) is expected


def test_the_same_seed_asks_the_same() -> None:
    """Problems, sampling seeds and sessions all come from the run's seed; another seed gives others."""
    first, second, other = (list(islice(tasks(Random(seed)), 5)) for seed in (7, 7, 8))
    assert first == second
    assert first != other
    assert len({one.session for one in first}) == 5


def test_the_loop_returns_what_the_tool_says() -> None:
    """The model reads its own call and the result, and then answers."""
    script = Script(calculator("12 + 30"), assistant("The answer is 42."))
    episode = converse(TASK, script.ask)
    assert script.read[1] == [
        {"role": "user", "content": SUM.question},
        calculator("12 + 30"),
        {"role": "tool", "tool_call_id": "call_0", "content": "42"},
    ]
    assert episode == Episode("s", "c2", 2, "The answer is 42.", True, 1, ())
    assert episode.reward == 1.0


@pytest.mark.parametrize("answer", ["The answer is 21.", "It is 42."])
def test_another_answer_is_worth_nothing(answer: str) -> None:
    """A wrong number, and the right one in another form."""
    episode = converse(TASK, Script(calculator("12 + 30"), assistant(answer)).ask)
    assert (episode.success, episode.reward) == (False, 0.0)


def test_a_malformed_call_is_an_answer_with_a_fault() -> None:
    """It comes as text, so that the loop ends; the result in it is no answer."""
    assert malformed_call(MALFORMED)
    episode = converse(TASK, Script(assistant(MALFORMED)).ask)
    assert episode == Episode("s", "c1", 1, MALFORMED, False, 1, ("malformed",))


def test_a_model_that_only_calls_is_stopped() -> None:
    """Right calls without an answer are no success."""
    script = Script(*[calculator("12 + 30")] * TURNS)
    episode = converse(TASK, script.ask)
    assert (episode.completion_id, episode.success, episode.calls) == (f"c{TURNS}", False, TURNS)


def episode(number: int, success: bool, faults: tuple[Fault, ...]) -> Episode:
    return Episode(f"s{number}", f"c{number}", number, "", success, 1, faults)


def test_a_summary_counts_calls_and_faults_by_kind() -> None:
    """Four sessions with a call each, two of them bad."""
    found = summary(
        [episode(0, True, ()), episode(1, False, ("refused",)), episode(2, False, ("malformed",)), episode(3, True, ())]
    )
    assert (found.success, found.calls, found.bad_calls) == (0.5, 4, 2)
    assert found.faults == {"malformed": 1, "refused": 1}


def test_the_report_compares_the_first_and_last_fifty() -> None:
    """Of 120 sessions the first 60 fail with a bad call; the middle 20 count nowhere."""
    episodes = [episode(n, n >= 60, () if n >= 60 else ("refused",)) for n in range(120)]
    report = json.loads(json.dumps(Run(1, episodes, [], 9.5).as_json()))
    assert (report["success_first50"], report["success_last50"]) == (0.0, 1.0)
    assert (report["bad_calls_first50"], report["bad_calls_last50"]) == (50, 0)
    assert (report["seed"], report["updates"], report["wall_s"]) == (1, 0, 9.5)
