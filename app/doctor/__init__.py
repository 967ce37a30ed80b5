"""`riacho doctor`: looks at everything that an installation depends on, and changes nothing.

Each check is one finding, and one that fails hides no other.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from app.config import load
from app.doctor.findings import Finding, show_findings
from app.doctor.machine import check_machine
from app.doctor.network import engines, running_app
from app.doctor.stores import check_stores
from app.errors import SetupError
from app.settings import AppSettings

__all__ = ["Finding", "examine", "show_findings"]


async def examine(options: Mapping[str, Any]) -> list[Finding]:
    """All findings, under the settings that file, variables and these command options give."""
    try:
        settings, resolved = load(AppSettings, options)
    except SetupError as error:
        return [Finding("settings", "fail", error.message, "`riacho config` shows what is set, and where")]
    return [
        Finding("settings", "ok", str(resolved)),
        *await asyncio.to_thread(check_machine, settings),
        *await asyncio.to_thread(check_stores, settings),
        *await engines(settings),
        await running_app(settings),
    ]
