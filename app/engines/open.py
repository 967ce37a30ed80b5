"""Open the engine that the settings name; torch is imported only where the local engine is chosen."""

from app.engines.base import Engine
from app.errors import SetupError
from app.settings import AppSettings


def open_engine(settings: AppSettings) -> Engine:
    """Raises SetupError for an engine that there is none of, or whose packages are missing."""
    if settings.engine_urls != "local":
        raise SetupError(f"engine_urls = {settings.engine_urls!r}: only `local` is known", param="engine_urls")
    try:
        from app.engines.local import LocalEngine
    except ModuleNotFoundError as error:
        raise SetupError(f"the local engine needs {error.name}: pip install 'riacho[local]'") from error
    return LocalEngine(settings.model, policy=settings.policy, slots=settings.slots, threads=settings.engine_threads)
