"""What an engine recorded, computed again by transformers."""

from typing import Any

import torch

from app.events.schema import CompletionEvent


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
