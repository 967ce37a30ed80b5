"""The sampler against an independent computation in numpy, float64."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from app.engines.sampler import distribution, draw, seeded  # noqa: E402
from app.events.schema import Sampling  # noqa: E402

VOCABULARY = 40


def sampling(**options: Any) -> Sampling:
    return Sampling(**{"temperature": 1.0, "max_tokens": 8, **options})


def reference(
    logits: Sequence[float], sampling: Sampling, generated: Sequence[int], bias: Mapping[int, float]
) -> np.ndarray:
    """Probabilities [vocabulary] by the definitions, one token at a time."""
    scores = np.array(logits, dtype=np.float64)
    for token, value in bias.items():
        scores[token] += value
    for token, count in Counter(generated).items():
        scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    if sampling.temperature > 0:
        scores /= sampling.temperature
    weights = np.exp(scores - scores.max())
    if sampling.temperature > 0:
        weights[weights < sampling.min_p] = 0
        order = sorted(range(len(weights)), key=lambda token: -weights[token])
        if sampling.top_k:
            weights[order[sampling.top_k :]] = 0
        reached, whole = 0.0, weights.sum()
        for place, token in enumerate(order):
            if place and reached >= sampling.top_p * whole:
                weights[token] = 0
            reached += weights[token]
    return weights / weights.sum()


OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.6]),
        "top_p": st.sampled_from([0.05, 0.5, 0.9, 1.0]),
        "top_k": st.sampled_from([0, 1, 5, 1000]),
        "min_p": st.sampled_from([0.0, 0.05, 0.4]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 0.7]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 1.1]),
    }
)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**31),
    options=OPTIONS,
    generated=st.lists(st.integers(0, VOCABULARY - 1), max_size=12),
    bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-5, 5), max_size=3),
)
def test_distribution_is_what_the_parameters_say(
    seed: int, options: dict[str, Any], generated: list[int], bias: dict[int, float]
) -> None:
    """Every combination of parameters gives the distribution of their definitions, normalised over what is left."""
    logits = np.random.default_rng(seed).normal(0, 2, VOCABULARY).astype(np.float32)
    result = distribution(torch.tensor(logits), sampling(**options), generated, bias)
    assert result.dtype == torch.float32
    expected = reference(logits.tolist(), sampling(**options), generated, bias)
    np.testing.assert_allclose(result.exp().numpy(), expected, atol=2e-6)


def test_logits_are_not_changed() -> None:
    logits = torch.zeros(4)
    distribution(logits, sampling(presence_penalty=1.0), [1], {2: 3.0})
    assert logits.tolist() == [0.0] * 4


def test_draws_follow_the_distribution_and_carry_its_logprobs() -> None:
    """The frequencies of 20,000 draws agree with the probabilities that the draws report."""
    logprobs = distribution(torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5]), sampling(temperature=0.8, top_k=4))
    generator = seeded(0)
    draws = [draw(logprobs, generator) for _ in range(20_000)]
    counts = Counter(one.token for one in draws)
    assert 3 not in counts
    for one in draws[:50]:
        assert one.logprob == pytest.approx(float(logprobs[one.token]))
        assert counts[one.token] / len(draws) == pytest.approx(math.exp(one.logprob), abs=0.015)


def test_greedy_takes_the_likeliest_and_reports_its_logprob_at_temperature_one() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0])
    cold = sampling(temperature=0.0, top_k=1)
    assert cold.greedy
    drawn = draw(distribution(logits, cold), seeded(None), greedy=True)
    assert drawn.token == 1
    assert drawn.logprob == pytest.approx(3 - math.log(1 + math.exp(3) + math.exp(1)), abs=1e-6)


def test_a_temperature_too_small_for_float32_is_greedy() -> None:
    tiny = sampling(temperature=1e-40)
    assert tiny.greedy
    assert distribution(torch.tensor([0.0, 3.0]), tiny).isfinite().all()


def test_alternatives_leave_out_what_cannot_be_drawn() -> None:
    logprobs = distribution(torch.tensor([0.0, 1.0, 2.0, 3.0]), sampling(top_k=2))
    drawn = draw(logprobs, seeded(1), alternatives=20)
    assert [token for token, _ in drawn.top] == [3, 2]
    assert sum(math.exp(logprob) for _, logprob in drawn.top) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("options", [{"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1}])
def test_the_strictest_limits_leave_the_likeliest(options: dict[str, Any]) -> None:
    logprobs = distribution(torch.tensor([0.1, 0.3, 0.2]), sampling(**options))
    assert logprobs.exp().tolist() == pytest.approx([0, 1, 0])


def test_a_seed_repeats_and_no_seed_does_not() -> None:
    logprobs = torch.zeros(1000).log_softmax(-1)

    def series(seed: int | None) -> list[int]:
        generator = seeded(seed)
        return [draw(logprobs, generator).token for _ in range(8)]

    assert series(7) == series(7)
    assert series(7) != series(8)
    assert series(None) != series(None)
