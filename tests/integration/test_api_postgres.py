"""The whole service with its registry in PostgreSQL, through the front door of `riacho up`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service import POLICY, Service, eventually


@pytest.fixture
def service(tmp_path: Path, postgres_url: str) -> Iterator[Service]:
    with Service(tmp_path, "up", {"RIACHO_DATABASE_URL": postgres_url}) as running:
        yield running


def test_an_answer_is_judged_learned_from_published_and_rolled_back(service: Service) -> None:
    """Each step is seen by clients and operators, and nothing lies in a registry of the home."""
    id = service.ask(max_tokens=8)["id"]
    judged = service.judge(completion_id=id, reward=1, id="k", comment="a\x00b \N{SLIGHTLY SMILING FACE}")
    assert judged.status_code == 200, judged.text
    trained = eventually(
        lambda: (row := service.client.get(f"/v1/completions/{id}").json()).get("trained_version") and row, "trained"
    )
    number = trained["trained_version"]
    eventually(lambda: service.policy()["live_version"] == number, "the version serves")
    assert service.ask()["model"] == f"{POLICY}@{number}"
    back = service.admin.post(f"/admin/policies/{POLICY}/rollback", json={"to": 0, "reason": "worse"})
    assert back.status_code in (200, 201), back.text
    assert service.ask()["model"] == f"{POLICY}@base"
    id = service.ask(max_tokens=8)["id"]
    service.judge(completion_id=id, reward=0.5)
    after = eventually(lambda: service.policy()["live_version"], "learning goes on in the new epoch")
    versions = service.admin.get(f"/admin/policies/{POLICY}/versions").json()["versions"]
    assert [(v["number"], v["parent"], v["epoch"]) for v in versions] == [(after, 0, 1), (number, 0, 0)]
    assert not (service.home / "registry.db").exists()
