"""The operators' API: policies, versions with lineage and metrics, deployments, rollback, pause, dead letters."""

import base64
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from typing import Annotated, Any

from anyio import to_thread
from litestar import Controller, Request, delete, get, post
from litestar.params import Parameter

from app.api.errors import DOCUMENTED
from app.api.schemas import PinRequest, RollbackRequest
from app.errors import NotFound
from app.events.log import DeadLetter
from app.registry.records import KeyRecord
from app.security.auth import admin_only
from app.services import Services

Limit = Annotated[int, Parameter(ge=1, le=1000, description="rows at most")]
Before = Annotated[int | None, Parameter(ge=0, le=2**31 - 1, description="only numbers below this")]
Number = Annotated[int, Parameter(ge=0, le=2**31 - 1)]


class AdminController(Controller):
    """What the `riacho` command and the dashboard use."""

    path = "/admin/policies"
    guards = [admin_only]  # noqa: RUF012 - Litestar reads it as a class attribute
    tags = ["admin"]  # noqa: RUF012

    @get("/", responses=DOCUMENTED)
    async def policies(self, services: Services) -> dict[str, Any]:
        """All policies of the registry."""
        records = await to_thread.run_sync(services.registry.policies.list)
        return {"policies": [asdict(record) for record in records]}

    @get("/{policy:str}", responses=DOCUMENTED)
    async def policy(self, policy: str, services: Services) -> dict[str, Any]:
        """One policy: its live version, epoch, and whether learning is paused."""
        return asdict(await to_thread.run_sync(services.registry.policies.get, policy))

    @get("/{policy:str}/versions", responses=DOCUMENTED)
    async def versions(
        self, policy: str, services: Services, limit: Limit = 200, before: Before = None
    ) -> dict[str, Any]:
        """Versions with state, lineage, metrics and settings, newest first."""
        await _known(services, policy)
        records = await to_thread.run_sync(services.registry.versions.list, policy, limit, before)
        return {"versions": _rows(records)}

    @get("/{policy:str}/versions/{number:int}", responses=DOCUMENTED)
    async def version(self, policy: str, number: Number, services: Services) -> dict[str, Any]:
        """One version."""
        return asdict(await to_thread.run_sync(services.registry.versions.get, policy, number))

    @post("/{policy:str}/versions/{number:int}/pin", status_code=200, responses=DOCUMENTED)
    async def pin(
        self,
        policy: str,
        number: Number,
        data: PinRequest,
        request: Request[KeyRecord, None, Any],
        services: Services,
    ) -> dict[str, Any]:
        """Keep a version's files from clean-up, or let go of them."""
        await to_thread.run_sync(services.registry.versions.set_pinned, policy, number, data.pinned, _actor(request))
        return asdict(await to_thread.run_sync(services.registry.versions.get, policy, number))

    @get("/{policy:str}/deployments", responses=DOCUMENTED)
    async def deployments(self, policy: str, services: Services, limit: Limit = 200) -> dict[str, Any]:
        """Moves of the live pointer, newest first."""
        await _known(services, policy)
        records = await to_thread.run_sync(services.registry.versions.deployments, policy, limit)
        return {"deployments": _rows(records)}

    @get("/{policy:str}/updates", responses=DOCUMENTED)
    async def updates(
        self, policy: str, services: Services, limit: Limit = 200, before: Before = None
    ) -> dict[str, Any]:
        """The learner's updates with all metrics, newest first."""
        await _known(services, policy)
        records = await to_thread.run_sync(services.registry.projections.updates, policy, limit, before)
        return {"updates": _rows(records)}

    @post("/{policy:str}/rollback", status_code=200, responses=DOCUMENTED)
    async def rollback(
        self, policy: str, data: RollbackRequest, request: Request[KeyRecord, None, Any], services: Services
    ) -> dict[str, Any]:
        """Serve version `to` (0 or "base": the base) from now on, and let learning go on from it."""
        to = 0 if data.to == "base" else data.to
        services.require_policy(policy)
        return asdict(await services.operations.rollback(to, _actor(request), data.reason))

    @post("/{policy:str}/pause", status_code=200, responses=DOCUMENTED)
    async def pause(self, policy: str, request: Request[KeyRecord, None, Any], services: Services) -> dict[str, Any]:
        """Stop learning; serving and capture go on, and nothing is lost."""
        return await _set_paused(services, policy, True, request)

    @post("/{policy:str}/resume", status_code=200, responses=DOCUMENTED)
    async def resume(self, policy: str, request: Request[KeyRecord, None, Any], services: Services) -> dict[str, Any]:
        """Learn again, from where learning stopped."""
        return await _set_paused(services, policy, False, request)

    @get("/{policy:str}/dead-letters", responses=DOCUMENTED)
    async def dead_letters(
        self, policy: str, services: Services, limit: Limit = 200, before: Before = None
    ) -> dict[str, Any]:
        """Records that could not be applied, with the reason, newest first."""
        services.require_policy(policy)
        letters = reversed(await to_thread.run_sync(services.events.dead_letters))
        page = islice((letter for letter in letters if before is None or letter.id < before), limit)
        return {"dead_letters": [_letter(letter) for letter in page]}

    @get("/{policy:str}/dead-letters/{id:int}", responses=DOCUMENTED)
    async def dead_letter(self, policy: str, id: Number, services: Services) -> dict[str, Any]:
        """One of them with its payload: as text where it is UTF-8, else in base64."""
        services.require_policy(policy)
        try:
            letter = await to_thread.run_sync(services.events.dead_letter, id)
        except KeyError:
            raise _no_letter(id) from None
        return _letter(letter) | _payload(letter)

    @post("/{policy:str}/dead-letters/{id:int}/replay", status_code=200, responses=DOCUMENTED)
    async def replay_dead_letter(
        self, policy: str, id: Number, request: Request[KeyRecord, None, Any], services: Services
    ) -> dict[str, Any]:
        """Put a dead letter on the log again, as it came."""
        services.require_policy(policy)
        try:
            position = str(await services.events.replay_dead_letter(id))
        except KeyError:
            raise _no_letter(id) from None
        await _audit(services, request, "replay_dead_letter", {"id": id, "position": position})
        return {"id": id, "position": position}

    @delete("/{policy:str}/dead-letters/{id:int}", responses=DOCUMENTED)
    async def drop_dead_letter(
        self, policy: str, id: Number, request: Request[KeyRecord, None, Any], services: Services
    ) -> None:
        """Take a dead letter out for good."""
        services.require_policy(policy)
        try:
            await to_thread.run_sync(services.events.drop_dead_letter, id)
        except KeyError:
            raise _no_letter(id) from None
        await _audit(services, request, "drop_dead_letter", {"id": id})


async def _known(services: Services, policy: str) -> None:
    """Raises NotFound for a policy that is not there: an empty list would hide a typing mistake."""
    await to_thread.run_sync(services.registry.policies.get, policy)


async def _set_paused(
    services: Services, policy: str, paused: bool, request: Request[KeyRecord, None, Any]
) -> dict[str, Any]:
    await to_thread.run_sync(services.registry.policies.set_paused, policy, paused, _actor(request))
    return asdict(await to_thread.run_sync(services.registry.policies.get, policy))


def _no_letter(id: int) -> NotFound:
    return NotFound(f"there is no dead letter {id}", param="id")


async def _audit(
    services: Services, request: Request[KeyRecord, None, Any], action: str, detail: dict[str, Any]
) -> None:
    await to_thread.run_sync(services.registry.audit.add, _actor(request), action, services.settings.policy, detail)


def _actor(request: Request[KeyRecord, None, Any]) -> str:
    return f"key:{request.user.id}"


def _rows(records: Sequence[Any]) -> list[dict[str, Any]]:
    return [asdict(record) for record in records]


def _letter(letter: DeadLetter) -> dict[str, Any]:
    return {
        "id": letter.id,
        "position": str(letter.position),
        "reason": letter.reason,
        "attempts": letter.attempts,
        "at": letter.at.isoformat(),
        "bytes": len(letter.payload),
    }


def _payload(letter: DeadLetter) -> dict[str, Any]:
    try:
        return {"payload": letter.payload.decode(), "payload_encoding": "utf-8"}
    except UnicodeDecodeError:
        return {"payload": base64.b64encode(letter.payload).decode(), "payload_encoding": "base64"}
