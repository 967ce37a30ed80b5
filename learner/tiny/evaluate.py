"""Measure a tiny model: `python -m learner.tiny.evaluate DIR [--json FILE] [--samples N] [--seed N]`.

Everything is sampled at temperature 1, as the model is served. Shares are of all prompts of their kind.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from learner.tiny.corpus import styled_prompt, writing_prompt
from learner.tiny.grammar import parses
from learner.tiny.messages import Message, Tool, user
from learner.tiny.scorers import style_score
from learner.tiny.styles import STYLE_NAMES
from learner.tiny.tokenizer import render
from learner.tiny.tool_dialogues import CALCULATOR, calculate, calculator_problem, call, result

MAX_NEW_TOKENS = 96
BATCH_SIZE = 50
# A style dominates an answer when it has the highest score and that score is more than an accident.
DOMINANT_SCORE = 0.3
TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """A sampled answer; `tokens` counts the end token, `ended` says whether there is one."""

    text: str
    tokens: int
    ended: bool


@dataclass(frozen=True)
class Writing:
    """Open writing prompts: the share of answers per dominant style, and the shape of the answers."""

    dominant_style: dict[str, float]
    mean_tokens: float
    ended: float
    parses: float


@dataclass(frozen=True)
class ToolUse:
    """Calculator problems: how many get a call, a call that gives the right value, a right final answer."""

    calls: float
    right_expression: float
    right_answer: float


@dataclass(frozen=True)
class Report:
    """All measurements of one model; `named_style_score` is the mean score when the prompt names the style."""

    writing: Writing
    named_style_score: dict[str, float]
    calculator: ToolUse


class Sampler:
    """A model that answers conversations in batches, on one thread, reproducibly."""

    def __init__(self, directory: Path, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, padding_side="left")
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def answers(self, conversations: Sequence[list[Message]], tools: Sequence[Tool] = ()) -> list[Answer]:
        """One answer to each conversation, in order."""
        batches = (conversations[i : i + BATCH_SIZE] for i in range(0, len(conversations), BATCH_SIZE))
        return [answer for batch in batches for answer in self._batch(batch, tools)]

    def _batch(self, conversations: Sequence[list[Message]], tools: Sequence[Tool]) -> list[Answer]:
        texts = [render(self._tokenizer, messages, tools, to_answer=True) for messages in conversations]
        prompts = self._tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
        with torch.inference_mode():
            output = self._model.generate(**prompts, max_new_tokens=MAX_NEW_TOKENS, **sampling)
        return [self._answer(row) for row in output[:, prompts["input_ids"].shape[1] :]]

    def _answer(self, ids: Tensor) -> Answer:
        """The answer in one row of generated ids, which are [new tokens] with padding after the end token."""
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True))
        tokens = int((ids != self._tokenizer.pad_token_id).sum())
        return Answer(text, tokens, ended=bool((ids == self._tokenizer.eos_token_id).any()))


def dominant_style(answer: Answer) -> str | None:
    """The style of the answer, or None when no style is clearly there."""
    scores = {style: style_score(answer.text, style, answer.ended) for style in STYLE_NAMES}
    best = max(scores, key=scores.__getitem__)
    return best if scores[best] > DOMINANT_SCORE else None


def measure_writing(sampler: Sampler, rng: Random, count: int) -> Writing:
    """Sample answers to open writing prompts."""
    answers = sampler.answers([[user(writing_prompt(rng))] for _ in range(count)])
    styles = [dominant_style(answer) for answer in answers]
    return Writing(
        dominant_style={style: styles.count(style) / count for style in STYLE_NAMES},
        mean_tokens=sum(answer.tokens for answer in answers) / count,
        ended=sum(answer.ended for answer in answers) / count,
        parses=sum(parses(answer.text) for answer in answers) / count,
    )


def measure_named_style(sampler: Sampler, rng: Random, style: str, count: int) -> float:
    """The mean score for the style of answers to prompts that ask for it."""
    answers = sampler.answers([[user(styled_prompt(rng, style))] for _ in range(count)])
    return sum(style_score(answer.text, style, answer.ended) for answer in answers) / count


def called_expression(text: str) -> str | None:
    """The expression of the calculator call in an answer, or None when there is no well-formed call."""
    match = TOOL_CALL.search(text)
    if match is None:
        return None
    try:
        expression = json.loads(match[1])["arguments"]["expression"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return None
    return expression if isinstance(expression, str) else None


def _states(text: str, number: str) -> bool:
    """Whether the number stands in the text by itself, not as a part of a longer number."""
    return re.search(rf"(?<!\d){re.escape(number)}(?!\d)", text) is not None


def measure_calculator(sampler: Sampler, rng: Random, count: int) -> ToolUse:
    """Put problems to the model, run the calls it makes, and let it answer from their results."""
    problems = [calculator_problem(rng) for _ in range(count)]
    questions = [[user(problem.question)] for problem in problems]
    answers = sampler.answers(questions, [CALCULATOR])
    calls = sum("<tool_call>" in answer.text for answer in answers) / count
    found = {index: called_expression(answer.text) for index, answer in enumerate(answers)}
    expressions = {index: expression for index, expression in found.items() if expression is not None}
    values = {index: calculate(expression) for index, expression in expressions.items()}
    continued = [
        [*questions[index], call("calculator", {"expression": expression}), result(values[index])]
        for index, expression in expressions.items()
    ]
    for index, answer in zip(values, sampler.answers(continued, [CALCULATOR]), strict=True):
        answers[index] = answer
    return ToolUse(
        calls=calls,
        right_expression=sum(values[index] == problems[index].answer for index in values) / count,
        right_answer=sum(_states(a.text, p.answer) for a, p in zip(answers, problems, strict=True)) / count,
    )


def evaluate(directory: Path, samples: int = 400, seed: int = 7) -> Report:
    """Measure the model in a directory, with half as many samples per named style and for the calculator."""
    sampler, rng = Sampler(directory, seed), Random(seed)
    return Report(
        writing=measure_writing(sampler, rng, samples),
        named_style_score={style: measure_named_style(sampler, rng, style, samples // 2) for style in STYLE_NAMES},
        calculator=measure_calculator(sampler, rng, samples // 2),
    )


def main() -> None:
    """The evaluation command."""
    parser = argparse.ArgumentParser(prog="python -m learner.tiny.evaluate", description="Measure a tiny model.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report there")
    parser.add_argument("--samples", type=int, default=400, help="open writing prompts (default %(default)s)")
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    report = json.dumps(asdict(evaluate(arguments.directory, arguments.samples, arguments.seed)), indent=2)
    sys.stdout.write(report + "\n")
    if arguments.json:
        arguments.json.write_text(report + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
