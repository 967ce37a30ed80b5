"""The tokenizer of the tiny model: a byte-level BPE of 3072 tokens trained on the corpus."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from learner.tiny.messages import Dialogue, Message, Tool

VOCABULARY_SIZE = 3072
CONTEXT_LENGTH = 1024
END_OF_TEXT = "<|endoftext|>"
MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, MESSAGE_START, MESSAGE_END)
# Tags are ordinary tokens: a client must see them in decoded text to parse a tool call.
TAG_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")

# Contractions, words with the character before them, numbers of at most three digits, punctuation, space.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Often enough for BPE to give every number below 1000 a token of its own: copying a number is then one step.
NUMBER_REPEATS = 60
_MARKUP = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS + TAG_TOKENS))


def _untrained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _with_chat_template(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=MESSAGE_END,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def render(
    tokenizer: PreTrainedTokenizerFast, messages: list[Message], tools: Sequence[Tool] = (), *, to_answer: bool
) -> str:
    """The conversation as the model reads it; with `to_answer` it ends where the model's answer begins."""
    offered: list[Any] = list(tools)
    text = tokenizer.apply_chat_template(
        messages, tools=offered or None, tokenize=False, add_generation_prompt=to_answer
    )
    return str(text)


def _training_texts(dialogues: Iterable[Dialogue]) -> Iterator[str]:
    """Rendered dialogues without their markup, whose tokens are added rather than learnt."""
    renderer = _with_chat_template(_untrained())
    for dialogue in dialogues:
        yield from _MARKUP.split(render(renderer, dialogue.messages, dialogue.tools, to_answer=False))


def train_tokenizer(dialogues: Iterable[Dialogue]) -> PreTrainedTokenizerFast:
    """A tokenizer of `VOCABULARY_SIZE` tokens, its chat template included.

    Raises ValueError when the dialogues are too few to fill the vocabulary.
    """
    tokenizer = _untrained()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(SPECIAL_TOKENS) - len(TAG_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    numbers = (str(number) for number in range(10, 1000) for _ in range(NUMBER_REPEATS))
    tokenizer.train_from_iterator(chain(_training_texts(dialogues), numbers), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAG_TOKENS])
    size = tokenizer.get_vocab_size()
    if size != VOCABULARY_SIZE:
        raise ValueError(f"The corpus fills {size} of {VOCABULARY_SIZE} tokens: train on more dialogues.")
    return _with_chat_template(tokenizer)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the tokenizer files, with a class name that older versions of transformers know too."""
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("backend", None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
