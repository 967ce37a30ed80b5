"""What can be trained on exactly, and why not otherwise. Never guessed, never patched."""

from app.events.schema import Sampling


def reason_not_trainable(sampling: Sampling) -> str | None:
    """Why tokens sampled this way cannot be trained on, or None.

    The learner recomputes the distribution from the logits and the temperature alone, so whatever else shaped
    it makes the behaviour logprobs those of another distribution.
    """
    rules = {
        "temperature is 0": sampling.greedy,
        "top_p is below 1": sampling.top_p < 1,
        "top_k is set": sampling.top_k > 0,
        "min_p is set": sampling.min_p > 0,
        "a penalty is set": sampling.presence_penalty != 0 or sampling.frequency_penalty != 0,
        "logit_bias is set": sampling.logit_bias,
        "the output was constrained": sampling.structured,
    }
    return next((reason for reason, applies in rules.items() if applies), None)
