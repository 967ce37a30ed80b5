"""An engine that is away is seen by what watches the service: /metrics and `riacho doctor`."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.service import Service, eventually, riacho


@pytest.mark.timeout(600)
def test_a_killed_server_is_seen(own_vllm: Any, tmp_path: Path) -> None:
    """While vLLM answers all is well; once it is gone it counts as out, and the doctor names the engine and the app."""
    with Service(tmp_path, extra={"RIACHO_ENGINE_URLS": own_vllm.url}) as service:
        extra = {"RIACHO_ENGINE_URLS": own_vllm.url, "RIACHO_PORT": service.base_url.rpartition(":")[2]}

        def failures() -> dict[str, str]:
            rows = json.loads(riacho(tmp_path, "doctor", "--json", extra=extra).stdout)
            return {row["check"]: row["found"] for row in rows if row["status"] == "fail"}

        assert failures() == {}
        assert service.metric('riacho_engines{state="serving"}') == 1
        own_vllm.kill()
        eventually(lambda: failures().keys() == {"engine", "app"}, "both are found")
        found = failures()
        assert own_vllm.url in found["engine"]
        assert "the engine does not answer" in found["app"]
        assert service.metric('riacho_engines{state="out"}') == 1
        [engine] = service.admin.get("/admin/engines").json()["engines"]
        assert (engine["name"], engine["serving"]) == (own_vllm.url, False)
        assert engine["problem"]
