"""A fixed log: real rollouts sampled from the base, with the events that make a stream untidy."""

import asyncio
import random
from datetime import timedelta
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.events.schema import (
    CompletionEvent,
    Event,
    FeedbackEvent,
    RollbackEvent,
    Sampling,
    SessionClosedEvent,
    Usage,
)
from app.events.sqlite import SqliteLog
from app.settings import TINY_MODEL
from learner.tiny.corpus import writing_prompt
from tests.builders import START

MAX_TOKENS = 72


def sample(count: int, seed: int) -> list[tuple[list[int], list[int], list[float], str]]:
    """`count` answers of the base at temperature 1: prompt ids, completion ids, logprobs, text."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32).eval()
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": writing_prompt(rng)}], add_generation_prompt=True, tokenize=False
        )
        for _ in range(count)
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        out = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=MAX_TOKENS,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
    return [
        _answer(model, tokenizer, text, row[batch["input_ids"].shape[1] :].tolist())
        for text, row in zip(texts, out, strict=True)
    ]


def _answer(model, tokenizer, text: str, ids: list[int]) -> tuple[list[int], list[int], list[float], str]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    eos = tokenizer.eos_token_id
    ids = ids[: ids.index(eos) + 1] if eos in ids else ids
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
    return prompt, ids, logprobs, tokenizer.decode(ids, skip_special_tokens=True)


def events(count: int, seed: int = 0, rollback_to: int | None = None) -> list[Event]:
    """Completions and rewards of `count` sessions: in order, reversed, twice, per turn, and never judged.

    With `rollback_to` an operator rolls back to that version two thirds along the way.
    """
    out: list[Event] = []
    for i, (prompt, ids, logprobs, text) in enumerate(sample(count, seed)):
        session = f"s{i}"
        at = START + timedelta(seconds=i)
        completion = CompletionEvent(
            event_id=f"c{i}",
            policy="riacho",
            session_id=session,
            at=at,
            completion_id=f"c{i}",
            version=0,
            prompt_ids=tuple(prompt),
            completion_ids=tuple(ids),
            logprobs=tuple(logprobs),
            sampling=Sampling(temperature=1.0, max_tokens=MAX_TOKENS),
            finish_reason="stop",
            trainable=True,
            usage=Usage(prompt_tokens=len(prompt), completion_tokens=len(ids)),
            key_id="k",
        )
        reward = (1 + len(text) % 5) / 5  # never 0, so that every update moves the policy
        judged = FeedbackEvent(
            event_id=f"f{i}",
            policy="riacho",
            session_id=session,
            at=at,
            completion_id=f"c{i}",
            reward=reward,
            key_id="k",
        )
        turn = judged.model_copy(update={"final": False})
        closed = SessionClosedEvent(event_id=f"x{i}", policy="riacho", session_id=session, at=at)
        shapes: list[list[Event]] = [
            [completion, judged],
            [judged, completion],
            [completion, completion, judged, judged],
            [completion, turn, closed],
        ]
        out += shapes[i % 4]
        if i % 9 == 0:
            unjudged = completion.model_copy(
                update={"event_id": f"u{i}", "completion_id": f"u{i}", "session_id": f"u{i}"}
            )
            out.append(unjudged)
        if rollback_to is not None and i == 2 * count // 3:
            out.append(
                RollbackEvent(
                    event_id="r", policy="riacho", session_id="rollback", at=at, to=rollback_to, epoch=1, reason="test"
                )
            )
    return out


def write(path: Path, stream: list[Event]) -> None:
    """Append a stream to a new log."""
    log = SqliteLog(path)
    for event in stream:
        asyncio.run(log.append(event))
    log.close()
