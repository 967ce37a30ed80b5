"""What an engine recorded, computed again by transformers."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from app.events.schema import CompletionEvent
from app.settings import TINY_MODEL


def worst_difference(model: Any, event: CompletionEvent) -> float:
    """The largest distance between a recorded logprob and what `model` gives at the event's temperature."""
    ids = torch.tensor([[*event.prompt_ids, *event.completion_ids]])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, len(event.prompt_ids) - 1 : -1].double()
    table = torch.log_softmax(logits / event.sampling.temperature, -1)
    computed = table.gather(1, torch.tensor(event.completion_ids)[:, None])[:, 0]
    return float((computed - torch.tensor(event.logprobs, dtype=torch.float64)).abs().max())


def published(store: Path, version: int) -> Any:
    """A version out of a policy's store, over the tiny model; 0 is the base."""
    base = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    return (PeftModel.from_pretrained(base, str(store / str(version))) if version else base).eval()


def worst_by_version(store: Path, events: list[CompletionEvent], last: int) -> dict[int, float]:
    """For each version the worst difference among its `last` events."""
    of_version = {v: [event for event in events if event.version == v][-last:] for v in {e.version for e in events}}
    models = ((version, published(store, version), chosen) for version, chosen in of_version.items())
    return {version: max(worst_difference(model, event) for event in chosen) for version, model, chosen in models}
