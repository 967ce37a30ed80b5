"""`POST /v1/feedback`, the end of a session, and what became of a completion."""

from typing import Any

from litestar import Request, get, post

from app.api.errors import DOCUMENTED
from app.api.schemas import FeedbackRequest
from app.api.views import completion_view
from app.errors import InvalidRequest, WrongSignal
from app.registry.records import KeyRecord
from app.services import Services
from app.serving.feedback import Judgement
from app.settings import SharedSettings


@post("/v1/feedback", status_code=200, tags=["feedback"], responses=DOCUMENTED)
async def post_feedback(
    data: FeedbackRequest, request: Request[KeyRecord, None, Any], services: Services
) -> dict[str, Any]:
    """Judge a completion or a session. A repeated `id` with the same content gives the same answer."""
    settings = services.settings
    require_client_signal(settings, data.signal)
    reward = data.reward
    if reward is None:
        reward = settings.reward_max if data.thumb == "up" else settings.reward_min
    if not settings.reward_min <= reward <= settings.reward_max:
        raise InvalidRequest(
            f"reward = {reward:g}: this policy takes rewards from {settings.reward_min:g} to {settings.reward_max:g}",
            param="reward",
        )
    judgement = Judgement(
        signal=data.signal,
        reward=reward,
        completion_id=data.completion_id,
        session_id=data.session_id,
        final=data.final,
        id=data.id,
        comment=data.comment,
        metadata=data.metadata,
    )
    stored = await services.feedback.judge(request.user, judgement)
    if not stored.duplicate:
        services.metrics.feedback.labels(str(data.final).lower()).inc()
    return {
        "object": "feedback",
        "id": stored.client_id or stored.event_id,
        "completion_id": stored.completion_id,
        "session_id": data.session_id,
        "signal": stored.signal,
        "reward": stored.reward,
        "final": stored.final,
    }


def require_client_signal(settings: SharedSettings, signal: str) -> None:
    """Raises WrongSignal for a signal that is unknown, or that a reward function gives."""
    if signal in settings.rewards and signal not in settings.scorers:
        return
    known = ", ".join(name for name in settings.rewards if name not in settings.scorers) or "none"
    what = "is given by a reward function" if signal in settings.rewards else "is not known"
    raise WrongSignal(f"signal = {signal!r} {what}; this policy's signals for clients: {known}", param="signal")


@post("/v1/sessions/{session_id:str}/close", status_code=200, tags=["feedback"], responses=DOCUMENTED)
async def close_session(session_id: str, request: Request[KeyRecord, None, Any], services: Services) -> dict[str, Any]:
    """End a session: its rollout is complete if rewards or reward functions are there, else with the next judgement."""
    closed = await services.feedback.close(request.user, session_id)
    return {"object": "session", "id": session_id, "closed": True, "waits_for_feedback": closed is None}


@get("/v1/completions/{completion_id:str}", tags=["feedback"], responses=DOCUMENTED)
async def get_completion(
    completion_id: str, request: Request[KeyRecord, None, Any], services: Services
) -> dict[str, Any]:
    """What was captured of a completion, and whether it was trained on, in which update and version."""
    return await completion_view(services, request.user, completion_id)
