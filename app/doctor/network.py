"""What is asked over HTTP: vLLM servers, and the app itself."""

import httpx

from app.doctor.findings import Finding
from app.doctor.machine import local_engine
from app.engines.vllm_checks import inspect_server
from app.errors import SetupError
from app.settings import AppSettings

ANSWER_S = 60.0  # a first answer of a busy server
CONNECT_S = 5.0
START = "start it as `riacho vllm` does, or correct RIACHO_ENGINE_URLS"


async def engines(settings: AppSettings) -> list[Finding]:
    """One finding for the local engine, or for each vLLM server."""
    if settings.engine_urls == "local":
        return [local_engine()]
    return [await vllm(url, settings) for url in settings.vllm_urls] or [
        Finding("engine", "fail", f"engine_urls = {settings.engine_urls!r} names none", START)
    ]


async def vllm(url: str, settings: AppSettings) -> Finding:
    """The checks that the app makes at its start."""
    if not url.startswith(("http://", "https://")):
        return Finding("engine", "fail", f"{url!r} is no address of a vLLM server", START)
    timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, trust_env=False) as http:
        try:
            server = await inspect_server(http, settings.model, settings.slots)
        except SetupError as error:
            return Finding("engine", "fail", error.message, START)
    return Finding("engine", "ok", f"{url} serves {server.base!r} with {server.info.max_context} tokens of context")


async def running_app(settings: AppSettings) -> Finding:
    """What the app says of itself at its address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
    try:
        async with httpx.AsyncClient(timeout=CONNECT_S, trust_env=False) as http:
            response = await http.get(f"{url}/health/ready")
    except httpx.TransportError as error:
        found = f"no app answers at {url} ({type(error).__name__})"
        return Finding("app", "warn", found, "start it with `riacho serve` or `riacho up`")
    try:
        problems = response.json()["problems"]
    except (ValueError, LookupError, TypeError):
        found = f"what answers at {url} is not Riacho (status {response.status_code})"
        return Finding("app", "fail", found, "stop the other program, or set RIACHO_PORT")
    if problems:
        return Finding("app", "fail", f"{url} is not ready: {'; '.join(problems)}", "mend what it names")
    return Finding("app", "ok", f"{url} is ready")
