"""What was trained on, compared with the engine's own record of what it sampled.

The expected sequences are made from the record alone: an answer goes on with the sequence whose tokens its prompt
begins with, the longest such, or begins one. Their sampled tokens may be trained on, and all else is prompt.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch

from app.events.sqlite import SqliteLog
from app.fingerprint import fingerprint
from app.registry import Registry, upgrade
from learner.critic import make_policy_and_critic
from learner.joins import Joins
from learner.loop import Learner, stop_at_end
from learner.models import load_base
from learner.publisher import Publisher
from learner.report import UpdateReport
from learner.rollouts import PackedSequence, Rollout, pack
from learner.settings import TrainingSettings
from learner.stream import StreamState
from learner.trainer import Trainer
from tests.recording import Sampled

NEVER = 10**6


class RecordingTrainer(Trainer):
    """A trainer that keeps what it was given; to be quick, it trains on the first rollout of each update only."""

    rollouts: list[Rollout]
    reports: list[UpdateReport]

    def update(self, rollouts: Sequence[Rollout]) -> UpdateReport:
        report = super().update(rollouts[:1])
        self.rollouts += rollouts
        self.reports.append(report)
        return report


def train(log: Path, folder: Path, model: Path, rollouts_per_update: int = 10) -> RecordingTrainer:
    """Fold the log at `log` into a fresh learner with a registry of its own in `folder`, to the log's end."""
    settings = TrainingSettings(rollouts_per_update=rollouts_per_update, publish_every=NEVER, kl_estimator="sampled")
    policy, critic = make_policy_and_critic(load_base(str(model)), settings)
    trainer = RecordingTrainer(policy, critic, settings, (0.0, 1.0), time.perf_counter)
    trainer.rollouts, trainer.reports = [], []
    url = f"sqlite:///{folder / 'registry.db'}"
    upgrade(url)
    with closing(Registry.open(url)) as registry, closing(SqliteLog(log)) as events:
        registry.policies.ensure("riacho", str(model), fingerprint(str(model)), 0.0, 1.0)
        lease = registry.leases.acquire("learner:riacho", "test", 600)
        assert lease is not None
        publisher = Publisher(registry, "riacho", str(model), folder / "adapters")
        stream = StreamState(Joins(timedelta(hours=1)))
        learner = Learner("riacho", events, registry, trainer, publisher, stream, policy.peft.config.vocab_size)
        learner.resume(lease)
        learner.run(lambda: True, stop_at_end)
    return trainer


@dataclass
class Expected:
    """One sequence as the engine's record gives it."""

    ids: tuple[int, ...] = ()
    positions: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def add(self, answer: Sampled) -> None:
        start = len(answer.prompt_ids)
        self.ids = answer.prompt_ids + answer.token_ids
        self.positions += range(start, start + len(answer.token_ids))
        self.logprobs += answer.logprobs


def expected_sequences(answers: Iterable[Sampled]) -> list[Expected]:
    """The sequences of one session's answers, which come in the order in which they ended."""
    sequences: list[Expected] = []
    for answer in answers:
        extended = [sequence for sequence in sequences if answer.prompt_ids[: len(sequence.ids)] == sequence.ids]
        if not extended:
            extended = [Expected()]
            sequences += extended
        max(extended, key=lambda sequence: len(sequence.ids)).add(answer)
    return sequences


def require_exact(rollout: Rollout, answers: Sequence[Sampled]) -> list[PackedSequence]:
    """The rollout's sequences: they hold the sampled tokens with their logprobs, and all else is prompt."""
    assert [turn.version for turn in rollout.turns] == [answer.version for answer in answers]
    packed, expected = pack(rollout.turns), expected_sequences(answers)
    assert len(packed) == len(expected)
    for sequence, due in zip(packed, expected, strict=True):
        assert sequence.ids.tolist() == list(due.ids)
        assert sequence.positions.tolist() == due.positions
        assert torch.equal(sequence.behaviour, torch.tensor(due.logprobs))
    sampled = [token for answer in answers for token in answer.token_ids]
    in_time = torch.empty(len(sampled), dtype=torch.long)
    for sequence in packed:
        in_time[sequence.times] = sequence.actions
    assert in_time.tolist() == sampled
    return packed


def by_session(answers: Iterable[Sampled]) -> dict[str, list[Sampled]]:
    """The answers of each session (`key:name`), in the order in which they ended."""
    sessions: dict[str, list[Sampled]] = {}
    for answer in answers:
        assert answer.session is not None
        sessions.setdefault(answer.session, []).append(answer)
    return sessions
