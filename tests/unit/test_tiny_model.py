"""The shipped tiny model: its files, its tokenizer, its chat template, and how it was trained."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from learner.tiny.batches import Example, Weigher, batches, collate  # noqa: E402
from learner.tiny.corpus import dialogues  # noqa: E402
from learner.tiny.evaluate import called_expression  # noqa: E402
from learner.tiny.pretrain import Settings, learning_rate, new_model, weighted_loss  # noqa: E402
from learner.tiny.tokenizer import CHAT_TEMPLATE, render  # noqa: E402

SHIPPED = Path(__file__).parents[2] / "app" / "models" / "tiny-qwen3"
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
CALL = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "calculator", "arguments": '{"expression": "2 + 3"}'},
}
TOOL_CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 plus 3?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_0", "content": "5"},
    {"role": "assistant", "content": "It is 5."},
]
TOOL_TEXT = """<|im_start|>system
Be brief.

# Tools
<tools>
{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
</tools>
To use a tool, reply with <tool_call>
{"name": ..., "arguments": ...}
</tool_call><|im_end|>
<|im_start|>user
What is 2 plus 3?<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "calculator", "arguments": {"expression": "2 + 3"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
5
</tool_response><|im_end|>
<|im_start|>assistant
It is 5.<|im_end|>
"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(SHIPPED)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()


@pytest.fixture
def text_of(tokenizer: Any) -> Callable[..., str]:
    """Renders messages and tools with the shipped chat template."""

    def render_text(messages: list[dict[str, Any]], *tools: dict[str, Any], to_answer: bool = False) -> str:
        return render(tokenizer, messages, tools, to_answer=to_answer)

    return render_text


def test_the_shipped_directory_is_small() -> None:
    """It belongs in a repository: 8 MB at most."""
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= 8_000_000


def test_the_shipped_tokenizer_class_is_known_to_older_transformers() -> None:
    """The name is the one that every version reads."""
    config = json.loads((SHIPPED / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_the_shipped_weights_fit_the_architecture_of_the_training_command(model: Any, tokenizer: Any) -> None:
    """A fresh model has the same parameters and shapes."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in new_model(tokenizer).state_dict().items()} == shapes


def test_the_shipped_model_ends_its_answer(model: Any, tokenizer: Any, text_of: Callable[..., str]) -> None:
    """A greedy answer to a greeting stops by itself."""
    prompt = tokenizer(text_of([{"role": "user", "content": "Hello!"}], to_answer=True), return_tensors="pt")
    output = model.generate(input_ids=prompt["input_ids"], do_sample=False, max_new_tokens=40, top_k=None, top_p=None)
    assert output[0, -1] == tokenizer.eos_token_id


@pytest.mark.parametrize("text", ["Hehe~ the fluffy cat, uwu!", "O'er hill\n and  dale", "São Paulo 12345 🙂", ""])
def test_the_tokenizer_gives_text_back_unchanged(tokenizer: Any, text: str) -> None:
    """Byte-level tokens lose nothing, also outside the corpus."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_number_below_1000_is_one_token(tokenizer: Any) -> None:
    """Copying a number is then one step of the model."""
    assert all(len(tokenizer.encode(str(number))) == 1 for number in range(1000))


def test_the_shipped_chat_template_is_the_one_in_the_source(tokenizer: Any) -> None:
    """The model is served with the template on which it is trained."""
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_tools_calls_and_results_are_rendered_in_hermes_tags(text_of: Callable[..., str]) -> None:
    """The whole conversation, written out by hand."""
    assert text_of(TOOL_CONVERSATION, TOOL) == TOOL_TEXT


def test_a_rendered_conversation_survives_the_tokenizer(tokenizer: Any) -> None:
    """Markup and tags come back from token ids as they were."""
    assert tokenizer.decode(tokenizer.encode(TOOL_TEXT)) == TOOL_TEXT


def test_arguments_may_be_an_object(text_of: Callable[..., str]) -> None:
    """Clients that parsed the arguments get the same text."""
    parsed = {"function": {"name": "calculator", "arguments": {"expression": "2 + 3"}}}
    messages = [*TOOL_CONVERSATION[:2], {"role": "assistant", "tool_calls": [parsed]}, *TOOL_CONVERSATION[3:]]
    assert text_of(messages, TOOL) == TOOL_TEXT


def test_text_parts_are_joined(text_of: Callable[..., str]) -> None:
    """Content as a list of parts reads like the same content as a string."""
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]
    expected = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    assert text_of([{"role": "user", "content": parts}], to_answer=True) == expected


def test_results_of_several_calls_share_one_message(text_of: Callable[..., str]) -> None:
    """Consecutive tool messages become one user message."""
    results = [{"role": "tool", "content": "5"}, {"role": "tool", "content": "6"}]
    expected = (
        "<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response><|im_end|>\n"
    )
    assert text_of([{"role": "user", "content": "?"}, *results]).endswith(expected)


def test_a_rendered_call_is_read_back_from_an_answer() -> None:
    """The evaluation finds the expression in what the template writes."""
    assert called_expression(TOOL_TEXT.split("assistant\n")[1]) == "2 + 3"


@pytest.mark.parametrize("text", ["It is 5.", "<tool_call>\n{]}\n</tool_call>", '<tool_call>{"name": "x"}</tool_call>'])
def test_a_malformed_call_has_no_expression(text: str) -> None:
    """No call, no JSON and no arguments are all None."""
    assert called_expression(text) is None


def test_only_what_the_model_says_counts_fully_in_the_loss(tokenizer: Any, text_of: Callable[..., str]) -> None:
    """Weight 1 covers the answer and its end token; the prompt and the header have less."""
    text = text_of([{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hi! Nice to meet you."}])
    ids = tokenizer.encode(text)
    counted = [token for token, weight in zip(ids, Weigher(tokenizer).weights(ids), strict=True) if weight == 1.0]
    assert tokenizer.decode(counted) == "Hi! Nice to meet you.<|im_end|>"


def test_system_text_has_no_weight(tokenizer: Any) -> None:
    """The tool list is the same every time: there is nothing to learn from it."""
    ids = tokenizer.encode(TOOL_TEXT)
    weights = Weigher(tokenizer).weights(ids)
    assert not any(weights[: ids.index(tokenizer.eos_token_id) + 1])


def test_padding_does_not_change_the_loss(model: Any, tokenizer: Any) -> None:
    """A dialogue's loss is the same beside a longer one that has no weight."""
    ids = tokenizer.encode(TOOL_TEXT)
    alone = Example(ids[:40], [1.0] * 40)
    padded = collate([alone, Example(ids, [0.0] * len(ids))], tokenizer.pad_token_id)
    with torch.inference_mode():
        expected = weighted_loss(model, collate([alone], tokenizer.pad_token_id))
        assert weighted_loss(model, padded).item() == pytest.approx(expected.item(), rel=1e-4)


def test_a_batch_holds_no_more_tokens_than_asked_for(tokenizer: Any) -> None:
    """Padding is counted too."""
    stream = batches(tokenizer, dialogues(Random(0)), 1024, Random(0))
    assert all(next(stream).ids.numel() <= 1024 for _ in range(50))


def test_the_learning_rate_rises_and_falls() -> None:
    """It starts near zero, peaks after the warm-up, and ends near its floor."""
    settings = Settings(steps=1000)
    rates = [learning_rate(step, settings) for step in range(settings.steps)]
    assert rates[0] == pytest.approx(settings.learning_rate / settings.warmup_steps)
    assert rates.index(max(rates)) in range(settings.warmup_steps - 1, settings.warmup_steps + 1)
    assert rates[-1] == pytest.approx(settings.learning_rate * settings.final_learning_rate_share, rel=0.01)
