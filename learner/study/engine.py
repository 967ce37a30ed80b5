"""The engine under the demo: the local one, running vLLM servers, or a vLLM server of the demo's own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from app.settings import TINY_MODEL
from learner.study.process import HOST, Server, free_port, inherited

VLLM = "vllm"
READY_S = 300.0
# The tiny model's keys and values of 16 requests; vLLM's own choice would be sized for a large model.
KV_CACHE_MIB = 64


@contextmanager
def engine(name: str, vllm_python: Path, log: Path) -> Iterator[str]:
    """RIACHO_ENGINE_URLS for `--engine`; for `vllm` a server runs as long as the block."""
    if name != VLLM:
        yield name
        return
    if not vllm_python.is_file():
        raise click.UsageError(
            f"--engine vllm: no vLLM at {vllm_python}. `make .venv-vllm/.ready` makes an environment with vLLM for the "
            "CPU (2.5 GB), as `make test-vllm` does; or name an interpreter with --vllm-python."
        )
    port = free_port()
    options = ["--model", str(TINY_MODEL), "--cpu", "--python", str(vllm_python), "--host", HOST, "--port", str(port)]
    options += ["--kv-cache-mib", str(KV_CACHE_MIB), "--", "--max-num-seqs", "16", "--max-num-batched-tokens", "1024"]
    url = f"http://{HOST}:{port}"
    command = [sys.executable, "-m", "app.cli", "vllm", *options]
    with Server("vLLM", command, inherited(), f"{url}/health", READY_S, log):
        yield url
