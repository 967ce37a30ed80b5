"""The start-up self-check: the trainer scores tokens as an engine that decodes one by one samples them."""

import torch

from app.errors import SetupError
from learner.models import Policy
from learner.probe import fixed_ids

TOKENS = 24
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}


@torch.no_grad()
def check_logprobs(policy: Policy) -> float:
    """Mean |delta logprob| of a fixed sequence, scored at once and token by token with a cache.

    Raises SetupError above the tolerance of the dtype: dropout left on, or a model whose cached decoding
    differs from its forward pass, would push ratios out of the band before anything is learned.
    """
    ids = fixed_ids(policy.vocabulary, TOKENS)
    positions = torch.arange(1, TOKENS)
    at_once = policy.logits(ids, positions).float().log_softmax(-1)
    cache, steps = None, []
    for token in ids[:-1]:
        output = policy.causal_lm(input_ids=token[None, None], cache=cache, use_cache=True)
        cache = output.cache
        steps.append(output.logits[0, -1].float().log_softmax(-1))
    taken = ids[1:, None]
    gap = float((at_once.gather(1, taken) - torch.stack(steps).gather(1, taken)).abs().mean())
    limit = TOLERANCE[policy.causal_lm.dtype]
    if not gap < limit:
        raise SetupError(
            f"self-check: mean |delta logprob| is {gap:.2g}, above {limit:g}: the model scores a sequence otherwise "
            "than it decodes it, so importance ratios would be wrong from the start; check for dropout, an attention "
            "implementation or a quantisation that makes the passes differ",
            param="model",
        )
    return gap
