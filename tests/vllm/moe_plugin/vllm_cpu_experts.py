"""A vLLM plugin for the tests: a mixture of experts with adapters on vLLM's CPU build.

With LoRA on, vLLM computes experts in Triton, which has no CPU: the first forward under an adapter ends the engine.
`riacho vllm` keeps LoRA off the experts, so that they can be computed as without it, by vLLM's own CPU kernels.
"""

import copy
from typing import Any


def register() -> None:
    """Called by vLLM in each of its processes, maybe more than once."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import select_unquantized_moe_backend
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    def select(moe_config: Any) -> Any:
        plain = copy.copy(moe_config)
        plain.is_lora_enabled = False
        return select_unquantized_moe_backend(plain)

    method.select_unquantized_moe_backend = select
