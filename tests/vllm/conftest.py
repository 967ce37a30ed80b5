"""A real vLLM server for these tests, started by `riacho vllm` as an operator would.

RIACHO_TEST_VLLM_PYTHON names the interpreter of an environment with vLLM (by default .venv-vllm's),
RIACHO_TEST_VLLM_DEVICE what it runs on (`cpu`, or `cuda` for vLLM's CUDA build) and RIACHO_TEST_VLLM_DTYPE its dtype
(float32 on the CPU, bfloat16 on a GPU); the tolerances follow from the dtype. RIACHO_TEST_MODEL names another model,
and RIACHO_TEST_ENGINE_URLS a server that runs already.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from learner.study.process import free_port
from tests.precision import TOLERANCES
from tests.publishing import Publisher
from tests.service import ENGINE_URLS, MODEL, Service, environment, eventually

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("RIACHO_TEST_VLLM_PYTHON", str(ROOT / ".venv-vllm/bin/python"))
DEVICE = os.environ.get("RIACHO_TEST_VLLM_DEVICE", "cpu")
DTYPE = os.environ.get("RIACHO_TEST_VLLM_DTYPE", {"cpu": "float32", "cuda": "bfloat16"}[DEVICE])
TOLERANCE = TOLERANCES[DTYPE]
# On the GPU several servers run side by side: the KV cache has its own bound, and this only has to be free.
DEVICE_OPTIONS = {"cpu": ["--cpu", "--kv-cache-mib", "64"], "cuda": ["--kv-cache-mib", "1024"]}[DEVICE]
DEVICE_LIMITS = {"cpu": [], "cuda": ["--gpu-memory-utilization", "0.3"]}[DEVICE]
START_S = 300
MAX_RANK = 16


class VllmProcess:
    """A vLLM server on a port of its own that it keeps over restarts."""

    def __init__(self, home: Path, model: Path = Path(MODEL), options: Sequence[str] = ()) -> None:
        self._home = home
        self._model = model
        self._options = options
        self._output = home / "output.log"
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        options = ["--model", str(self._model), "--python", PYTHON, "--port", str(self._port), *DEVICE_OPTIONS]
        options += ["--max-rank", str(MAX_RANK), *self._options]
        limits = ["--dtype", DTYPE, "--max-num-seqs", "16", "--max-num-batched-tokens", "1024", *DEVICE_LIMITS]
        with self._output.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "app.cli", "vllm", *options, "--", *limits],
                env=environment(self._home, {"HF_HUB_OFFLINE": "1"}),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            eventually(self._up, "vLLM is up", START_S)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """An orderly end, and then the end of whatever is left."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self.kill()

    def kill(self) -> None:
        """SIGKILL for the server and all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def _up(self) -> bool:
        if self._process.poll() is not None:
            text = self._output.read_text(encoding="utf-8", errors="replace")
            pytest.fail(f"vLLM ended with status {self._process.returncode}:\n{text[-3000:]}")
        try:
            return httpx.get(f"{self.url}/health").is_success
        except httpx.TransportError:
            return False


def vllm_metric(url: str, name: str) -> float:
    """A metric of a server, summed over its labels."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}"))


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that all these tests share."""
    if ENGINE_URLS != "local":
        yield ENGINE_URLS
        return
    server = VllmProcess(tmp_path_factory.mktemp("vllm"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
def own_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    """A server for one test, which may kill it."""
    server = VllmProcess(tmp_path_factory.mktemp("own-vllm"))
    server.start()
    yield server
    server.stop()


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
