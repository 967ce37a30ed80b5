"""The tests that come through the front door hold for vLLM as they stand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["chat", "capture", "feedback", "sessions", "errors", "tools"])
def test_api(vllm: str, name: str) -> None:
    """`tests/integration/test_api_*.py`, unchanged, with another engine."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/integration/test_api_{name}.py"],
        env={**os.environ, "RIACHO_TEST_ENGINE_URLS": vllm},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:]
