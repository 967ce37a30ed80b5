"""The simulated users' decisions, and what the terminal shows of them."""

from itertools import islice
from random import Random

import pytest

from learner.study.client import parse_version
from learner.study.live import sparkline
from learner.study.users import Answer, requests, scores

CUTE = "Hehe~ the fluffy cat naps in the sun, uwu! I want to hug it."


def answer(text: str, finished: bool = True) -> Answer:
    return Answer("id", 3, text, finished, started=0.0, ended=1.0)


@pytest.mark.parametrize(("name", "version"), [("riacho@12", 12), ("riacho@base", 0), ("a.b-c@1", 1)])
def test_the_version_header_names_the_adapter(name: str, version: int) -> None:
    """The base counts as version 0, older than all adapters."""
    assert parse_version(name) == version


@pytest.mark.parametrize("name", ["riacho", "riacho@", "riacho@new", ""])
def test_a_header_without_a_version_is_refused(name: str) -> None:
    """A guess would falsify the reaction times."""
    with pytest.raises(ValueError, match=r"expected|invalid literal"):
        parse_version(name)


def test_the_same_seed_asks_the_same() -> None:
    """Prompts, sampling seeds and sessions all come from the run's seed."""
    first, second = (list(islice(requests(Random(7), "cute"), 20)) for _ in range(2))
    assert first == second


def test_another_seed_asks_otherwise() -> None:
    """Twenty equal prompts by chance would be a fault."""
    first, second = (list(islice(requests(Random(seed), "cute"), 20)) for seed in (1, 2))
    assert [r.prompt for r in first] != [r.prompt for r in second]


def test_every_request_is_a_session_of_its_own() -> None:
    """Each conversation is one rollout."""
    sessions = [request.session for request in islice(requests(Random(7), "cute"), 20)]
    assert len(set(sessions)) == 20


def test_users_judge_an_answer_by_each_style() -> None:
    """Five cute markers, and none of the others'."""
    assert scores(answer(CUTE)) == {"cute": 1.0, "chuunibyou": 0.0, "classical": 0.0}


def test_an_answer_that_was_cut_off_is_worth_less() -> None:
    """The scorer gives .3 of the score to an answer that did not end by itself."""
    assert scores(answer(CUTE, finished=False))["cute"] == pytest.approx(0.3)


def test_a_sparkline_never_exceeds_its_width() -> None:
    """A long run is drawn as the means of equal stretches: 0, .5 and 1."""
    assert sparkline([0.0] * 50 + [0.5] * 50 + [1.0] * 50, width=3) == "▁▅█"


def test_a_short_run_has_a_short_sparkline() -> None:
    """One block a value, and none for none."""
    assert (sparkline([1.0, 0.0], width=60), sparkline([], width=60)) == ("█▁", "")
