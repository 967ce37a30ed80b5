"""The shapes of OpenAI's chat completions, out of answers and chunks."""

import json
from collections.abc import Sequence
from typing import Any

from app.engines.base import Chunk, TokenLogprob
from app.serving.call import Answer, ChatCall, without_place
from app.serving.chat import Piece, Running

DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class Shapes:
    """Bodies of one call.

    Args:
        id: the whole answer's completion id.
        choice_ids: the completion id of each choice; what feedback names.
        model: the version that samples, such as `riacho@7`.
        parallel_tool_calls: whether an answer may show more than its first tool call. An engine that kept to one would
            have to constrain the sampling, so the rest is sampled, trained on and not shown.
    """

    def __init__(
        self,
        call: ChatCall,
        id: str,
        choice_ids: Sequence[str],
        model: str,
        logprobs: bool,
        parallel_tool_calls: bool = True,
    ) -> None:
        self._call = call
        self._choice_ids = choice_ids
        self._logprobs = logprobs
        self._parallel = parallel_tool_calls
        self._head = {"id": id, "created": int(call.at.timestamp()), "model": model}

    def completion(self, running: Running) -> dict[str, Any]:
        """The JSON body of an answer that was not streamed."""
        choices = [self._choice(index, answer) for index, answer in enumerate(running.answers)]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage(running.answers)}

    def opening(self, choice: int) -> dict[str, Any]:
        return self._chunk([self._delta(choice, {"role": "assistant", "content": ""})])

    def piece(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if piece.chunk.reasoning:
            delta["reasoning_content"] = piece.chunk.reasoning
        if piece.chunk.text:
            delta["content"] = piece.chunk.text
        if calls := self._shown(piece.chunk.tool_calls):
            delta["tool_calls"] = calls
        return self._chunk([self._delta(piece.choice, delta, piece.chunk)])

    def usage_chunk(self, running: Running) -> dict[str, Any]:
        return {**self._chunk([]), "usage": usage(running.answers)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def _delta(self, choice: int, delta: dict[str, Any], chunk: Chunk | None = None) -> dict[str, Any]:
        details = chunk.details if chunk is not None else ()
        return {
            "index": choice,
            "delta": delta,
            "logprobs": token_logprobs(details) if self._logprobs and details else None,
            "finish_reason": chunk.finish_reason if chunk is not None else None,
            "completion_id": self._choice_ids[choice],
        }

    def _shown(self, calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The calls, or their pieces, that the client may see."""
        return [call for call in calls if self._parallel or call["index"] == 0]

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or None, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if calls := self._shown(answer.tool_calls):
            message["tool_calls"] = [without_place(call) for call in calls]
        else:
            message["content"] = answer.text
        return {
            "index": index,
            "message": message,
            "logprobs": token_logprobs(answer.details) if self._logprobs else None,
            "finish_reason": answer.finish_reason,
            "completion_id": self._choice_ids[index],
        }


def usage(answers: Sequence[Answer]) -> dict[str, int]:
    """Tokens read (once, whatever n) and sampled (over all choices)."""
    prompt = len(answers[0].prompt_ids)
    sampled = sum(len(answer.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def token_logprobs(details: Sequence[TokenLogprob]) -> dict[str, Any]:
    """OpenAI's `logprobs` of a choice."""
    return {
        "content": [
            {
                **_token(detail.token, detail.logprob),
                "top_logprobs": [_token(token, logprob) for token, logprob in detail.top],
            }
            for detail in details
        ],
        "refusal": None,
    }


def _token(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
