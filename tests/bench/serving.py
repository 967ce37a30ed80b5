"""What Riacho adds in front of vLLM, and how long a swap takes, on a server that this starts.

    python -m tests.bench.serving            # both tables; --json FILE keeps the numbers

Load comes from aiperf, in an environment of its own (.venv-bench, made by `make bench`; or RIACHO_BENCH_AIPERF).
Riacho always asks vLLM for token ids and logprobs, since it learns from them. So vLLM is called directly twice:
plainly, as without Riacho, and for the same ids and logprobs. The difference of the two is what vLLM takes for them.
"""

import asyncio
import itertools
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx

from app.engines.vllm_command import SERVED_NAME
from app.settings import TINY_MODEL
from learner.tiny.corpus import writing_prompt
from tests.bench.rounds import Line, interleaved, percentile, report
from tests.publishing import Publisher
from tests.service import POLICY, Service
from tests.vllm.conftest import VllmProcess

AIPERF = os.environ.get("RIACHO_BENCH_AIPERF", str(Path(__file__).parents[2] / ".venv-bench/bin/aiperf"))
RUN_S = 600
CONCURRENCIES = (1, 8)
REQUESTS = {1: 30, 8: 96}
WARM_UP = 8
PROMPTS = 40
MAX_TOKENS = 32
NO_END = {"3065": -100}  # the tiny model's end of turn, so that every answer has MAX_TOKENS
SAMPLING: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "logit_bias": NO_END}
FOR_LEARNING: dict[str, Any] = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
METRICS = {"time_to_first_token": "first token", "request_latency": "whole answer"}
PERCENTS = ("p50", "p99")
STREAMS = 8
POLL_S = 0.002
SWAP_SCALE = 0.03

Latencies = dict[tuple[str, str], float]  # milliseconds by metric and percentile


@dataclass(frozen=True, slots=True)
class Target:
    """An OpenAI-compatible server and what is asked of it."""

    url: str
    model: str
    key: str
    extra: Mapping[str, Any]


def drive(target: Target, concurrency: int, prompts: Path, folder: Path) -> Latencies:
    """Send the prompts by aiperf, streamed; fails unless every request succeeds."""
    command = [AIPERF, "profile", "--model", target.model, "--url", target.url, "--api-key", target.key]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", str(TINY_MODEL)]
    command += ["--input-file", str(prompts), "--custom-dataset-type", "single_turn", "--random-seed", "0"]
    command += ["--concurrency", str(concurrency), "--request-count", str(REQUESTS[concurrency])]
    command += ["--warmup-request-count", str(WARM_UP), "--extra-inputs", json.dumps(target.extra)]
    command += ["--output-artifact-dir", str(folder), "--no-gpu-telemetry", "--no-server-metrics", "--ui", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    if done.returncode:
        raise click.ClickException(f"aiperf ended with status {done.returncode}:\n{done.stdout[-3000:]}{done.stderr}")
    found = json.loads((folder / "profile_export_aiperf.json").read_text())
    succeeded = found["request_count"]["avg"]
    if succeeded != REQUESTS[concurrency]:
        raise click.ClickException(f"{succeeded:g} of {REQUESTS[concurrency]} requests to {target.url} succeeded")
    return {(metric, percent): found[metric][percent] for metric in METRICS for percent in PERCENTS}


async def overhead(vllm: str, service: Service, folder: Path, rounds: int, target: Path | None) -> None:
    """Time to the first token and to the last, through Riacho and directly, for the same prompts on the same base."""
    prompts = folder / "prompts.jsonl"
    rng = random.Random(0)
    prompts.write_text("".join(json.dumps({"text": writing_prompt(rng)}) + "\n" for _ in range(PROMPTS)))
    plain, learning = "vLLM, plain", "vLLM, with ids and logprobs"
    targets = {
        plain: Target(vllm, SERVED_NAME, "none", SAMPLING),
        learning: Target(vllm, SERVED_NAME, "none", SAMPLING | FOR_LEARNING),
        "Riacho": Target(service.base_url, f"{POLICY}@base", service.client_key, SAMPLING),
    }
    numbers = itertools.count()

    def driving(to: Target, concurrency: int) -> Callable[[], Awaitable[Latencies]]:
        return lambda: asyncio.to_thread(drive, to, concurrency, prompts, folder / str(next(numbers)))

    for concurrency in CONCURRENCIES:
        measures = {name: driving(to, concurrency) for name, to in targets.items()}
        found = await interleaved(rounds, measures)
        lines = []
        for (metric, percent), name in itertools.product(itertools.product(METRICS, PERCENTS), targets):
            values = [round_[metric, percent] for round_ in found[name]]
            for base in (plain, learning) if name == "Riacho" else (plain,):
                against = [round_[metric, percent] for round_ in found[base]]
                lines.append(Line(f"{METRICS[metric]} {percent}, {name}", "ms", values, against, base))
        report(f"Latency at concurrency {concurrency}, {MAX_TOKENS} tokens, streamed", lines, target)


async def swaps(service: Service, publisher: Publisher, publishes: int, target: Path | None) -> None:
    """From a version's registration to the first token that it samples, idle and under streams."""
    numbers = itertools.count(1)
    headers = {"Authorization": f"Bearer {service.client_key}"}
    async with httpx.AsyncClient(base_url=service.base_url, headers=headers, timeout=120) as client:
        for streams in (0, STREAMS):
            async with streaming(client, streams):
                found = [await swap(client, publisher, next(numbers)) for _ in range(publishes)]
            lines = []
            for percent in (50, 95):
                base = [percentile([one.usual_ms for one in found], percent)]
                parts = {
                    "no swap": base,
                    "registered to pointer moved (load, probe)": [percentile([s.load_ms for s in found], percent)],
                    "pointer moved to first token": [percentile([s.token_ms for s in found], percent)],
                    "registered to first token": [percentile([s.load_ms + s.token_ms for s in found], percent)],
                }
                against = "first token without a swap"
                lines += [Line(f"{name}, p{percent}", "ms", value, base, against) for name, value in parts.items()]
            report(f"Swap under {streams} streams, {publishes} publishes", lines, target)


@dataclass(frozen=True, slots=True)
class Swap:
    """Milliseconds of one publish.

    Attributes:
        usual_ms: to a first token just before it.
        load_ms: from the registration as a candidate until the pointer has moved.
        token_ms: from there to the first token of the new version.
    """

    usual_ms: float
    load_ms: float
    token_ms: float


async def swap(client: httpx.AsyncClient, publisher: Publisher, number: int) -> Swap:
    """Publish a version that is written already, and ask for it."""
    path = await asyncio.to_thread(publisher.write, number)
    before = time.perf_counter()
    await first_token(client)
    registering = time.perf_counter()
    await asyncio.to_thread(publisher.publish, number, write=lambda _: path)
    while publisher.live != number:
        await asyncio.sleep(POLL_S)
    moved = time.perf_counter()
    while await first_token(client) != f"{POLICY}@{number}":
        pass
    done = time.perf_counter()
    return Swap(1000 * (registering - before), 1000 * (moved - registering), 1000 * (done - moved))


async def first_token(client: httpx.AsyncClient) -> str:
    """Ask for an answer of one token, and wait for it; the version that sampled it."""
    async with client.stream("POST", "/v1/chat/completions", json=body(1)) as response:
        if response.status_code != httpx.codes.OK:
            raise click.ClickException((await response.aread()).decode())
        async for line in response.aiter_lines():
            chunk = line.removeprefix("data: ")
            if chunk and json.loads(chunk)["choices"][0]["delta"].get("content"):
                return str(json.loads(chunk)["model"])
    raise click.ClickException("an answer without a token")


@asynccontextmanager
async def streaming(client: httpx.AsyncClient, count: int) -> AsyncIterator[None]:
    """So many answers under way, one after the other."""

    async def talk() -> None:
        while True:
            (await client.post("/v1/chat/completions", json=body(4 * MAX_TOKENS))).raise_for_status()

    tasks = [asyncio.create_task(talk()) for _ in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


def body(max_tokens: int) -> dict[str, Any]:
    """A streamed request to the live version."""
    messages = [{"role": "user", "content": "Write a line about the sea."}]
    return {"model": POLICY, "messages": messages, "stream": True, **SAMPLING, "max_tokens": max_tokens}


@click.command()
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="Each measures everything once.")
@click.option("--publishes", default=20, show_default=True, type=click.IntRange(1))
@click.option("--only", type=click.Choice(["overhead", "swaps"]))
@click.option("--json", "target", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers there.")
def main(rounds: int, publishes: int, only: str | None, target: Path | None) -> None:
    """What Riacho adds in front of vLLM, and how long a swap takes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (home := folder / "home").mkdir()
        (own := folder / "vllm").mkdir()
        vllm = VllmProcess(own)
        vllm.start()
        try:
            with Service(home, extra={"RIACHO_ENGINE_URLS": vllm.url}) as service:
                if only in (None, "overhead"):
                    asyncio.run(overhead(vllm.url, service, folder, rounds, target))
                if only in (None, "swaps"):
                    with closing(Publisher(home, SWAP_SCALE)) as publisher:
                        asyncio.run(swaps(service, publisher, publishes, target))
        finally:
            vllm.stop()


if __name__ == "__main__":
    main()
