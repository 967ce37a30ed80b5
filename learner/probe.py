"""What a version's probe says: next-token distributions after fixed tokens, under the adapter and under the base."""

import torch
from torch import Tensor

from app.probe import Context, Probe
from learner.models import Policy

LENGTHS = (8, 32, 96, 160)  # across the blocks of an engine's prefix cache
LIKELY = 10  # engines list the 20 likeliest tokens, so these are among them
_STRIDE = 7919  # a prime: ids from all over the vocabulary


def fixed_ids(vocabulary: int, count: int) -> Tensor:
    """`count` token ids that are the same for every model of this vocabulary, [count]."""
    return (torch.arange(1, count + 1) * _STRIDE) % vocabulary


@torch.no_grad()
def measure(policy: Policy) -> Probe:
    """Look at the likeliest next tokens at temperature 1; the same weights give the same probe."""
    lengths = [length for length in LENGTHS if length < policy.max_context]
    ids = fixed_ids(policy.vocabulary, lengths[-1] + 1)
    positions = torch.tensor(lengths)
    adapted = policy.logits(ids, positions).float().log_softmax(-1)
    base = policy.base_logits(ids, positions).float().log_softmax(-1)
    return Probe([_context(ids[:length], a, b) for length, a, b in zip(lengths, adapted, base, strict=True)])


def _context(prompt: Tensor, adapted: Tensor, base: Tensor) -> Context:
    """The tokens that are among the likeliest under both, the base's likeliest first; [V] each."""
    likely = set(adapted.topk(LIKELY).indices.tolist())
    tokens = [token for token in base.topk(LIKELY).indices.tolist() if token in likely]
    return Context(prompt.tolist(), tokens, adapted[tokens].tolist(), base[tokens].tolist())
