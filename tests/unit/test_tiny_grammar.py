"""The grammar check and the corpus that it describes."""

from collections import Counter
from itertools import islice
from random import Random

import pytest

from learner.tiny.corpus import MIXTURE, dialogues, styled_prompt, writing_prompt
from learner.tiny.grammar import parses
from learner.tiny.styles import STYLE_NAMES, styled_text
from learner.tiny.tool_dialogues import BAD_EXPRESSION, calculate, calculator_problem
from learner.tiny.topics import TOPICS


def _texts(style: str, count: int = 200) -> list[str]:
    rng = Random(style)
    return [styled_text(rng, rng.choice(TOPICS), style) for _ in range(count)]


@pytest.mark.parametrize("style", STYLE_NAMES)
def test_generated_text_parses_in_its_style(style: str) -> None:
    """Whatever the generator writes is language of its style."""
    assert all(parses(text, style) for text in _texts(style))


@pytest.mark.parametrize("style", STYLE_NAMES)
def test_generated_text_does_not_parse_in_another_style(style: str) -> None:
    """The styles share no sentence."""
    others = [other for other in STYLE_NAMES if other != style]
    assert not any(parses(text, other) for text in _texts(style) for other in others)


def test_mixed_styles_parse_only_when_no_style_is_asked_for() -> None:
    """A cute sentence and a classical one are language, but in neither style."""
    text = "I want to hug the fluffy cat all day, uwu! O noble moon, thou art the joy of my heart!"
    assert parses(text)
    assert not any(parses(text, style) for style in STYLE_NAMES)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "uwu nya~ hehe fluffy doki doki <3",
        "I want to hug the fluffy cat all day",
        "I want to hug the fluffy zeppelin all day, uwu!",
        "I want to hug the cursed cat all day, uwu!",
        "I want to hug the fluffy cat all day, uwu!I want to hug the fluffy cat all day, uwu!",
    ],
    ids=["empty", "heap of markers", "cut off", "unknown noun", "foreign adjective", "no space"],
)
def test_gibberish_does_not_parse(text: str) -> None:
    """Markers without a sentence, and sentences with a fault, are rejected."""
    assert not parses(text)


def test_surrounding_space_is_ignored() -> None:
    """A model's trailing newline is no fault."""
    assert parses("  O noble moon, thou art the joy of my heart!\n")


def test_the_same_seed_gives_the_same_dialogues() -> None:
    """The corpus depends on the random generator alone."""
    assert list(islice(dialogues(Random(3)), 50)) == list(islice(dialogues(Random(3)), 50))


def test_the_mixture_is_a_distribution() -> None:
    """The shares add up to one."""
    assert sum(share for _, share in MIXTURE) == pytest.approx(1.0)


def test_open_requests_get_each_style_equally_often() -> None:
    """Among 3000 open requests each style answers about a third."""
    rng = Random(0)
    answers = [d.messages[-1]["content"] for d in islice(dialogues(rng), 9000) if d.kind == "write"]
    styles = Counter(style for answer in answers for style in STYLE_NAMES if parses(answer, style))
    assert all(0.30 < styles[style] / len(answers) < 0.37 for style in STYLE_NAMES)


def test_an_open_prompt_names_no_style() -> None:
    """The style of the answer is the model's choice."""
    rng = Random(0)
    assert not any(style in writing_prompt(rng) for _ in range(100) for style in STYLE_NAMES)


def test_a_styled_prompt_names_its_style() -> None:
    """The request says which style it wants."""
    assert styled_prompt(Random(0), "chuunibyou").endswith(" Use a chuunibyou style.")


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 + 3", "5"), (" 7-10 ", "-3"), ("12 * 12", "144"), ("2 by 3", BAD_EXPRESSION), ("1 + 2 + 3", BAD_EXPRESSION)],
)
def test_the_calculator_takes_one_operator(expression: str, value: str) -> None:
    """Anything but two integers and an operator is an error text, not an exception."""
    assert calculate(expression) == value


def test_problems_and_answers_are_numbers_below_1000() -> None:
    """So that each is one token."""
    rng = Random(0)
    problems = [calculator_problem(rng) for _ in range(500)]
    assert all(0 <= int(p.answer) <= 999 and max(p.left, p.right) <= 999 for p in problems)
