"""What a name inside a base model says of its place: a token mixer, an expert, or the router that chooses experts."""

from collections.abc import Iterable

_TOKEN_MIXERS = frozenset({"self_attn", "attn", "attention", "linear_attn", "conv", "short_conv", "mixer", "mamba"})
_EXPERTS = frozenset({"experts", "block_sparse_moe"})
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})


def is_mixture(names: Iterable[str]) -> bool:
    """Whether a model with these modules or tensors is a mixture of experts."""
    return any(_EXPERTS & _parts(name) for name in names)


def mixes_tokens(name: str) -> bool:
    """Whether this belongs to attention, or to what stands in its place."""
    return bool(_TOKEN_MIXERS & _parts(name))


def routes(name: str) -> bool:
    """Whether this belongs to a mixture's router."""
    return bool(_ROUTERS & _parts(name))


def _parts(name: str) -> set[str]:
    return set(name.split("."))
