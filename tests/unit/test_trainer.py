"""One update, against gradients, advantages and metrics computed independently, turn by turn."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from torch.distributions import Categorical, kl_divergence
from transformers import AutoModelForCausalLM

from app.settings import TINY_MODEL
from learner import checkpoint
from learner.critic import Critic
from learner.report import explained_variance
from learner.rollouts import Rollout, Turn
from learner.trainer import Trainer
from tests.builders import (
    changed,
    double_sum_gae,
    new_trainer,
    perturb,
    recorded,
    same,
    snapshot,
    token_rewards,
    turn,
    turn_logits,
    turn_logprobs,
)

PAPER: dict[str, Any] = {"kl_coef": 0.0, "negative_scale": 1.0, "on_shift": "none", "policy_clip": 1e9}
FIRST = turn((5, 6, 7), (300, 41, 900, 12), reward=0.5, temperature=0.7)
SECOND = turn((5, 6, 7, 300, 41, 900, 12, 8, 8, 9), (77, 260), temperature=1.3)
EDITED = turn((5, 6, 11, 300), (501, 44, 45), reward=-0.25)
RATIOS = ([1.0, 2.0, 0.5, 7.0], [5.5, 0.8], [1.1, 0.9, 0.69])


def _rollout(trainer: Trainer, ratios: Sequence[Sequence[float]] | None = None, session: str = "s") -> Rollout:
    """Three turns, of which the first two share a sequence, recorded by the trainer's own policy."""
    turns = (FIRST, SECOND, EDITED)
    made = [recorded(trainer.policy, t, ratios[i] if ratios else None) for i, t in enumerate(turns)]
    return Rollout(session, tuple(made), 1.0)


def _single(trainer: Trainer, reward: float, ratios: Sequence[float] | None = None) -> Rollout:
    asked = turn((9, 10, 11), (400, 21, 22), temperature=0.9)
    return Rollout("single", (recorded(trainer.policy, asked, ratios),), reward)


@torch.no_grad()
def _values(critic: Critic, rollout: Rollout) -> list[float]:
    """The values of all action tokens, each turn in a forward pass of its own."""
    values: list[float] = []
    for t in rollout.turns:
        ids = torch.tensor(t.prompt_ids + t.completion_ids)
        values += critic.values(ids, torch.arange(len(t.prompt_ids), len(ids))).tolist()
    return values


def _advantages(trainer: Trainer, rollout: Rollout) -> list[float]:
    values = _values(trainer.critic, rollout)
    lam = 1 - 1 / (1.5 * len(values))
    return double_sum_gae(values, token_rewards(rollout), 1.0, lam)


def _policy_gradient(
    trainer: Trainer, rollouts: Sequence[Rollout], divergence: Callable[[Turn], Tensor] | None = None
) -> dict[str, Tensor]:
    """The gradient of -(1/N) sum f(r) A log pi + sum of the divergence / N, written out token by token."""
    policy, terms, count = trainer.policy, [], 0
    for rollout in rollouts:
        advantages = iter(_advantages(trainer, rollout))
        for t in rollout.turns:
            logprobs = turn_logprobs(policy, t)
            for logprob, behaviour in zip(logprobs, t.logprobs, strict=True):
                ratio = math.exp(float(logprob.detach()) - behaviour)
                advantage = next(advantages)
                count += 1
                if 0.7 < ratio < 6.0:
                    terms.append(-ratio * advantage * logprob)
            if divergence:
                terms.append(divergence(t))
    loss = torch.stack(terms).sum() / count
    policy.activate("policy")
    names = policy.parameters()
    return dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))


def _assert_gradients(trainer: Trainer, expected: dict[str, Tensor]) -> None:
    """The gradients that the update's policy step used, all of them."""
    scale = max(float(g.abs().max()) for g in expected.values())
    assert scale > 1e-3
    for name, parameter in trainer.policy.parameters().items():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-4 * scale, rtol=1e-3, msg=name)


def _norm(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))


def _before_each_step(
    monkeypatch: pytest.MonkeyPatch, optimizer: torch.optim.Optimizer, look: Callable[[], None]
) -> None:
    step = optimizer.step

    def looked_at() -> None:
        look()
        step()

    monkeypatch.setattr(optimizer, "step", looked_at)


def _adam(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{i}/{name}": value.clone()
        for i, state in enumerate(optimizer.state.values())
        for name, value in state.items()
    }


@pytest.mark.parametrize("form", ["lora", "full"])
def test_gradient_is_the_papers_loss(form: str) -> None:
    """kl_coef = 0: the gradient is that of the paper's loss over a rollout with masked tokens, turns in two sequences,
    two temperatures, per-turn rewards and a session reward; N counts the rejected tokens.
    """
    trainer = new_trainer(critic=form, **PAPER)
    perturb(trainer)
    rollout = _rollout(trainer, RATIOS)
    expected = _policy_gradient(trainer, [rollout])
    report = trainer.update([rollout])
    _assert_gradients(trainer, expected)
    assert report.policy_grad_norm == pytest.approx(_norm(expected), rel=1e-3)


def test_gradient_of_several_rollouts_is_that_of_one_loss_over_all_their_tokens() -> None:
    """rollouts_per_update accumulates: a long and a short rollout weigh by their tokens, not one half each."""
    trainer = new_trainer(rollouts_per_update=2, **PAPER)
    perturb(trainer)
    batch = [_rollout(trainer, RATIOS), _single(trainer, -1.0, [1.2, 0.9, 3.0])]
    expected = _policy_gradient(trainer, batch)
    report = trainer.update(batch)
    _assert_gradients(trainer, expected)
    assert (report.action_tokens, report.session_ids) == (12, ["s", "single"])


def test_full_kl_anchor_adds_its_gradient() -> None:
    """kl_coef times the mean over the action tokens of KL(policy || base), from torch.distributions."""
    trainer = new_trainer(**{**PAPER, "kl_coef": 0.5})
    perturb(trainer)
    plain = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    rollout = _rollout(trainer, RATIOS)

    def divergence(t: Turn) -> Tensor:
        with torch.no_grad():
            base = plain(input_ids=torch.tensor([t.prompt_ids + t.completion_ids])).logits[0]
        base = base[len(t.prompt_ids) - 1 : -1].double()
        policy = turn_logits(trainer.policy, t).double()
        return 0.5 * kl_divergence(Categorical(logits=policy), Categorical(logits=base)).sum()

    expected = _policy_gradient(trainer, [rollout], divergence)
    nats = sum(float(divergence(t).detach()) for t in rollout.turns) / 0.5 / 9
    report = trainer.update([rollout])
    _assert_gradients(trainer, expected)
    assert report.kl_to_base == pytest.approx(nats, rel=1e-3)
    assert nats > 1e-3


def test_sampled_kl_anchor_adds_its_gradient() -> None:
    """kl_estimator = sampled: k3 of the sampled tokens at the temperature of each."""
    trainer = new_trainer(**{**PAPER, "kl_coef": 0.5, "kl_estimator": "sampled"})
    perturb(trainer)
    plain = new_trainer().policy
    rollout = _rollout(trainer, RATIOS)

    def divergence(t: Turn) -> Tensor:
        gap = turn_logprobs(plain, t).detach() - turn_logprobs(trainer.policy, t)
        return 0.5 * (gap.exp() - gap - 1).sum()

    expected = _policy_gradient(trainer, [rollout], divergence)
    trainer.update([rollout])
    _assert_gradients(trainer, expected)


@pytest.mark.parametrize("target_modules", ["all-linear", "q_proj,lm_head"])
@pytest.mark.parametrize("estimator", ["full", "sampled"])
def test_chunks_of_tokens_give_the_gradient_of_the_whole(
    estimator: str, target_modules: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two action tokens at a time or all at once: the same gradients and numbers, an adapted output layer included."""
    settings = {"kl_coef": 0.5, "kl_estimator": estimator, "target_modules": target_modules}
    whole, chunked = (new_trainer(**{**PAPER, **settings}) for _ in range(2))
    for trainer in (whole, chunked):
        perturb(trainer)
    expected = whole.update([_rollout(whole, RATIOS)])
    monkeypatch.setattr("learner.trainer.CHUNK_LOGITS", 2 * chunked.policy.vocabulary)
    report = chunked.update([_rollout(chunked, RATIOS)])
    gradients = {name: p.grad for name, p in whole.policy.parameters().items() if p.grad is not None}
    assert len(gradients) == len(whole.policy.parameters())
    _assert_gradients(chunked, gradients)
    for name in ("policy_grad_norm", "entropy", "kl_to_base", "logprob_gap"):
        assert getattr(report, name) == pytest.approx(getattr(expected, name), rel=1e-5), name
    assert report.kl_after == pytest.approx(expected.kl_after, rel=1e-3)


def test_chunks_repeat_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two learners on the same rollouts, two action tokens at a time: the same weights, bit for bit."""
    weights = []
    for trainer in (new_trainer(), new_trainer()):
        monkeypatch.setattr("learner.trainer.CHUNK_LOGITS", 2 * trainer.policy.vocabulary)
        perturb(trainer)
        for _ in range(2):
            trainer.update([_rollout(trainer, RATIOS)])
        weights.append(snapshot(trainer.policy.parameters()))
    assert same(*weights)


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_logits_are_never_of_more_than_a_chunk(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the length of a rollout, the output layer sees at most so many tokens at a time, and each 4 times:
    policy and base, for the gradient and for the check after it.
    """
    trainer = new_trainer()
    rollout = _rollout(trainer)
    monkeypatch.setattr("learner.trainer.CHUNK_LOGITS", tokens * trainer.policy.vocabulary)
    seen: list[int] = []
    trainer.policy.causal_lm.get_output_embeddings().register_forward_hook(
        lambda _, __, logits: seen.append(logits.shape[1])
    )
    trainer.update([rollout])
    assert max(seen) == tokens
    assert sum(seen) == 4 * rollout.action_tokens


def test_negative_scale_damps_negative_advantages_only() -> None:
    """Advantages below 0 are multiplied by negative_scale; those above stay."""
    norms = {}
    for scale in (1.0, 0.25):
        for reward in (1.0, -1.0):
            trainer = new_trainer((-1.0, 1.0), **{**PAPER, "negative_scale": scale})
            norms[scale, reward] = trainer.update([_single(trainer, reward)]).policy_grad_norm
    assert norms[1.0, -1.0] == pytest.approx(norms[1.0, 1.0], rel=1e-4)
    assert norms[0.25, -1.0] == pytest.approx(0.25 * norms[1.0, -1.0], rel=1e-4)
    assert norms[0.25, 1.0] == pytest.approx(norms[1.0, 1.0], rel=1e-4)


def test_negative_advantages_within_a_rollout_are_damped_token_by_token() -> None:
    """One rollout whose advantages have both signs: the gradient is that of the damped ones."""
    trainer = new_trainer(**{**PAPER, "negative_scale": 0.25})
    perturb(trainer)
    turns = (replace(FIRST, reward=3.0), SECOND)
    rollout = Rollout("s", tuple(recorded(trainer.policy, t) for t in turns), -1.0)
    advantages = _advantages(trainer, rollout)
    assert min(advantages) < 0 < max(advantages)
    count = len(advantages)
    weights = [a if a > 0 else 0.25 * a for a in advantages]
    logprobs = torch.cat([turn_logprobs(trainer.policy, t) for t in rollout.turns])
    loss = -(torch.tensor(weights, dtype=torch.float64) * logprobs).sum() / count
    parameters = trainer.policy.parameters()
    trainer.policy.activate("policy")
    expected = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    trainer.update([rollout])
    _assert_gradients(trainer, expected)


def test_rms_scale_divides_by_the_running_rms_and_never_centres() -> None:
    """The advantages' bias-corrected running mean square, decay .95: by hand over two rollouts of known RMS."""
    plain, scaled = (new_trainer((-1.0, 1.0), **PAPER, advantage_scale=kind) for kind in ("none", "rms"))
    squares: list[float] = []
    for reward in (1.0, -0.5):
        rollout = _single(plain, reward)
        scaled.policy.load_state(plain.policy.state())
        raw, divided = plain.update([rollout]), scaled.update([rollout])
        assert divided.advantage_rms == pytest.approx(raw.advantage_rms, rel=1e-4)
        squares.append(raw.advantage_rms**2)
        newest_first = list(enumerate(reversed(squares)))
        weights = [0.95**age for age, _ in newest_first]
        rms = math.sqrt(sum(0.95**age * s for age, s in newest_first) / sum(weights))
        assert divided.policy_grad_norm == pytest.approx(raw.policy_grad_norm / rms, rel=1e-3)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("form", ["lora", "full"])
def test_critic_takes_k_steps_on_fixed_targets(form: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """K optimizer steps and K losses, each the mean squared error of the values of that moment to the same targets."""
    trainer = new_trainer(critic=form, critic_steps=steps)
    perturb(trainer)
    rollout = _rollout(trainer)
    rewards = token_rewards(rollout)
    targets = [sum(rewards[t:]) for t in range(9)]
    losses: list[float] = []

    def look() -> None:
        values = _values(trainer.critic, rollout)
        losses.append(sum((v - t) ** 2 for v, t in zip(values, targets, strict=True)) / 9)

    _before_each_step(monkeypatch, trainer.critic_optimizer, look)
    report = trainer.update([rollout])
    assert len(losses) == steps
    assert report.value_losses == pytest.approx(losses, rel=1e-3)
    assert len({round(loss, 6) for loss in losses}) == steps


def test_critic_gradient_is_that_of_the_token_mean_over_the_update() -> None:
    """Two rollouts, one critic step: the norm reported is that of the squared error over all 12 tokens."""
    trainer = new_trainer(critic_steps=1)
    perturb(trainer)
    batch = [_rollout(trainer), _single(trainer, 1.0)]
    terms = []
    for rollout in batch:
        rewards = token_rewards(rollout)
        place = 0
        for t in rollout.turns:
            ids = torch.tensor(t.prompt_ids + t.completion_ids)
            for value in trainer.critic.values(ids, torch.arange(len(t.prompt_ids), len(ids))):
                terms.append((value - sum(rewards[place:])) ** 2)
                place += 1
    parameters = trainer.critic.parameters()
    gradients = torch.autograd.grad(torch.stack(terms).sum() / 12, list(parameters.values()))
    expected = _norm(dict(zip(parameters, gradients, strict=True)))
    assert trainer.update(batch).critic_grad_norm == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("form", ["lora", "full"])
def test_advantages_are_those_of_the_values_before_any_critic_step(form: str) -> None:
    """The report's advantages equal brute force on the old values, and not on the new ones."""
    trainer = new_trainer(critic=form, critic_lr=0.02)
    perturb(trainer)
    rollout = _rollout(trainer)
    old = _advantages(trainer, rollout)
    report = trainer.update([rollout])
    new = _advantages(trainer, rollout)
    assert report.advantage_mean == pytest.approx(sum(old) / 9, abs=1e-4)
    assert report.advantage_rms == pytest.approx(math.sqrt(sum(a * a for a in old) / 9), abs=1e-4)
    assert abs(sum(new) - sum(old)) / 9 > 0.01


@pytest.mark.parametrize("form", ["lora", "full"])
def test_critic_steps_leave_the_policy_and_the_policy_step_leaves_the_critic(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each optimizer moves its own model, bit for bit."""
    trainer = new_trainer(critic=form)
    perturb(trainer)
    rollout = _rollout(trainer)
    start = snapshot(trainer.policy.parameters())
    between: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    _before_each_step(
        monkeypatch,
        trainer.policy_optimizer,
        lambda: between.append((snapshot(trainer.policy.parameters()), snapshot(trainer.critic.parameters()))),
    )
    trainer.update([rollout])
    [(policy, critic)] = between
    assert same(start, policy)
    assert same(critic, snapshot(trainer.critic.parameters()))
    assert changed(start, snapshot(trainer.policy.parameters())) == start.keys()


@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
def test_wholly_masked_update_does_not_step_the_policy(kl_coef: float) -> None:
    """Every token out of band: weights and Adam's state keep their bits, the critic still learns."""
    trainer = new_trainer(kl_coef=kl_coef)
    assert trainer.update([_rollout(trainer)]).policy_stepped
    weights, adam = snapshot(trainer.policy.parameters()), _adam(trainer.policy_optimizer)
    critic = snapshot(trainer.critic.parameters())
    report = trainer.update([_rollout(trainer, ([0.5] * 4, [7.0] * 2, [0.1] * 3))])
    assert not report.policy_stepped
    assert (report.masked_low, report.masked_high) == pytest.approx((7 / 9, 2 / 9))
    assert same(weights, snapshot(trainer.policy.parameters()))
    assert adam
    assert same(adam, _adam(trainer.policy_optimizer))
    assert changed(critic, snapshot(trainer.critic.parameters()))


def test_one_accepted_token_is_enough_for_a_step() -> None:
    """Of nine tokens one is in band: the policy steps."""
    trainer = new_trainer()
    report = trainer.update([_rollout(trainer, ([0.5] * 4, [7.0, 1.0], [0.1] * 3))])
    assert report.policy_stepped
    assert (report.masked_low, report.masked_high) == pytest.approx((7 / 9, 1 / 9))


def test_warm_up_trains_the_critic_only() -> None:
    """critic_warmup = 2: the first two updates leave the policy's bits and its Adam state, the third moves it."""
    trainer = new_trainer(critic_warmup=2)
    start, stepped = snapshot(trainer.policy.parameters()), []
    for _ in range(2):
        critic = snapshot(trainer.critic.parameters())
        stepped.append(trainer.update([_rollout(trainer)]).policy_stepped)
        assert same(start, snapshot(trainer.policy.parameters()))
        assert changed(critic, snapshot(trainer.critic.parameters()))
    assert not trainer.policy_optimizer.state
    stepped.append(trainer.update([_rollout(trainer)]).policy_stepped)
    assert stepped == [False, False, True]
    assert changed(start, snapshot(trainer.policy.parameters()))


def test_update_that_teaches_nothing_moves_nothing() -> None:
    """All advantages 0 and the policy at the base, so the KL is 0 too: Adam must not turn rounding noise into steps."""
    trainer = new_trainer()
    start = snapshot(trainer.policy.parameters())
    for _ in range(3):
        report = trainer.update([_rollout_without_reward(trainer)])
        assert report.advantage_rms == 0.0
    assert report.kl_to_base < 1e-6
    drift = max(float((start[name] - p).abs().max()) for name, p in snapshot(trainer.policy.parameters()).items())
    assert drift < 1e-6


def _rollout_without_reward(trainer: Trainer) -> Rollout:
    return Rollout("s", tuple(recorded(trainer.policy, replace(t, reward=0.0)) for t in (FIRST, SECOND)), 0.0)


def test_clip_limits_the_step_and_the_report_shows_the_norm_before_it() -> None:
    """The gradient that the step uses has norm policy_clip where the true one is larger."""
    free, clipped = (new_trainer(**{**PAPER, "policy_clip": clip}) for clip in (1e9, 1e-3))
    reports = [trainer.update([_rollout(trainer)]) for trainer in (free, clipped)]
    assert reports[0].policy_grad_norm == pytest.approx(reports[1].policy_grad_norm, rel=1e-5)
    assert reports[0].policy_grad_norm > 0.01
    used = {name: p.grad for name, p in clipped.policy.parameters().items() if p.grad is not None}
    assert _norm(used) == pytest.approx(1e-3, rel=1e-3)


def test_first_step_moves_by_the_learning_rate() -> None:
    """Adam's first step is lr * sign(gradient): at a hidden size of 128 the rates are 3e-3 and 2e-3."""
    trainer = new_trainer(**{**PAPER, "critic_steps": 1, "policy_eps": 1e-8})
    start = snapshot(trainer.policy.parameters()), snapshot(trainer.critic.parameters())
    trainer.update([_rollout(trainer)])
    moved = snapshot(trainer.policy.parameters()), snapshot(trainer.critic.parameters())
    largest = [
        max(float((now[name] - then[name]).abs().max()) for name in now) for then, now in zip(start, moved, strict=True)
    ]
    assert largest == pytest.approx([3e-3, 2e-3], rel=1e-3)


def test_report_counts_tokens_and_rewards() -> None:
    """Tokens by kind, truncated turns, the reward of the update and its running mean, and the number."""
    trainer = new_trainer()
    first = _rollout(trainer)
    cut = replace(first, turns=(*first.turns[:2], replace(first.turns[2], finish_reason="length")))
    report = trainer.update([cut])
    assert (report.number, report.action_tokens, report.observation_tokens) == (1, 9, 3 + 3 + 4)
    assert report.truncated == 1
    assert (report.reward, report.reward_mean) == pytest.approx((1.25, 1.25))
    second = trainer.update([_single(trainer, 0.25)])
    assert (second.number, second.truncated) == (2, 0)
    assert (second.reward, second.reward_mean) == pytest.approx((0.25, 0.75))
    assert set(second.seconds) == {"values", "critic", "policy", "check"}
    assert "session_ids" not in second.metrics()


def test_report_shows_the_ratios() -> None:
    """Masked fractions, mean ratio, gap and effective sample size by hand, for the ratios of the turns."""
    trainer = new_trainer()
    report = trainer.update([_rollout(trainer, RATIOS)])
    ratios = [r for turn_ratios in RATIOS for r in turn_ratios]
    assert (report.masked_low, report.masked_high) == pytest.approx((2 / 9, 1 / 9))
    assert report.ratio_mean == pytest.approx(sum(ratios) / 9, rel=1e-4)
    assert report.logprob_gap == pytest.approx(sum(abs(math.log(r)) for r in ratios) / 9, rel=1e-3)
    assert report.effective_sample_size == pytest.approx(sum(ratios) ** 2 / sum(r * r for r in ratios), rel=1e-4)


def test_report_shows_the_entropy() -> None:
    """The mean entropy of the policy's next-token distributions at temperature 1."""
    trainer = new_trainer()
    perturb(trainer)
    rollout = _rollout(trainer)
    with torch.no_grad():
        logits = torch.cat([turn_logits(trainer.policy, t) for t in rollout.turns])
    expected = float(Categorical(logits=logits.double()).entropy().mean())
    assert trainer.update([rollout]).entropy == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("estimator", ["full", "sampled"])
def test_report_shows_the_divergence_before_and_after_the_update(estimator: str) -> None:
    """kl_after is of the policy that the update made: what the next update on the same tokens starts from."""
    trainer = new_trainer(kl_estimator=estimator)
    rollout = _rollout(trainer)
    first, second = trainer.update([rollout]), trainer.update([rollout])
    assert first.kl_to_base == pytest.approx(0.0, abs=1e-6)
    assert first.kl_after > 1e-4
    assert second.kl_to_base == pytest.approx(first.kl_after, rel=1e-4)


def test_explained_variance_by_hand() -> None:
    """Returns 0, 1, 2 with values 0, 1, 1: errors 0, 0, 1 have variance 2/9 of the returns' 2/3."""
    assert explained_variance([(0.0, 0.0), (1.0, 1.0), (1.0, 2.0)]) == pytest.approx(1 - (2 / 9) / (2 / 3))
    assert explained_variance([(0.0, 0.0), (1.0, 1.0)]) == 1.0
    assert explained_variance([(5.0, 0.0), (6.0, 1.0)]) == 1.0


@pytest.mark.parametrize("pairs", [[], [(0.0, 1.0)], [(0.0, 1.0), (2.0, 1.0)]])
def test_explained_variance_of_returns_that_do_not_vary_is_unknown(pairs: list[tuple[float, float]]) -> None:
    """One rollout, or equal returns, explain nothing: None, not 0, NaN or minus infinity."""
    assert explained_variance(pairs) is None


def test_report_explains_variance_over_earlier_rollouts() -> None:
    """The window pairs the value before the first token with the return, over updates."""
    trainer = new_trainer()
    pairs = []
    for reward in (0.0, 1.0, 0.5):
        rollout = _single(trainer, reward)
        pairs.append((_values(trainer.critic, rollout)[0], reward))
        report = trainer.update([rollout])
    returns, values = [r for _, r in pairs], [v for v, _ in pairs]
    errors = [r - v for r, v in zip(returns, values, strict=True)]
    expected = 1 - _variance(errors) / _variance(returns)
    assert report.explained_variance == pytest.approx(expected, abs=1e-4)


def _variance(numbers: Sequence[float]) -> float:
    mean = sum(numbers) / len(numbers)
    return sum((n - mean) ** 2 for n in numbers) / len(numbers)


@pytest.mark.parametrize(("on_shift", "factor"), [("pull", 0.1), ("none", 1.0)])
def test_shift_pulls_the_adapter_to_the_base_and_clears_adam(
    on_shift: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an alarm LoRA B is multiplied by shift_pull, A stays and Adam starts anew; `none` does nothing."""
    trainer = new_trainer((0.0, 4.0), on_shift=on_shift, shift_threshold=1.0)
    assert not any(trainer.detector.observe(1.0, trainer.settings) for _ in range(13))
    assert not trainer.update([_single(trainer, 4.0)]).shifted
    after_step: list[dict[str, Tensor]] = []
    step = trainer.policy_optimizer.step

    def looked_at() -> None:
        step()
        after_step.append(snapshot(trainer.policy.parameters()))

    monkeypatch.setattr(trainer.policy_optimizer, "step", looked_at)
    report = trainer.update([_single(trainer, 0.0)])
    assert report.shifted is (on_shift == "pull")
    assert trainer.stats.shifts == int(on_shift == "pull")
    [stepped] = after_step
    expected = {name: p * factor if ".lora_B." in name else p for name, p in stepped.items()}
    assert same(snapshot(trainer.policy.parameters()), expected)
    assert bool(trainer.policy_optimizer.state) is (on_shift == "none")
    assert trainer.update([_single(trainer, 4.0)]).policy_stepped


def test_shift_test_sees_rewards_scaled_to_the_policys_range() -> None:
    """In a range of -40 to 40 a reward of 4 is 0.55; what lies outside the range counts as its end."""
    trainer = new_trainer((-40.0, 40.0))
    for reward in (4.0, -40.0, 40.0, 50.0, -41.0):
        trainer.update([_single(trainer, reward)])
    assert trainer.detector.rewards == pytest.approx([0.55, 0.0, 1.0, 1.0, 0.0])


def test_fresh_on_policy_rollouts_have_a_ratio_of_one(tmp_path: Path) -> None:
    """Sequences sampled by plain transformers with the published adapter: the trainer's logprobs are the sampler's."""
    trainer = new_trainer(rollouts_per_update=5)
    perturb(trainer)
    checkpoint.write(tmp_path / "1", trainer, str(TINY_MODEL), {})
    served = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32), tmp_path / "1"
    )
    torch.manual_seed(0)
    rollouts = [_sample(served, (5 + i, 6, 7, 8), temperature) for i, temperature in enumerate((1, 1, 0.7, 0.7, 1.5))]
    report = trainer.update(rollouts)
    assert report.action_tokens >= 5
    assert report.logprob_gap < 1e-4
    assert report.ratio_mean == pytest.approx(1, abs=1e-4)
    assert (report.masked_low, report.masked_high) == (0.0, 0.0)
    assert report.kl_to_base > 1e-3


def _sample(model: PeftModel, prompt: tuple[int, ...], temperature: float) -> Rollout:
    """One sampled answer with the logprobs of the distribution that it was sampled from."""
    output = model.generate(
        input_ids=torch.tensor([prompt]),
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=12,
        return_dict_in_generate=True,
        output_logits=True,
    )
    ids = output.sequences[0, len(prompt) :]
    logits = torch.stack(output.logits)[:, 0].double() / temperature
    logprobs = logits.log_softmax(-1)[torch.arange(len(ids)), ids]
    made = turn(prompt, ids.tolist(), logprobs=tuple(logprobs.tolist()), temperature=temperature)
    return Rollout("s", (made,), 1.0)
