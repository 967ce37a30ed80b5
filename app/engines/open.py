"""Open the engine that the settings name; torch is imported only where the local engine is chosen."""

from app.engines.base import Engine
from app.engines.replicas import Replicas
from app.engines.vllm import VllmClient
from app.errors import SetupError
from app.settings import AppSettings


def open_engine(settings: AppSettings) -> Engine:
    """Raises SetupError for an engine that there is none of, or whose packages are missing."""
    if settings.engine_urls != "local":
        return _vllm(settings)
    try:
        from app.engines.local import LocalEngine
    except ModuleNotFoundError as error:
        raise SetupError(f"the local engine needs {error.name}: pip install 'riacho[local]'") from error
    return LocalEngine(settings.model, policy=settings.policy, slots=settings.slots, threads=settings.engine_threads)


def _vllm(settings: AppSettings) -> Engine:
    urls = settings.vllm_urls
    given = f"engine_urls = {settings.engine_urls!r}"
    if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
        raise SetupError(
            f"{given}: give `local`, or addresses of vLLM servers such as http://127.0.0.1:8000",
            param="engine_urls",
        )
    if len(set(urls)) < len(urls):
        raise SetupError(f"{given}: give each address once", param="engine_urls")
    store = settings.resolved_adapter_store / settings.policy
    clients = [
        VllmClient(url, model=settings.model, policy=settings.policy, store=store, slots=settings.slots) for url in urls
    ]
    return Replicas(clients, settings.slots)
