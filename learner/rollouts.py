"""Rollouts: finished trajectories with their rewards, and the packing of their turns into sequences."""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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

    ids [T]; positions [A], where the action tokens lie in ids; times [A], the place of each among all action tokens
    of the trajectory; behaviour [A], their recorded logprobs; temperature [A], at which each was sampled.
    """

    ids: Tensor
    positions: Tensor
    times: Tensor
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


@dataclass(slots=True)
class _OpenSequence:
    """A sequence under construction.

    tokens: all of them, int32, as bytes: prefixes compare at memory speed. turns: each with the time of its first
    action token.
    """

    tokens: bytes = b""
    turns: list[tuple[int, Turn]] = field(default_factory=list)

    def close(self) -> PackedSequence:
        positions: list[int] = []
        times: list[int] = []
        behaviour: list[float] = []
        temperature: list[float] = []
        for time, turn in self.turns:
            if turn.trainable:
                start, count = len(turn.prompt_ids), len(turn.completion_ids)
                positions += range(start, start + count)
                times += range(time, time + count)
                behaviour += turn.logprobs
                temperature += [turn.temperature] * count
        _, last = self.turns[-1]
        return PackedSequence(
            ids=torch.tensor(last.prompt_ids + last.completion_ids),
            positions=torch.tensor(positions),
            times=torch.tensor(times),
            behaviour=torch.tensor(behaviour),
            temperature=torch.tensor(temperature),
        )


def pack(turns: Iterable[Turn]) -> list[PackedSequence]:
    """A turn joins the sequence whose tokens its prompt begins with, the longest such, or else starts a new one.

    So agents that take turns within a session each have a sequence, and a retried turn is a branch of its own. An
    aborted answer is nobody's history: the turn that asks again goes on where it did. Sequences come in the order of
    their first turns; those without action tokens are left out.
    """
    sequences: list[_OpenSequence] = []
    time = 0
    for turn in turns:
        if turn.finish_reason == "abort":
            continue
        prompt = _as_bytes(turn.prompt_ids)
        extended = [sequence for sequence in sequences if prompt.startswith(sequence.tokens)]
        if not extended:
            extended = [_OpenSequence()]
            sequences += extended
        joined = max(extended, key=lambda sequence: len(sequence.tokens))
        joined.tokens = prompt + _as_bytes(turn.completion_ids)
        joined.turns.append((time, turn))
        time += turn.action_tokens
    return [s.close() for s in sequences if any(turn.action_tokens for _, turn in s.turns)]


def _as_bytes(ids: Iterable[int]) -> bytes:
    return array("i", ids).tobytes()
