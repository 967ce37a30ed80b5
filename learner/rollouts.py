"""Rollouts: finished trajectories with their rewards, and the packing of their turns into sequences."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.events.schema import DEFAULT_SIGNAL, CompletionEvent, FeedbackEvent, ScoreEvent

CLIENTS_REWARD: Mapping[str, float] = {DEFAULT_SIGNAL: 1.0}


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call: what it read, what it sampled, and the reward that judged it."""

    completion_id: str
    version: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperature: float
    trainable: bool
    finish_reason: str
    reward: float = 0.0

    @property
    def action_tokens(self) -> int:
        return len(self.completion_ids) if self.trainable else 0


@dataclass(frozen=True, slots=True)
class Rollout:
    """A finished trajectory: its turns in time order and the reward of the session as a whole."""

    session_id: str
    turns: tuple[Turn, ...]
    session_reward: float

    @property
    def action_tokens(self) -> int:
        return sum(turn.action_tokens for turn in self.turns)

    @property
    def total_reward(self) -> float:
        return self.session_reward + sum(turn.reward for turn in self.turns)

    @property
    def oldest_version(self) -> int:
        return min(turn.version for turn in self.turns if turn.action_tokens)

    def token_rewards(self) -> Tensor:
        """u_t over the action tokens [A]: a turn's reward lies on its last action token, the session's on the last.

        A judged turn without action tokens (served, not trainable) hands its reward to the last action token
        before it, whose consequence it is.
        """
        rewards = torch.zeros(self.action_tokens)
        end = 0
        for turn in self.turns:
            end += turn.action_tokens
            if end:
                rewards[end - 1] += turn.reward
        rewards[-1] += self.session_reward
        return rewards


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """Turns that share one context.

    ids [T]; positions [A], where the action tokens lie in ids; behaviour [A], their recorded logprobs;
    temperature [A], at which each was sampled.
    """

    ids: Tensor
    positions: Tensor
    behaviour: Tensor
    temperature: Tensor

    @property
    def actions(self) -> Tensor:
        """The sampled token ids, [A]."""
        return self.ids[self.positions]


def build_rollout(
    session_id: str,
    completions: Iterable[CompletionEvent],
    judgements: Iterable[FeedbackEvent | ScoreEvent],
    weights: Mapping[str, float] = CLIENTS_REWARD,
) -> Rollout:
    """Join a session's events; the completions come in time order.

    A turn's or the session's reward is the sum of weight * value over its judgements; a signal that the settings no
    longer name weighs nothing.
    """
    rewards: dict[str | None, float] = {}
    for event in judgements:
        for judged, reward in event.rewards.items():
            rewards[judged] = rewards.get(judged, 0.0) + weights.get(event.signal, 0.0) * reward
    turns = tuple(_turn(event, rewards.get(event.completion_id, 0.0)) for event in completions)
    return Rollout(session_id, turns, rewards.get(None, 0.0))


def _turn(event: CompletionEvent, reward: float) -> Turn:
    return Turn(
        completion_id=event.completion_id,
        version=event.version,
        prompt_ids=event.prompt_ids,
        completion_ids=event.completion_ids,
        logprobs=event.logprobs,
        temperature=event.sampling.temperature,
        trainable=event.trainable,
        finish_reason=event.finish_reason,
        reward=reward,
    )


def pack(turns: Sequence[Turn]) -> list[PackedSequence]:
    """Turns whose prompt begins with all the tokens before it share a sequence; others start a new one.

    The action tokens of the sequences, one after the other, are those of the trajectory in time order.
    """
    groups: list[list[Turn]] = []
    tokens: tuple[int, ...] = ()
    for turn in turns:
        if groups and turn.prompt_ids[: len(tokens)] == tokens:
            groups[-1].append(turn)
        else:
            groups.append([turn])
        tokens = turn.prompt_ids + turn.completion_ids
    return [_sequence(group) for group in groups if any(turn.action_tokens for turn in group)]


def _sequence(group: Sequence[Turn]) -> PackedSequence:
    positions: list[int] = []
    behaviour: list[float] = []
    temperature: list[float] = []
    for turn in group:
        if turn.trainable:
            start = len(turn.prompt_ids)
            positions += range(start, start + len(turn.completion_ids))
            behaviour += turn.logprobs
            temperature += [turn.temperature] * len(turn.completion_ids)
    last = group[-1]
    return PackedSequence(
        ids=torch.tensor(last.prompt_ids + last.completion_ids),
        positions=torch.tensor(positions),
        behaviour=torch.tensor(behaviour),
        temperature=torch.tensor(temperature),
    )
