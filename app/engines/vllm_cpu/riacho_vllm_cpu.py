"""A plugin for vLLM's CPU build, loaded by vLLM itself in each of its processes; nothing of Riacho imports it."""

import copy
from typing import Any


def register() -> None:
    """Called by vLLM, maybe more than once."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _keep_adapters_off_the_base()
        _compute_experts_without_triton()


def _keep_adapters_off_the_base() -> None:
    """Let tokens without an adapter add nothing: what LoRA A gives them is set to zero before LoRA B.

    vLLM marks them with the index -1. Its CPU kernels take that as Python does, for the last adapter of the batch, and
    answer for the base with an adapter's weights as soon as all places are taken.
    """
    from vllm.lora.ops import torch_ops
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink

    def bgmv_shrink(inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        shrink(inputs, weights, output, indices, scaling)
        output[indices < 0] = 0

    for module in (lora_ops, torch_ops, punica_cpu):
        module.bgmv_shrink = bgmv_shrink


def _compute_experts_without_triton() -> None:
    """Let vLLM choose its own CPU kernels for experts, as it does without LoRA.

    With LoRA on it computes them in Triton, which has no CPU, and the first token ends the engine. `riacho vllm` keeps
    LoRA off the experts, so that they can be computed plainly.
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import select_unquantized_moe_backend

    def select(moe_config: Any) -> Any:
        plain = copy.copy(moe_config)
        plain.is_lora_enabled = False
        return select_unquantized_moe_backend(plain)

    method.select_unquantized_moe_backend = select
