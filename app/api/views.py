"""Read models: what the registry knows, as JSON."""

from dataclasses import asdict
from typing import Any

from anyio import to_thread

from app.errors import InvalidRequest
from app.registry.records import KeyRecord
from app.security.receipts import WHOLE
from app.services import Services
from app.serving.sessions import own_completion


async def completion_view(services: Services, key: KeyRecord, completion_id: str) -> dict[str, Any]:
    """A completion as the learner met it; `captured` where the learner has not read so far yet."""
    receipt = services.receipts.read(completion_id)
    own_completion(key, receipt.key_id, completion_id)
    if receipt.choice == WHOLE:
        raise InvalidRequest("this id names an answer with several choices; ask for choices[i].completion_id")
    row = await to_thread.run_sync(services.registry.projections.completion, completion_id)
    if row is None:
        return {"object": "completion.record", "id": completion_id, "policy": receipt.policy, "state": "captured"}
    return {"object": "completion.record", **asdict(row)}
