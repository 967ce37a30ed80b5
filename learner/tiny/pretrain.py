"""Train the tiny model from nothing: `python -m learner.tiny.pretrain --out DIR [--seed N] [--steps N]`.

The command makes the corpus, the tokenizer and the model, and writes a Hugging Face directory. The seed and the
number of steps decide all of it, given the machine and the versions of torch and tokenizers.
"""

import argparse
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW, Muon, Optimizer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from learner.tiny.batches import Batch, batches
from learner.tiny.corpus import dialogues
from learner.tiny.tokenizer import CONTEXT_LENGTH, save_tokenizer, train_tokenizer

TOKENIZER_DIALOGUES = 20_000
MAX_GRADIENT_NORM = 1.0
LOG_EVERY = 50

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What decides the outcome of a training run.

    The learning rate is that of both optimisers: Muon's updates are scaled to the size of AdamW's.
    """

    seed: int = 0
    steps: int = 2400
    tokens_per_batch: int = 2048
    learning_rate: float = 5e-3
    final_learning_rate_share: float = 0.05
    warmup_steps: int = 40


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """An untrained model of 1.4 M parameters; its random weights come from torch's global generator."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=384,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_new_tokens=96,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def optimisers(model: Qwen3ForCausalLM, settings: Settings) -> list[Optimizer]:
    """Muon for the weight matrices inside the layers; AdamW for the embedding and the norms.

    Muon computes in bfloat16: a tenth of the step's time on a processor with bfloat16 instructions, but two thirds
    of it on one with AVX2 alone, where training takes three times as long.
    """
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    outer = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    rate = settings.learning_rate
    return [
        Muon(inner, lr=rate, momentum=0.95, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        AdamW(outer, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def learning_rate(step: int, settings: Settings) -> float:
    """The rate at a step in [0, steps): a short linear rise times a cosine fall."""
    rise = min(1.0, (step + 1) / settings.warmup_steps)
    fall = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
    floor = settings.final_learning_rate_share
    return settings.learning_rate * rise * (floor + (1 - floor) * fall)


def weighted_loss(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
    """The weighted sum of the cross-entropies of the next tokens, in nats: a scalar.

    No attention mask is needed: padding is on the right, where a causal model does not look.
    """
    hidden = model.model(input_ids=batch.ids).last_hidden_state[:, :-1]
    weights, targets = batch.weights[:, 1:], batch.ids[:, 1:]
    counted = weights > 0
    losses = functional.cross_entropy(model.lm_head(hidden[counted]), targets[counted], reduction="none")
    return (losses * weights[counted]).sum()


def train(model: Qwen3ForCausalLM, stream: Iterator[Batch], settings: Settings) -> None:
    """Train the model in place. No dialogue is seen twice, so the logged loss is one on unseen data.

    Each step divides the loss by the same number of tokens. Dividing by the batch's own weights would favour
    batches of short answers, and teach the model to call its tools less often than the corpus does.
    """
    model.train()
    both = optimisers(model, settings)
    losses: list[float] = []
    for step, batch in enumerate(islice(stream, settings.steps)):
        for group in (group for optimiser in both for group in optimiser.param_groups):
            group["lr"] = learning_rate(step, settings)
        loss = weighted_loss(model, batch)
        model.zero_grad(set_to_none=True)
        (loss / settings.tokens_per_batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        for optimiser in both:
            optimiser.step()
        losses.append(loss.item() / batch.weights.sum().item())
        if (step + 1) % LOG_EVERY == 0:
            mean = sum(losses[-LOG_EVERY:]) / LOG_EVERY
            logger.info("step %d loss %.3f cpu %.0f s", step + 1, mean, time.process_time())
    model.eval()


def pretrain(directory: Path, settings: Settings) -> None:
    """Make the tokenizer and the model, and write both to the directory, the weights in bfloat16."""
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    tokenizer = train_tokenizer(islice(dialogues(Random(f"{settings.seed}/tokenizer")), TOKENIZER_DIALOGUES))
    model = new_model(tokenizer)
    stream = batches(
        tokenizer,
        dialogues(Random(f"{settings.seed}/corpus")),
        settings.tokens_per_batch,
        Random(f"{settings.seed}/order"),
    )
    train(model, stream, settings)
    model.bfloat16().save_pretrained(directory)
    save_tokenizer(tokenizer, directory)


def main() -> None:
    """The training command."""
    parser = argparse.ArgumentParser(prog="python -m learner.tiny.pretrain", description="Train the tiny model.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--steps", type=int, default=Settings.steps, help="optimiser steps (default %(default)s)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    pretrain(arguments.out, Settings(seed=arguments.seed, steps=arguments.steps))


if __name__ == "__main__":
    main()
