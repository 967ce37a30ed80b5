"""The agents' task: a sum a session, to be worked out with the calculator and answered as `The answer is 7.`

The tiny model cannot compute, so that an answer without a right call is wrong. The base calls for two sums of three
and copies what it reads, but one answer of four has the form that the grader reads. Else it answers without a call,
takes the wrong operator, or writes an expression that the calculator refuses.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Literal

from learner.tiny.tool_dialogues import BAD_EXPRESSION, CALCULATOR, Problem, calculate, calculator_problem

TOOLS = [CALCULATOR]
MAX_TOKENS = 96
TEMPERATURE = 0.8
ANSWER = re.compile(r"The answer is (-?\d+)\.")

Fault = Literal["malformed", "unknown_tool", "invalid_arguments", "refused", "not_asked"]


@dataclass(frozen=True, slots=True)
class Task:
    """What one session asks, and the seed that its answers are sampled with."""

    session: str
    problem: Problem
    seed: int


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call as the chat completions API hands it over: `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


def tasks(rng: Random, name: str = "agent") -> Iterator[Task]:
    """Tasks without end, in sessions `name-1`, `name-2`, …; the same generator gives the same tasks."""
    for number in count(1):
        yield Task(f"{name}-{number}", calculator_problem(rng), rng.getrandbits(31))


def run_tool(call: Call) -> str:
    """What the client's tools say to a call; an error is text too, which the model reads."""
    if call.name != "calculator":
        return f"error: no tool {call.name}"
    expression = _expression(call.arguments)
    return BAD_EXPRESSION if expression is None else calculate(expression)


def fault(call: Call, problem: Problem) -> Fault | None:
    """Why a call is a bad one; None where it gives the value that was asked for."""
    if call.name != "calculator":
        return "unknown_tool"
    expression = _expression(call.arguments)
    if expression is None:
        return "invalid_arguments"
    value = calculate(expression)
    if value == BAD_EXPRESSION:
        return "refused"
    return None if value == problem.answer else "not_asked"


def malformed_call(text: str) -> bool:
    """Whether an answer's text holds a tool call that was no valid one, so that the service left it as text."""
    return "<tool_call>" in text


def right(text: str, problem: Problem) -> bool:
    """Whether an answer gives the result in the form that the grader reads."""
    found = ANSWER.fullmatch(text.strip())
    return found is not None and found[1] == problem.answer


def _expression(arguments: str) -> str | None:
    """The calculator's one argument, or None where the JSON does not match its schema."""
    try:
        found = json.loads(arguments)
    except json.JSONDecodeError:
        return None
    expression = found.get("expression") if isinstance(found, dict) else None
    return expression if isinstance(expression, str) else None
