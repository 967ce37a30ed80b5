"""The demo through the front door, on the production log and registry."""

from contextlib import closing
from pathlib import Path

import pytest

from app.registry import Registry
from tests.demo import ROLLOUTS, assert_complete, short_demo
from tests.postgres import Postgres


@pytest.mark.timeout(900)
def test_the_demo_runs_on_kafka_and_postgresql(tmp_path: Path, kafka_server: str, postgres: Postgres) -> None:
    """It makes topics and tables itself, learns every rollout, and what it learned lies in PostgreSQL."""
    with postgres.database(migrated=False) as url:
        options = ["--log-url", f"kafka://{kafka_server}", "--database-url", url]
        report = short_demo(tmp_path, *options, RIACHO_KAFKA_REPLICATION="1")
        with closing(Registry.open(url)) as registry:
            [policy] = registry.policies.list()
            updates = registry.projections.updates(policy.name, 100)
    assert_complete(report)
    assert len(updates) == 3 * ROLLOUTS
    assert not (tmp_path / "home/registry.db").exists()
    assert not (tmp_path / "home/log.db").exists()


def test_the_demo_says_how_to_get_vllm(tmp_path: Path) -> None:
    """Without the interpreter it stops before anything starts, and names the command that makes one."""
    with pytest.raises(AssertionError, match=r"make \.venv-vllm/\.ready"):
        short_demo(tmp_path, "--engine", "vllm", "--vllm-python", str(tmp_path / "nowhere"))
