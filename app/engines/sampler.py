"""From logits to a sampled token, and the probability that it was really sampled with.

The order is vLLM's, so that both engines mean the same by the same request: logit bias, penalties, temperature,
min_p, top_k, top_p, and a final normalisation over what is left. Pure functions; the only state is the
generator that the caller owns.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.events.schema import Sampling


@dataclass(frozen=True, slots=True)
class Draw:
    """A sampled token, its logprob (nats), and the likeliest (token, logprob) pairs of the same distribution."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def seeded(seed: int | None) -> torch.Generator:
    """A generator that repeats itself for a given seed, and starts from the system's entropy without one."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def draw(logprobs: Tensor, generator: torch.Generator, *, greedy: bool = False, alternatives: int = 0) -> Draw:
    """Sample from `logprobs` [vocabulary]; with `greedy`, take the likeliest.

    Up to `alternatives` of the likeliest tokens come along, without those that cannot be drawn.
    """
    index = logprobs.argmax() if greedy else torch.multinomial(logprobs.exp(), 1, generator=generator)
    token = int(index)
    top: tuple[tuple[int, float], ...] = ()
    if alternatives:
        best = logprobs.topk(min(alternatives, logprobs.numel()))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        top = tuple((i, p) for i, p in pairs if p > -math.inf)
    return Draw(token, float(logprobs[token]), top)


def distribution(
    logits: Tensor, sampling: Sampling, generated: Sequence[int] = (), bias: Mapping[int, float] | None = None
) -> Tensor:
    """The log-distribution that the next token is drawn from.

    Args:
        logits: [vocabulary], any float dtype, any device.
        sampling: greedy sampling (temperature 0) gives the T = 1 distribution, without truncation.
        generated: the tokens of the answer so far, for the penalties (the prompt does not count).
        bias: token id → what is added to its logit.

    Returns:
        Logprobs [vocabulary] in float32 on the CPU; -inf where a token cannot be drawn.
    """
    logits = logits.to("cpu", torch.float32, copy=True)
    if bias:
        logits[list(bias)] += torch.tensor(list(bias.values()))
    if generated and (sampling.presence_penalty or sampling.frequency_penalty):
        seen, counts = torch.tensor(generated).unique(return_counts=True)
        logits[seen] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if not sampling.greedy:
        logits = _truncated(logits / sampling.temperature, sampling)
    return logits.log_softmax(-1)


def _truncated(logits: Tensor, sampling: Sampling) -> Tensor:
    """`logits` [vocabulary] with -inf for what min_p, top_k and top_p leave out; never all of them."""
    if sampling.min_p > 0:
        # The likeliest stays also at min_p = 1, where rounding could put the limit above it.
        limit = logits.max() + min(math.log(sampling.min_p), 0.0)
        logits = logits.masked_fill(logits < limit, -math.inf)
    if 0 < sampling.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -math.inf)
    if sampling.top_p < 1:
        ordered, order = logits.softmax(-1).sort(descending=True)
        out = ordered.cumsum(-1) - ordered >= sampling.top_p
        out[0] = False
        logits = logits.masked_fill(torch.zeros_like(out).scatter(0, order, out), -math.inf)
    return logits
