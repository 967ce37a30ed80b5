"""A real vLLM server for these tests, started by `riacho vllm` as an operator would.

RIACHO_TEST_VLLM_PYTHON names the interpreter of an environment with vLLM (by default .venv-vllm's);
RIACHO_TEST_ENGINE_URLS names a server that runs already.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.settings import TINY_MODEL
from tests.publishing import Publisher
from tests.service import ENGINE_URLS, Service, environment, eventually

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("RIACHO_TEST_VLLM_PYTHON", str(ROOT / ".venv-vllm/bin/python"))
START_S = 300
MAX_RANK = 16


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server for the tiny model."""
    if ENGINE_URLS != "local":
        yield ENGINE_URLS
        return
    home, port = tmp_path_factory.mktemp("vllm"), free_port()
    options = ["--model", str(TINY_MODEL), "--cpu", "--python", PYTHON, "--port", str(port), "--kv-cache-mib", "64"]
    limits = ["--max-num-seqs", "16", "--max-num-batched-tokens", "1024"]
    output = home / "output.log"
    with output.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", "vllm", *options, "--max-rank", str(MAX_RANK), "--", *limits],
            env=environment(home, {"HF_HUB_OFFLINE": "1"}),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def up() -> bool:
        if process.poll() is not None:
            pytest.fail(f"vLLM ended with status {process.returncode}:\n{output.read_text(errors='replace')[-3000:]}")
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health").is_success
        except httpx.TransportError:
            return False

    try:
        eventually(up, "vLLM is up", START_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            kill_rest(process.pid)


def kill_rest(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return  # nothing was left


@pytest.fixture(scope="module")
def service(vllm: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service on that server."""
    with Service(tmp_path_factory.mktemp("home"), extra={"RIACHO_ENGINE_URLS": vllm}) as running:
        yield running


@pytest.fixture(scope="module")
def publisher(service: Service) -> Iterator[Publisher]:
    publisher = Publisher(service.home)
    yield publisher
    publisher.close()
