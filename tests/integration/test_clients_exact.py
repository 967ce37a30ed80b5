"""100 sessions of each agent framework: what is trained on is what the engine says that it sampled.

Compared are the sequences that the learner's own loop, reading the real log, hands to its trainer with those made from
the engine's record alone (tests/recording.py, tests/exactness.py): token ids, positions, logprobs and versions.
The sessions are plain ones, ones whose client drops or rewrites an earlier answer, ones with a question asked again,
and ones that another client resumes later; a version goes live amid all of them.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx
import pytest

from app.settings import TINY_MODEL
from learner.rollouts import pack
from learner.tiny.tool_dialogues import calculator_problem
from tests.clients import LOOPS, Loop, new_client
from tests.exactness import RecordingTrainer, by_session, require_exact, train
from tests.publishing import Publisher
from tests.recording import CLIENT_KEY, RecordedService, Sampled, recorded_service

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Litestar's, about how handlers are declared
]

SESSIONS = 100
AT_ONCE = 6
MAX_TOKENS = 40
KINDS: tuple[str, ...] = ("plain", "dropped", "rewritten", "retried", "resumed")


@dataclass
class Session:
    """One conversation of a kind, question by question."""

    name: str
    kind: str
    loop: Loop
    problems: Random

    async def ask(self) -> None:
        await self.loop.ask(calculator_problem(self.problems).question)

    async def second(self) -> None:
        """The second question, with what this kind does to the history before it."""
        if self.kind == "dropped" and self.loop.answers():
            self.loop.drop_answer()
        if self.kind == "rewritten" and self.loop.answers():
            self.loop.rewrite_answer("I would rather not say.")
        if self.kind != "retried":
            await self.ask()
            return
        before, question = self.loop.saved(), calculator_problem(self.problems).question
        await self.loop.ask(question)
        self.loop.resume(before)
        await self.loop.ask(question)


@dataclass
class Traffic:
    """All sessions of one framework, the engine's record of them, and what the learner made of the log."""

    sessions: list[Session]
    answers: dict[str, list[Sampled]]
    trainer: RecordingTrainer


def new_session(kind: type[Loop], service: RecordedService, number: int) -> Session:
    """The session of this number: every kind comes streamed and not, named by header and by metadata."""
    name = f"{kind.name}-{number}"
    how: dict[str, Any] = {"stream": number % 2 == 1, "where": ("header", "metadata")[number // 2 % 2]}
    loop = kind(new_client(service.base_url, CLIENT_KEY), name, max_tokens=MAX_TOKENS, **how)
    return Session(name, KINDS[number % len(KINDS)], loop, Random(number))


def resumed(session: Session, service: RecordedService, number: int) -> Session:
    """The same conversation, saved and taken up by a client that starts anew."""
    again = new_session(type(session.loop), service, number)
    again.problems = session.problems
    again.loop.resume(session.loop.saved())
    return again


async def few_at_once(work: Iterable[Awaitable[None]]) -> None:
    """All of it, a few at the same time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(job: Awaitable[None]) -> None:
        async with gate:
            await job

    await asyncio.gather(*(one(job) for job in work))


async def converse(kind: type[Loop], service: RecordedService, publisher: Publisher) -> list[Session]:
    """First questions, then second ones while a version goes live, then the pause and the last ones."""
    sessions = [new_session(kind, service, number) for number in range(SESSIONS)]
    await few_at_once(session.ask() for session in sessions)
    number = publisher.live + 1
    publishing = asyncio.create_task(asyncio.to_thread(publisher.publish, number))
    await few_at_once(session.second() for session in sessions)
    await publishing
    await publisher.wait_live(number)
    sessions = [resumed(s, service, n) if s.kind == "resumed" else s for n, s in enumerate(sessions)]
    await few_at_once(session.ask() for session in sessions)
    return sessions


def judge(service: RecordedService, sessions: Iterable[Session]) -> None:
    """A final reward for each session, which makes it a rollout."""
    headers = {"Authorization": f"Bearer {CLIENT_KEY}"}
    with httpx.Client(base_url=service.base_url, headers=headers) as http:
        for number, session in enumerate(sessions):
            body = {"session_id": session.name, "reward": number % 3 / 2}
            assert http.post("/v1/feedback", json=body).status_code == httpx.codes.OK


@pytest.fixture(scope="module", params=LOOPS, ids=lambda kind: kind.name)
def traffic(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traffic]:
    """100 sessions of a framework, judged and learned from."""
    home, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("learner")
    with recorded_service(home) as service:
        with closing(Publisher(home)) as publisher:
            sessions = asyncio.run(converse(request.param, service, publisher))
        judge(service, sessions)
        trainer = train(home / "log.db", folder, TINY_MODEL)
        yield Traffic(sessions, by_session(service.engine.answers), trainer)


def test_trained_tokens_are_the_sampled_ones(traffic: Traffic) -> None:
    """Every session is one rollout whose sequences are those of the engine's record, token for token."""
    trained = {rollout.session_id: rollout for rollout in traffic.trainer.rollouts}
    assert len(trained) == len(traffic.trainer.rollouts) == SESSIONS
    assert trained.keys() == traffic.answers.keys()
    for session_id, answers in traffic.answers.items():
        require_exact(trained[session_id], answers)


def test_sessions_go_on_across_versions(traffic: Traffic) -> None:
    """Every session began under the base and ended under version 1, and is still one rollout."""
    for answers in traffic.answers.values():
        assert answers[0].version == 0
        assert answers[-1].version == 1


def test_every_kind_of_session_was_there(traffic: Traffic) -> None:
    """The tests above mean something: tools were called, histories edited, and edits begin new sequences."""
    names = {session_id.partition(":")[2]: session_id for session_id in traffic.answers}
    rollouts = {rollout.session_id: rollout for rollout in traffic.trainer.rollouts}
    sequences: dict[str, Counter[int]] = {kind: Counter() for kind in KINDS}
    for session in traffic.sessions:
        sequences[session.kind][len(pack(rollouts[names[session.name]].turns))] += 1
    assert all(sum(counts.values()) == SESSIONS // len(KINDS) for counts in sequences.values())
    assert any(a.finish_reason == "tool_calls" for answers in traffic.answers.values() for a in answers)
    for kind in ("plain", "resumed"):
        assert sequences[kind][1] > 0, sequences
    for kind in ("dropped", "rewritten", "retried"):
        assert sum(n for count, n in sequences[kind].items() if count > 1) > SESSIONS // len(KINDS) // 2, sequences


def test_updates_are_finite(traffic: Traffic) -> None:
    """Training on these sessions moves the policy, and its numbers stay finite."""
    reports = traffic.trainer.reports
    assert len(reports) == SESSIONS // 10
    assert all(math.isfinite(report.kl_after) and math.isfinite(report.policy_grad_norm) for report in reports)
    assert any(report.policy_stepped for report in reports)
