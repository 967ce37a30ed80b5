"""The demo on a real vLLM server."""

from pathlib import Path

import pytest

from tests.demo import assert_complete, short_demo
from tests.vllm.conftest import PYTHON


@pytest.mark.timeout(1200)
def test_the_demo_starts_vllm_and_learns_on_it(tmp_path: Path) -> None:
    """`--engine vllm` alone: the server starts, answers, swaps versions, rolls back, and is gone at the end."""
    report = short_demo(tmp_path, "--engine", "vllm", "--vllm-python", PYTHON)
    assert_complete(report)
    assert "Shutting down" in (tmp_path / "out/vllm.log").read_text(encoding="utf-8", errors="replace")
