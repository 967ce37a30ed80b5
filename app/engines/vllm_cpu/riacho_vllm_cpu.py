"""A plugin for vLLM's CPU build, loaded by vLLM itself; nothing of Riacho imports it.

vLLM marks a token without an adapter with the index -1. Its CPU kernels take that as Python does, for the last adapter
of the batch, so that requests for the base are answered with an adapter's weights as soon as all places are taken.
"""

from typing import Any


def register() -> None:
    """Let tokens without an adapter add nothing: what LoRA A gives them is set to zero before LoRA B."""
    from vllm.lora.ops import torch_ops
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink

    def bgmv_shrink(inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        shrink(inputs, weights, output, indices, scaling)
        output[indices < 0] = 0

    for module in (lora_ops, torch_ops, punica_cpu):
        module.bgmv_shrink = bgmv_shrink
