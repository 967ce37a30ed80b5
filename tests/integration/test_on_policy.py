"""Ratio = 1 on fresh on-policy data: what the engine sampled, the trainer scores alike."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.engines.base import Adapter, GenerateRequest
from app.engines.local import LocalEngine
from app.events.schema import Sampling
from app.settings import TINY_MODEL
from learner import checkpoint
from learner.critic import make_policy_and_critic
from learner.models import load_base
from learner.rollouts import Rollout, Turn
from learner.settings import TrainingSettings
from learner.trainer import Trainer
from tests.mixture import write_mixture
from tests.smollm2 import default_cache, smollm2_dir

TOLERANCE = 1e-4


def make_trainer(model: Path) -> Trainer:
    settings = TrainingSettings()
    policy, critic = make_policy_and_critic(load_base(str(model)), settings)
    return Trainer(policy, critic, settings, (0.0, 1.0), time.perf_counter)


async def sample(engine: LocalEngine, version: int, temperature: float, max_tokens: int) -> Turn:
    """One answer, as the engine recorded it."""
    request = GenerateRequest(
        messages=[{"role": "user", "content": "Write a short post about the moon."}],
        sampling=Sampling(temperature=temperature, max_tokens=max_tokens, seed=version),
    )
    chunks = [chunk async for chunk in engine.generate(request, version)]
    return Turn(
        completion_id="c",
        version=version,
        prompt_ids=chunks[0].prompt_ids or (),
        completion_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        temperature=temperature,
        trainable=True,
        finish_reason="stop",
    )


@pytest.fixture(params=["tiny", "smollm2", "mixture"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "mixture":
        return write_mixture(tmp_path_factory.mktemp("mixture"))
    return TINY_MODEL if request.param == "tiny" else smollm2_dir(default_cache())


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(str(model), policy="riacho")
    await engine.start()
    yield engine
    await engine.close()


async def test_fresh_rollouts_have_ratio_one(engine: LocalEngine, model: Path, tmp_path: Path) -> None:
    """Served, trained, published, served again: each time mean |delta logprob| is below 1e-4 in float32."""
    trainer = make_trainer(model)
    for version, temperature in enumerate((1.0, 0.7, 1.0)):
        if version:
            path = tmp_path / str(version)
            checkpoint.write(path, trainer, str(model), {})
            await engine.load(Adapter("riacho", version, path))
        turn = await sample(engine, version, temperature, max_tokens=24)
        report = trainer.update([Rollout("s", (turn,), session_reward=1.0)])
        assert report.logprob_gap < TOLERANCE
        assert report.masked_low == report.masked_high == 0
        assert report.policy_stepped
    assert report.kl_to_base > 0
