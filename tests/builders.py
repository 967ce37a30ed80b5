"""Small factories for events, turns and trainers, and the brute-force GAE that several tests compare with."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.events.schema import (
    CompletionEvent,
    FeedbackEvent,
    ForgetEvent,
    Sampling,
    ScoreEvent,
    SessionClosedEvent,
    Usage,
)
from app.settings import TINY_MODEL
from learner.critic import make_policy_and_critic
from learner.models import Policy, load_base
from learner.rollouts import Rollout, Turn
from learner.settings import TrainingSettings
from learner.trainer import Trainer

START = datetime(2026, 1, 1, tzinfo=UTC)


def moment(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def completion(
    session_id: str = "s",
    completion_id: str = "c0",
    *,
    seconds: float = 0,
    completion_ids: Sequence[int] = (3, 4),
    temperature: float = 1.0,
    **fields: Any,
) -> CompletionEvent:
    ids = tuple(completion_ids)
    values: dict[str, Any] = {
        "event_id": f"e-{completion_id}",
        "policy": "riacho",
        "session_id": session_id,
        "at": moment(seconds),
        "completion_id": completion_id,
        "version": 0,
        "prompt_ids": (1, 2),
        "completion_ids": ids,
        "logprobs": tuple(-0.5 - i for i in range(len(ids))),
        "sampling": Sampling(temperature=temperature, max_tokens=16),
        "finish_reason": "stop",
        "trainable": True,
        "usage": Usage(prompt_tokens=2, completion_tokens=len(ids)),
        "key_id": "k",
    }
    return CompletionEvent(**{**values, **fields})


def feedback(
    session_id: str = "s",
    event_id: str = "f0",
    *,
    completion_id: str | None = None,
    reward: float = 1.0,
    final: bool = True,
    seconds: float = 0,
    comment: str | None = None,
    signal: str = "reward",
) -> FeedbackEvent:
    return FeedbackEvent(
        event_id=event_id,
        policy="riacho",
        session_id=session_id,
        at=moment(seconds),
        completion_id=completion_id,
        signal=signal,
        reward=reward,
        final=final,
        key_id="k",
        comment=comment,
    )


def score(
    session_id: str = "s",
    signal: str = "judge",
    *,
    session: float | None = None,
    turns: Mapping[str, float] | None = None,
    failure: str | None = None,
    attempt: int = 0,
    seconds: float = 0,
) -> ScoreEvent:
    return ScoreEvent(
        event_id=f"score-{signal}-{attempt}-{session_id}",
        policy="riacho",
        session_id=session_id,
        at=moment(seconds),
        signal=signal,
        session=session,
        turns=dict(turns or {}),
        failure=failure,
    )


def closed(session_id: str = "s", *, seconds: float = 0) -> SessionClosedEvent:
    return SessionClosedEvent(event_id="closed", policy="riacho", session_id=session_id, at=moment(seconds))


def forget(session_id: str = "s", *, seconds: float = 0) -> ForgetEvent:
    return ForgetEvent(event_id="forget", policy="riacho", session_id=session_id, at=moment(seconds))


def turn(
    prompt_ids: Sequence[int] = (1, 2), completion_ids: Sequence[int] = (3, 4), *, reward: float = 0.0, **fields: Any
) -> Turn:
    values: dict[str, Any] = {
        "completion_id": "c0",
        "version": 0,
        "logprobs": tuple(-0.5 - i for i in range(len(completion_ids))),
        "temperature": 1.0,
        "trainable": True,
        "finish_reason": "stop",
    }
    return Turn(
        prompt_ids=tuple(prompt_ids), completion_ids=tuple(completion_ids), reward=reward, **{**values, **fields}
    )


def new_trainer(
    reward_range: tuple[float, float] = (0.0, 1.0), *, model: Path = TINY_MODEL, **settings: Any
) -> Trainer:
    """A trainer over the shipped tiny model or another, with a timer that stands still."""
    training = TrainingSettings(**settings)
    policy, critic = make_policy_and_critic(load_base(str(model)), training)
    return Trainer(policy, critic, training, reward_range, timer=lambda: 0.0)


@torch.no_grad()
def perturb(trainer: Trainer, seed: int = 1) -> None:
    """Move policy, critic adapter and value head off their zero start, so that nothing is 0 by accident."""
    generator = torch.Generator().manual_seed(seed)
    for parameters in (trainer.policy.parameters(), trainer.critic.parameters()):
        for name, parameter in parameters.items():
            if ".lora_B." in name or name.startswith("head."):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.03)


def turn_logits(policy: Policy, turn: Turn) -> Tensor:
    """The logits behind each sampled token of a turn, from a plain forward pass of that turn alone, [A, V]."""
    policy.activate("policy")
    logits = policy.peft(input_ids=torch.tensor([turn.prompt_ids + turn.completion_ids])).logits[0]
    return logits[len(turn.prompt_ids) - 1 : -1]


def turn_logprobs(policy: Policy, turn: Turn) -> Tensor:
    """log pi of a turn's tokens at its temperature, from `turn_logits`, [A]."""
    scaled = torch.log_softmax(turn_logits(policy, turn).double() / turn.temperature, -1)
    return scaled[torch.arange(len(turn.completion_ids)), torch.tensor(turn.completion_ids)]


@torch.no_grad()
def recorded(policy: Policy, turn: Turn, ratios: Sequence[float] | None = None) -> Turn:
    """The turn as an engine with `policy` would have recorded it, or one whose tokens have these ratios now."""
    logprobs = turn_logprobs(policy, turn)
    if ratios is not None:
        logprobs = logprobs - torch.tensor(ratios, dtype=torch.float64).log()
    fields = {name: getattr(turn, name) for name in turn.__dataclass_fields__}
    return Turn(**{**fields, "logprobs": tuple(logprobs.float().tolist())})


def snapshot(parameters: dict[str, Any]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors have the same names and the same bits."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def changed(left: dict[str, Tensor], right: dict[str, Tensor]) -> set[str]:
    return {name for name in left if not torch.equal(left[name], right[name])}


def token_rewards(rollout: Rollout) -> list[float]:
    """u_t by definition, for rollouts whose turns are all trainable."""
    rewards: list[float] = []
    for turn in rollout.turns:
        rewards += [0.0] * (len(turn.completion_ids) - 1) + [turn.reward]
    rewards[-1] += rollout.session_reward
    return rewards


def double_sum_gae(values: Sequence[float], rewards: Sequence[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum_k (gamma lambda)^(k-t) delta_k, term by term in float64."""
    count = len(values)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(count)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, count)) for t in range(count)]
