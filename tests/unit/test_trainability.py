"""What can be trained on exactly: only what temperature and logits alone explain."""

from typing import Any

import pytest

from app.events.schema import Sampling
from app.serving.trainability import reason_not_trainable

PLAIN: dict[str, Any] = {"temperature": 1.0, "max_tokens": 16}


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.7}, {"temperature": 1.5}, {"seed": 3}, {"stop": ("a",)}, {"max_tokens": 1}, {"top_p": 1.0}],
    ids=str,
)
def test_plain_sampling_is_trainable(fields: dict[str, Any]) -> None:
    """Temperature, seed, stop and limits leave the distribution as the learner computes it."""
    assert reason_not_trainable(Sampling(**PLAIN | fields)) is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"top_p": 0.999}, "top_p"),
        ({"top_k": 1}, "top_k"),
        ({"min_p": 0.01}, "min_p"),
        ({"presence_penalty": 0.1}, "penalty"),
        ({"presence_penalty": -0.1}, "penalty"),
        ({"frequency_penalty": 0.1}, "penalty"),
        ({"frequency_penalty": -0.1}, "penalty"),
        ({"logit_bias": True}, "logit_bias"),
        ({"structured": True}, "constrained"),
    ],
    ids=str,
)
def test_anything_that_shapes_the_distribution_is_named(fields: dict[str, Any], named: str) -> None:
    """Each parameter that makes the behaviour logprobs those of another distribution is the reason."""
    assert named in (reason_not_trainable(Sampling(**PLAIN | fields)) or "")


def test_greedy_is_not_trainable_however_it_is_spelt() -> None:
    """A temperature so small that the engine takes the likeliest token is greedy, as 0 is."""
    assert reason_not_trainable(Sampling(**PLAIN | {"temperature": 1e-6})) is not None


def test_every_sampling_parameter_has_a_rule() -> None:
    """A new sampling parameter must be thought about here."""
    known = {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias"}
    assert set(Sampling.model_fields) == known | {"structured", "seed", "max_tokens", "stop"}
