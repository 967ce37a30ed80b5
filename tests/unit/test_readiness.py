"""What is said of engines and spool: ready or not and why, and how many replicas serve."""

from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from app.engines.base import EngineInfo
from app.engines.replicas import Replicas
from app.events.log import LogUnavailable
from app.events.sqlite import SqliteLog
from app.registry import Registry, upgrade, utc_now
from app.services import Services
from app.settings import AppSettings
from tests.scripted_vllm import ScriptedVllm

INFO = EngineInfo("base", "f", "float32", 64, 4)


@pytest.fixture
def servers() -> list[ScriptedVllm]:
    return [ScriptedVllm("a"), ScriptedVllm("b")]


@pytest.fixture
async def services(servers: list[ScriptedVllm], tmp_path: Path) -> AsyncIterator[Services]:
    """An app's parts on two replicas."""
    settings = AppSettings(home=tmp_path)
    upgrade(settings.resolved_database_url)
    engine = Replicas([server.client(tmp_path) for server in servers], 4)
    await engine.start()
    with closing(SqliteLog(tmp_path / "log.db")) as log, closing(Registry.open(settings.resolved_database_url)) as db:
        db.policies.ensure(settings.policy, settings.model, INFO.fingerprint, 0.0, 1.0)
        yield Services.build(settings, engine, log, db, utc_now)
    await engine.close()


def take_out(services: Services, *numbers: int) -> None:
    assert isinstance(services.engine, Replicas)
    for number in numbers:
        services.engine._replicas[number].take_out("it is gone")


async def test_one_replica_is_enough(services: Services) -> None:
    """Requests may be sent here while any serves; the metric has the one that is out."""
    take_out(services, 1)
    assert await services.problems() == []
    services.metrics.show_engines(services.engine.states())
    counts = [services.metrics.registry.get_sample_value("riacho_engines", {"state": s}) for s in ("serving", "out")]
    assert counts == [1, 1]


async def test_replicas_are_named_where_none_serves(services: Services) -> None:
    """Each with its reason."""
    take_out(services, 0, 1)
    [problem] = await services.problems()
    assert problem == "the engine does not answer (http://a: it is gone; http://b: it is gone)"


class BrokenSpool:
    """A spool whose file cannot be read."""

    def full(self) -> bool:
        raise LogUnavailable("the disk is gone")


@pytest.mark.parametrize(("on_failure", "ready"), [("fail_closed", False), ("fail_open", True)])
async def test_a_broken_spool_follows_the_setting(services: Services, on_failure: str, ready: bool) -> None:
    """Where answers that cannot be recorded are refused the service is not ready; else it is."""
    services.spool = BrokenSpool()  # type: ignore[assignment]
    services.settings = AppSettings(home=services.settings.home, on_capture_failure=on_failure)  # type: ignore[arg-type]
    problems = await services.problems()
    assert problems == ([] if ready else ["the spool cannot be used: the disk is gone"])
