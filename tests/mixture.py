"""A tiny mixture of experts with the shipped model's tokenizer and chat template, and adapters on it."""

import shutil
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from app.settings import TINY_MODEL
from tests.publishing import save_adapter

ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]


def write_mixture(directory: Path) -> Path:
    """2 layers, 8 experts of which 2 compute a token, hidden size 64; weights so large that experts clearly differ."""
    tiny = AutoConfig.from_pretrained(TINY_MODEL)
    config = Qwen3MoeConfig(
        vocab_size=tiny.vocab_size,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=tiny.max_position_embeddings,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tiny.eos_token_id,
        pad_token_id=tiny.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_MODEL / name, directory)
    return directory


def write_adapter(directory: Path, base: Path, **options: Any) -> Path:
    """An adapter of random weights, B included, as a learner publishes it."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=1, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    save_adapter(get_peft_model(model, config).eval(), directory)
    return directory


# Adapters that reach further than attention, and a tensor of each that says so.
FURTHER: dict[str, tuple[dict[str, Any], str]] = {
    "all-linear": ({"target_modules": "all-linear"}, "mlp.experts"),
    "experts": ({"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}, "mlp.experts"),
    "experts by their old names": ({"target_modules": ["gate_proj", "up_proj", "down_proj"]}, "mlp.experts"),
    "router": ({"target_modules": ["q_proj", "gate"]}, "mlp.gate"),
    "lm_head": ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    "embed_tokens": ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
}
