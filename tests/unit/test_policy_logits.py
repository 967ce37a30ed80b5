"""The policy's logits on models that do more than an output layer after their decoder."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, PreTrainedConfig

from learner.models import Policy, load_base
from learner.settings import TrainingSettings

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
IDS = torch.tensor([5, 17, 26, 33, 9, 41, 7])
POSITIONS = torch.tensor([2, 3, 6])


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(Gemma2Config(**SIZES, final_logit_softcapping=0.5), id="capped"),
        pytest.param(GraniteConfig(**SIZES, logits_scaling=7.0), id="divided"),
        pytest.param(CohereConfig(**SIZES, logit_scale=0.125), id="scaled"),
    ],
)
def test_logits_are_capped_and_scaled_as_the_model_does(config: PreTrainedConfig, tmp_path: Path) -> None:
    """Base and fresh policy (B = 0) give what the plain model gives."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    policy = Policy(load_base(str(tmp_path)), TrainingSettings())
    with torch.no_grad():
        expected = plain(input_ids=IDS[None]).logits[0, POSITIONS - 1]
        torch.testing.assert_close(policy.logits(IDS, POSITIONS), expected)
        torch.testing.assert_close(policy.base_logits(IDS, POSITIONS), expected)
