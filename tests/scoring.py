"""What an engine recorded, computed again by transformers."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from app.events.schema import CompletionEvent
from tests.service import MODEL


def differences(model: Any, event: CompletionEvent) -> list[float]:
    """The distance of each recorded logprob from what `model` gives at the event's temperature, in nats."""
    ids = torch.tensor([[*event.prompt_ids, *event.completion_ids]])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, len(event.prompt_ids) - 1 : -1].double()
    table = torch.log_softmax(logits / event.sampling.temperature, -1)
    computed = table.gather(1, torch.tensor(event.completion_ids)[:, None])[:, 0]
    return (computed - torch.tensor(event.logprobs, dtype=torch.float64)).abs().tolist()


def worst_difference(model: Any, event: CompletionEvent) -> float:
    """The largest of them."""
    return max(differences(model, event))


def published(store: Path, version: int) -> Any:
    """A version out of a policy's store, over the model under test; 0 is the base."""
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return (PeftModel.from_pretrained(base, str(store / str(version))) if version else base).eval()


def differences_by_version(store: Path, events: list[CompletionEvent], last: int) -> dict[int, list[float]]:
    """For each version the differences of its `last` events."""
    of_version = {v: [event for event in events if event.version == v][-last:] for v in {e.version for e in events}}
    models = ((version, published(store, version), chosen) for version, chosen in of_version.items())
    return {version: [d for event in chosen for d in differences(model, event)] for version, model, chosen in models}
