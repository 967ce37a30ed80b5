"""A chat template that drops old thinking: every question's answers are a sequence of their own, and all train.

The tiny model does not think by itself, so each of its answers begins with a thought that is given to it, and with the
first words of a call or of an answer. The template does what Qwen3's does: it keeps the thought while tools are called,
and leaves it out once the user has spoken again.
"""

import asyncio
import itertools
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from app.settings import TINY_MODEL
from learner.tiny.tool_dialogues import calculator_problem
from tests.clients import LOOPS, AgentsLoop, Loop, OpenAILoop, PydanticLoop, new_client
from tests.exactness import RecordingTrainer, by_session, require_exact, train
from tests.forced import forced
from tests.recording import CLIENT_KEY, RecordedService, Sampled, recorded_service

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Litestar's, about how handlers are declared
]

SESSIONS: dict[type[Loop], int] = {OpenAILoop: 100, AgentsLoop: 10, PydanticLoop: 10}
QUESTIONS = 2
AT_ONCE = 6
END = "</think>"
THOUGHTS = ("Let me see.", "A sum of two.", "I can compute this.")
STARTS = ('<tool_call>\n{"name": "calculator", "arguments": {"expression": "', "The answer is")
SAID = "{{- text(message.content) }}\n            {%- for call"
FORGETFUL = (
    "{%- if loop.index0 > last.user %}{{- text(message.content) }}{%- else %}"
    "{{- text(message.content).split('</think>')[-1].lstrip('\\n') }}{%- endif %}\n            {%- for call"
)
LAST_USER = (
    "{%- set last = namespace(user=-1) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}"
    "{%- endfor %}\n"
)


def forgetful_model(folder: Path) -> Path:
    """The tiny model with a template that drops the thinking of answers before the last question."""
    shutil.copytree(TINY_MODEL, folder)
    file = folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8")
    assert template.count(SAID) == 1
    file.write_text(LAST_USER + template.replace(SAID, FORGETFUL), encoding="utf-8")
    return folder


@dataclass
class Traffic:
    """The engine's record of all sessions, and what the learner made of the log."""

    answers: dict[str, list[Sampled]]
    trainer: RecordingTrainer
    tokenizer: Any


async def converse(service: RecordedService) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(kind: type[Loop], number: int) -> None:
        problems, how = Random(number), {"stream": number % 2 == 1}
        async with gate:
            client = new_client(service.base_url, CLIENT_KEY)
            loop = kind(client, f"{kind.name}-{number}", where="header", max_tokens=48, **how)
            for _ in range(QUESTIONS):
                await loop.ask(calculator_problem(problems).question)

    await asyncio.gather(*(one(kind, number) for kind in LOOPS for number in range(SESSIONS[kind])))


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Traffic:
    home, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("learner")
    model = forgetful_model(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [f"<think>\n{thought}\n{END}\n{start}" for thought in THOUGHTS for start in STARTS]
    with forced(itertools.cycle(map(tokenizer.encode, texts))), recorded_service(home, model) as service:
        asyncio.run(converse(service))
        answers = by_session(service.engine.answers)
        headers = {"Authorization": f"Bearer {CLIENT_KEY}"}
        with httpx.Client(base_url=service.base_url, headers=headers) as http:
            for number, session in enumerate(answers):
                body = {"session_id": session.partition(":")[2], "reward": number % 3 / 2}
                assert http.post("/v1/feedback", json=body).status_code == httpx.codes.OK
    return Traffic(answers, train(home / "log.db", folder, model), tokenizer)


def questions(tokenizer: Any, answer: Sampled) -> int:
    """How many of the user's questions the answer's prompt has; results of tools are no question."""
    text: str = tokenizer.decode(answer.prompt_ids)
    return text.count("<|im_start|>user") - text.count("<|im_start|>user\n<tool_response>")


def test_trained_tokens_are_the_sampled_ones(traffic: Traffic) -> None:
    """Thoughts are trained on where they were sampled, though later prompts have them no more."""
    trained = {rollout.session_id: rollout for rollout in traffic.trainer.rollouts}
    assert len(trained) == len(traffic.trainer.rollouts) == sum(SESSIONS.values())
    for session_id, answers in traffic.answers.items():
        sequences = require_exact(trained[session_id], answers)
        sampled = "".join(traffic.tokenizer.decode(sequence.actions) for sequence in sequences)
        assert sampled.count(END) >= len(answers)


def test_a_new_question_starts_its_own_sequence(traffic: Traffic) -> None:
    """Where thinking was dropped the prompt does not go on from the tokens before; inside a tool's loop it does."""
    went_on = broke = 0
    for answers in traffic.answers.values():
        for before, after in itertools.pairwise(answers):
            tokens = before.prompt_ids + before.token_ids
            goes_on = after.prompt_ids[: len(tokens)] == tokens
            if questions(traffic.tokenizer, after) > questions(traffic.tokenizer, before):
                assert not goes_on
                assert END not in traffic.tokenizer.decode(after.prompt_ids)
                broke += 1
            else:
                went_on += goes_on
    assert broke >= sum(SESSIONS.values()) // 2
    assert went_on > 0


def test_training_runs(traffic: Traffic) -> None:
    """The updates move the policy, and their numbers are finite."""
    assert all(math.isfinite(report.kl_after) for report in traffic.trainer.reports)
    assert any(report.policy_stepped for report in traffic.trainer.reports)
