"""The formulas of SAO, against hand-written numbers, brute force in float64, autograd and torch.distributions."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from learner import sao
from tests.builders import double_sum_gae

BAND = sao.Band.from_offsets(0.3, 5.0)
REWARDS_AND_VALUES = st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=25)


def _random_logits(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def _policy_loss_of_ratios(ratios: list[float], advantages: list[float]) -> tuple[float, list[float]]:
    """The loss and its gradient by log pi, for tokens of log pi = -1 with these ratios to the behaviour."""
    logprobs = torch.full((len(ratios),), -1.0, dtype=torch.float64, requires_grad=True)
    behaviour = -1.0 - torch.tensor(ratios, dtype=torch.float64).log()
    loss = sao.policy_loss(logprobs, behaviour, torch.tensor(advantages, dtype=torch.float64), BAND, len(ratios))
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad.tolist()


def test_ratio_is_new_probability_over_recorded_probability() -> None:
    """pi_theta .5 against pi_rollout .25 is 2; .1 against .4 is .25; equal is 1."""
    new, old = torch.tensor([0.5, 0.1, 0.3]).log(), torch.tensor([0.25, 0.4, 0.3]).log()
    torch.testing.assert_close(sao.importance_ratio(new, old), torch.tensor([2.0, 0.25, 1.0]))


@pytest.mark.parametrize(("offsets", "bounds"), [((0.3, 5.0), (0.7, 6.0)), ((0.8, 3.0), (0.2, 4.0))])
def test_paper_offsets_give_paper_bounds(offsets: tuple[float, float], bounds: tuple[float, float]) -> None:
    """0.3/5.0 accepts ratios in (0.7, 6.0), and 0.8/3.0 in (0.2, 4.0)."""
    band = sao.Band.from_offsets(*offsets)
    assert (band.lower, band.upper) == pytest.approx(bounds, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("eps_low", "eps_high"), [(0.3, 5.0), (0.8, 3.0), (0.5, 5.0)])
def test_mask_rejects_the_edges_and_accepts_just_inside(eps_low: float, eps_high: float, dtype: torch.dtype) -> None:
    """The band is open: 1 - eps_low and 1 + eps_high are rejected, the next number inside keeps its ratio."""
    band = sao.Band.from_offsets(eps_low, eps_high)
    low, high = torch.tensor(1 - eps_low, dtype=dtype), torch.tensor(1 + eps_high, dtype=dtype)
    inside_low, inside_high = torch.nextafter(low, high), torch.nextafter(high, low)
    ratio = torch.stack([low, high, inside_low, inside_high, torch.tensor(1.0, dtype=dtype)])
    expected = torch.stack([low * 0, high * 0, inside_low, inside_high, torch.tensor(1.0, dtype=dtype)])
    assert torch.equal(sao.dis_weight(ratio, band), expected)


def test_mask_ignores_the_sign_of_the_advantage() -> None:
    """A token's gradient flips its sign with its advantage and is otherwise the same, in the band and out of it."""
    ratios = [0.4, 0.75, 1.0, 5.9, 6.5]
    _, positive = _policy_loss_of_ratios(ratios, [1.0] * 5)
    _, negative = _policy_loss_of_ratios(ratios, [-1.0] * 5)
    assert positive == pytest.approx([0.0, -0.15, -0.2, -1.18, 0.0], abs=1e-12)
    assert negative == pytest.approx([0.0, 0.15, 0.2, 1.18, 0.0], abs=1e-12)


@pytest.mark.parametrize("advantage", [3.0, -3.0])
@pytest.mark.parametrize("ratio", [0.01, 0.69, 6.01, 1e6])
def test_rejected_token_has_exactly_zero_gradient(ratio: float, advantage: float) -> None:
    """A rejected token's gradient is 0.0, not a clamped weight."""
    _, gradient = _policy_loss_of_ratios([ratio, 1.0], [advantage, 1.0])
    assert gradient[0] == 0.0
    assert gradient[1] == pytest.approx(-0.5)


def test_rejected_tokens_count_in_n() -> None:
    """N is all action tokens: one accepted of four, with advantage 2 and log pi = -1, gives 2/4."""
    loss, gradient = _policy_loss_of_ratios([1.0, 0.1, 9.0, 9.0], [2.0, 5.0, 5.0, -5.0])
    assert loss == pytest.approx(0.5)
    assert gradient == pytest.approx([-0.5, 0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("logprob", "behaviour"),
    [(-1.0, -1e30), (-1e30, -1.0), (-1.0, -math.inf), (-math.inf, -1.0), (-200.0, -0.1), (-0.1, -200.0)],
)
def test_out_of_band_token_gives_zero_and_never_nan(logprob: float, behaviour: float) -> None:
    """Whatever the distance of the two logprobs, a masked token adds exactly 0 to the loss and the gradient."""
    logprobs = torch.tensor([logprob, -1.0], requires_grad=True)
    recorded = torch.tensor([behaviour, -1.0])
    ratio = sao.importance_ratio(logprobs.detach(), recorded)
    assert torch.isfinite(ratio).all()
    assert sao.dis_weight(ratio, BAND).tolist() == [0.0, 1.0]
    loss = sao.policy_loss(logprobs, recorded, torch.tensor([-2.0, 1.0]), BAND, 2)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, -0.5]
    assert float(loss.detach()) == 0.5


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_loss_gradient_is_the_analytic_one(temperature: float) -> None:
    """dL/dz = -(1/N) f(r) A (onehot - softmax(z/T)) / T for each action token, 0 for a rejected one."""
    logits = _random_logits(5, 7).requires_grad_(True)
    tokens = torch.tensor([0, 6, 3, 3, 1])
    advantages = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0], dtype=torch.float64)
    ratios = torch.tensor([1.0, 0.8, 5.0, 0.5, 6.5], dtype=torch.float64)
    probabilities = torch.softmax(logits.detach() / temperature, -1)
    chosen = probabilities[torch.arange(5), tokens]
    logprobs = sao.token_logprobs(logits, tokens, torch.full((5,), temperature))
    sao.policy_loss(logprobs, (chosen / ratios).log(), advantages, BAND, 5).backward()
    weight = torch.tensor([1.0, 0.8 * -2.0, 5.0 * 0.5, 0.0, 0.0], dtype=torch.float64)
    onehot = torch.nn.functional.one_hot(tokens, 7)
    expected = -(weight / 5 / temperature)[:, None] * (onehot - probabilities)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(logits.grad[3:], torch.zeros(2, 7, dtype=torch.float64))


def test_gradient_does_not_flow_through_the_ratio() -> None:
    """f(r) A is a constant: with r = 2 the gradient by log pi is -f(r) A / N, not the -2 f(r) A / N of d(r log pi)."""
    _, gradient = _policy_loss_of_ratios([2.0], [1.0])
    assert gradient == pytest.approx([-2.0])


def test_token_logprobs_divide_by_each_tokens_own_temperature() -> None:
    """Two logits (0, ln 3): at T = 1 the second has 3/4; at T = 1/2 it has 9/10."""
    logits = torch.tensor([[0.0, math.log(3.0)]] * 3)
    logprobs = sao.token_logprobs(logits, torch.tensor([1, 1, 0]), torch.tensor([1.0, 0.5, 0.5]))
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.75, 0.9, 0.1]))


def test_token_logprobs_of_bfloat16_logits_are_computed_in_float32() -> None:
    """A half-precision engine's logits lose nothing more in the softmax."""
    logits = _random_logits(4, 50).bfloat16()
    tokens = torch.tensor([1, 2, 3, 4])
    expected = torch.log_softmax(logits.double(), -1)[torch.arange(4), tokens]
    torch.testing.assert_close(sao.token_logprobs(logits, tokens, torch.ones(4)).double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("tokens", "alpha", "expected"),
    [(1, 1.5, Fraction(1, 3)), (2, 1.5, Fraction(2, 3)), (100, 1.5, Fraction(149, 150)), (4, 0.5, Fraction(1, 2))],
)
def test_lambda_is_one_minus_one_over_alpha_l(tokens: int, alpha: float, expected: Fraction) -> None:
    """lambda = 1 - 1/(1.5 l): 1/3 for one token, 149/150 for a hundred."""
    assert sao.policy_lambda(tokens, alpha) == pytest.approx(float(expected), abs=1e-15)


@pytest.mark.parametrize(("tokens", "alpha"), [(1, 0.5), (1, 1.0), (3, 0.1)])
def test_lambda_is_never_below_zero(tokens: int, alpha: float) -> None:
    """Where alpha l <= 1 the formula is not positive, and lambda is 0."""
    assert sao.policy_lambda(tokens, alpha) == 0.0


def test_lambda_has_float64_precision() -> None:
    """For a million tokens 1 - lambda is 1/1,500,000 to ten digits; float32 would be 3 % off."""
    assert 1 - sao.policy_lambda(1_000_000, 1.5) == pytest.approx(1 / 1_500_000, rel=1e-9)


def test_gae_by_hand() -> None:
    """Two turns of two tokens, 0.5 for the first turn and 1 for the session; gamma 1, lambda 1/2, worked by hand.

    Deltas: V 0.4 - 0.2 = 0.2; .5 + 0.6 - 0.4 = 0.7; 0.8 - 0.6 = 0.2; 1 - 0.8 = 0.2.
    """
    values = torch.tensor([0.2, 0.4, 0.6, 0.8], dtype=torch.float64)
    rewards = torch.tensor([0.0, 0.5, 0.0, 1.0], dtype=torch.float64)
    advantages = sao.skip_observation_gae(values, rewards, gamma=1.0, lam=0.5)
    assert advantages.tolist() == pytest.approx([0.625, 0.85, 0.3, 0.2], abs=1e-12)


def test_gae_with_discount_by_hand() -> None:
    """gamma .5, lambda .5: deltas 0 + .5*2 - 1 = 0 and 4 - 2 = 2, so the first advantage is 0 + .25 * 2."""
    values, rewards = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0])
    assert sao.skip_observation_gae(values, rewards, gamma=0.5, lam=0.5).tolist() == [0.5, 2.0]


@given(pairs=REWARDS_AND_VALUES, gamma=st.floats(0.5, 1), lam=st.floats(0, 1))
def test_gae_equals_the_double_sum(pairs: list[tuple[float, float]], gamma: float, lam: float) -> None:
    """The backward loop gives sum_k (gamma lambda)^(k-t) delta_k with the last next-value 0."""
    rewards, values = zip(*pairs, strict=True)
    got = sao.skip_observation_gae(
        torch.tensor(values, dtype=torch.float64), torch.tensor(rewards, dtype=torch.float64), gamma, lam
    )
    assert got.tolist() == pytest.approx(double_sum_gae(values, rewards, gamma, lam), abs=1e-9)


@given(pairs=REWARDS_AND_VALUES, gamma=st.floats(0.5, 1))
def test_value_target_is_the_sum_of_the_rewards_from_there_on(pairs: list[tuple[float, float]], gamma: float) -> None:
    """lambda_critic = 1: no value enters, only rewards at or after the token."""
    rewards = [reward for reward, _ in pairs]
    expected = [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]
    got = sao.value_targets(torch.tensor(rewards, dtype=torch.float64), gamma)
    assert got.tolist() == pytest.approx(expected, abs=1e-9)


def test_value_targets_by_hand() -> None:
    """Rewards 0, .5, 0, 1 at gamma 1: 1.5 up to the judged token, 1 after it."""
    assert sao.value_targets(torch.tensor([0.0, 0.5, 0.0, 1.0]), 1.0).tolist() == [1.5, 1.5, 1.0, 1.0]


def test_critic_loss_is_divided_by_the_updates_tokens() -> None:
    """Errors 1 and 2 of an update with ten action tokens: 5/10, with gradient 2 error / 10."""
    values = torch.tensor([1.0, 4.0], requires_grad=True)
    loss = sao.critic_loss(values, torch.tensor([0.0, 2.0]), total=10)
    loss.backward()
    assert float(loss.detach()) == 0.5
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.2, 0.4])


def test_full_kl_equals_torch_distributions() -> None:
    """KL(policy || base) over the whole vocabulary, in this direction."""
    policy, base = _random_logits(6, 11, 1), _random_logits(6, 11, 2)
    expected = kl_divergence(Categorical(logits=policy), Categorical(logits=base))
    torch.testing.assert_close(sao.full_kl(policy, base).double(), expected, atol=1e-5, rtol=1e-5)


def test_sampled_kl_by_hand() -> None:
    """k3 with q/p = 2 is 2 - ln 2 - 1; with q/p = 1/2 it is 1/2 + ln 2 - 1; on equal probabilities 0."""
    logprobs, base = torch.tensor([0.2, 0.4, 0.3]).log(), torch.tensor([0.4, 0.2, 0.3]).log()
    expected = torch.tensor([1 - math.log(2), math.log(2) - 0.5, 0.0])
    torch.testing.assert_close(sao.sampled_kl(logprobs, base), expected, atol=1e-6, rtol=0)


def test_sampled_kl_is_an_unbiased_estimate_of_the_full_kl() -> None:
    """The expectation of k3 over the policy's own tokens is the divergence itself."""
    policy, base = _random_logits(1, 9, 3).log_softmax(-1)[0], _random_logits(1, 9, 4).log_softmax(-1)[0]
    expected = kl_divergence(Categorical(logits=policy), Categorical(logits=base))
    torch.testing.assert_close((policy.exp() * sao.sampled_kl(policy, base)).sum(), expected)


def test_sampled_kl_of_an_impossible_token_is_finite() -> None:
    """A token that the policy all but excludes does not overflow."""
    assert torch.isfinite(sao.sampled_kl(torch.tensor([-1e4, -0.1]), torch.tensor([-0.1, -1e4]))).all()


def test_entropy_equals_torch_distributions() -> None:
    """In nats, of each next-token distribution."""
    logits = _random_logits(6, 11, 5)
    torch.testing.assert_close(sao.entropy(logits).double(), Categorical(logits=logits).entropy(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("ratios", "expected"), [([1.0] * 4, 4.0), ([2.0] * 4, 4.0), ([3.0, 1.0], 1.6), ([1.0, 1e-9], 1.0)]
)
def test_effective_sample_size(ratios: list[float], expected: float) -> None:
    """(sum r)^2 / sum r^2: all tokens where the ratios are equal, one where one has all the weight."""
    assert sao.effective_sample_size(torch.tensor(ratios)) == pytest.approx(expected)
