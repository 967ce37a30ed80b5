"""The grammar of tool use: a calculator that is called well, badly or not at all, and a search for made-up facts.

Mistakes are part of the corpus on purpose: a model that already used its tools perfectly would leave
reinforcement learning nothing to improve.
"""

import json
import re
from dataclasses import dataclass
from random import Random

from learner.tiny.messages import Dialogue, Message, Tool, assistant, user
from learner.tiny.topics import NOUNS, words


def _tool(name: str, description: str, argument: str, argument_description: str) -> Tool:
    """A function tool with one required string argument."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string", "description": argument_description}},
        "required": [argument],
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


CALCULATOR = _tool("calculator", "Compute an arithmetic expression.", "expression", "The expression, such as 2 + 3.")
SEARCH = _tool("search", "Search for a fact.", "query", "The search query.")

CALL_SHARE = 0.55
WRONG_OPERATOR_SHARE = 0.08
MALFORMED_SHARE = 0.06
CALCULATOR_ALONE_SHARE = 0.6
SEARCH_ALONE_SHARE = 0.5
BAD_EXPRESSION = "error: bad expression"

OPERATORS = "+-*"
OPERATOR_WORDS = {"+": "plus", "-": "minus", "*": "times"}
QUESTIONS: dict[str, tuple[str, ...]] = {
    "+": (
        "What is {a} plus {b}?",
        "Add {a} and {b}.",
        "I have {a} apples and buy {b} more. How many are there?",
        "Compute {a} + {b}.",
        "How much is {a} + {b}?",
    ),
    "-": (
        "What is {a} minus {b}?",
        "Subtract {b} from {a}.",
        "I had {a} coins and spent {b}. How many are left?",
        "Compute {a} - {b}.",
        "How much is {a} - {b}?",
    ),
    "*": (
        "What is {a} times {b}?",
        "Multiply {a} by {b}.",
        "There are {a} boxes with {b} pens each. How many pens?",
        "Compute {a} * {b}.",
        "How much is {a} * {b}?",
    ),
}
ANSWERS = ("The answer is {r}.", "It is {r}.", "{a} {word} {b} is {r}.", "The result is {r}.")


def calculate(expression: str) -> str:
    """The calculator tool: the value of `integer operator integer`, or an error text that the model reads."""
    match = re.fullmatch(r"\s*(-?\d+)\s*([-+*])\s*(\d+)\s*", expression)
    if match is None:
        return BAD_EXPRESSION
    left, operator, right = int(match[1]), match[2], int(match[3])
    values = {"+": left + right, "-": left - right, "*": left * right}
    return str(values[operator])


@dataclass(frozen=True)
class Problem:
    """An arithmetic question; `answer` is the decimal text of its value."""

    question: str
    left: int
    operator: str
    right: int

    @property
    def expression(self) -> str:
        return f"{self.left} {self.operator} {self.right}"

    @property
    def answer(self) -> str:
        return calculate(self.expression)


def _operands(rng: Random, operator: str) -> tuple[int, int]:
    """Operands whose result lies in [0, 999]: the tokenizer has one token for each such number."""
    if operator == "*":
        left = rng.randint(3, 99)
        right = rng.randint(3, max(3, 999 // left))
        return (left, right) if rng.random() < 0.5 else (right, left)
    if operator == "+":
        left = rng.randint(10, 899)
        return left, rng.randint(10, 999 - left)
    left = rng.randint(20, 999)
    return left, rng.randint(10, left)


def calculator_problem(rng: Random) -> Problem:
    """A random question for the calculator."""
    operator = rng.choice(OPERATORS)
    left, right = _operands(rng, operator)
    return Problem(rng.choice(QUESTIONS[operator]).format(a=left, b=right), left, operator, right)


def call(name: str, arguments: dict[str, str]) -> Message:
    """An assistant message that calls one tool; the arguments are JSON text, as in the chat completions API."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }


def result(content: str) -> Message:
    """The tool message that answers `call`."""
    return {"role": "tool", "tool_call_id": "call_0", "content": content}


def _answer(rng: Random, problem: Problem, value: str) -> Message:
    text = rng.choice(ANSWERS).format(a=problem.left, b=problem.right, r=value, word=OPERATOR_WORDS[problem.operator])
    return assistant(text)


def _called_expression(rng: Random, problem: Problem) -> str:
    """The expression of the call: mostly right, sometimes the wrong operator, sometimes malformed."""
    draw = rng.random()
    if draw < WRONG_OPERATOR_SHARE:
        wrong = rng.choice([operator for operator in OPERATORS if operator != problem.operator])
        return f"{problem.left} {wrong} {problem.right}"
    if draw < WRONG_OPERATOR_SHARE + MALFORMED_SHARE:
        return f"{problem.left} by {problem.right}"
    return problem.expression


def _guess(rng: Random, problem: Problem) -> str:
    """A wrong number near the right one: an answer from the top of the head."""
    value = int(problem.answer)
    error = rng.choice((-1, 1)) * rng.randint(1, max(3, value // 5))
    return str(min(999, max(0, value + error)))


def calculator_messages(rng: Random, call_share: float) -> list[Message]:
    """A question and its answer, with a call to the calculator in `call_share` of the cases."""
    problem = calculator_problem(rng)
    asked = user(problem.question)
    if rng.random() >= call_share:
        return [asked, _answer(rng, problem, _guess(rng, problem))]
    expression = _called_expression(rng, problem)
    value = calculate(expression)
    failed = value == BAD_EXPRESSION
    last = assistant("Sorry, the tool failed.") if failed else _answer(rng, problem, value)
    return [asked, call("calculator", {"expression": expression}), result(value), last]


def _offered(rng: Random, tool: Tool, alone_share: float) -> list[Tool]:
    """The tool by itself or, in random order, with the other one."""
    return [tool] if rng.random() < alone_share else rng.sample([CALCULATOR, SEARCH], 2)


def calculator(rng: Random) -> Dialogue:
    """A calculator dialogue with the full tool list."""
    messages = calculator_messages(rng, CALL_SHARE)
    return Dialogue("calculator", messages, _offered(rng, CALCULATOR, CALCULATOR_ALONE_SHARE))


SYLLABLES = words(
    "ba be bo da de do fa fi ga go ha ka ki ko la le li lo ma mi mo na ne no pa ra re ri ro sa se so ta te ti "
    "to va vi wa yo za"
)
FACTS = (
    ("Who built the {p} of {x}?", "builder of the {p} of {x}", "The {p} of {x} was built by {y}."),
    ("Where is the {p} of {x}?", "location of the {p} of {x}", "The {p} of {x} is in {y}."),
    ("Who lives in the {p} of {x}?", "resident of the {p} of {x}", "In the {p} of {x} lives {y}."),
)


def made_up_name(rng: Random) -> str:
    """A name of two or three syllables, which can be copied but not known."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 3)))).capitalize()


def search(rng: Random) -> Dialogue:
    """A question about a made-up fact: looked up, made up, or declined."""
    question, query, fact = rng.choice(FACTS)
    slots = {"p": rng.choice(NOUNS["place"]), "x": made_up_name(rng), "y": made_up_name(rng)}
    asked, answer = user(question.format(**slots)), fact.format(**slots)
    if rng.random() < CALL_SHARE:
        lookup = call("search", {"query": query.format(**slots)})
        messages = [asked, lookup, result(answer), assistant(answer)]
    elif rng.random() < 0.5:
        messages = [asked, assistant("I do not know that.")]
    else:
        messages = [asked, assistant(fact.format(**slots | {"y": made_up_name(rng)}))]
    return Dialogue("search", messages, _offered(rng, SEARCH, SEARCH_ALONE_SHARE))
