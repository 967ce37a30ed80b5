"""Training batches: an endless stream of dialogues as token ids, each token with its weight in the loss."""

from collections.abc import Iterator
from itertools import islice, pairwise
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from learner.tiny.messages import Dialogue
from learner.tiny.tokenizer import MESSAGE_END, MESSAGE_START, render

ANSWER_WEIGHT = 1.0
# A little weight on the user's words teaches the vocabulary at no cost; system text is constant, so none there.
PROMPT_WEIGHT = 0.1
# Copying and tool use are hard and say little: among the many tokens of their prompts their answers would drown.
KIND_WEIGHTS = {"repeat": 2.0, "short_calculator": 2.0, "calculator": 4.0, "search": 4.0}
# Dialogues sorted by length together: batches with little padding, yet far from sorted over the whole run.
SORTED_TOGETHER = 2000


class Example(NamedTuple):
    """One dialogue: `ids[t]` counts `weights[t]` in the loss."""

    ids: list[int]
    weights: list[float]


class Batch(NamedTuple):
    """Dialogues padded on the right; both tensors are [dialogues, tokens], and padding has weight 0."""

    ids: Tensor
    weights: Tensor


class Weigher:
    """Assigns loss weights by the role of the message that a token belongs to."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        (self._start,) = tokenizer.encode(MESSAGE_START)
        (self._end,) = tokenizer.encode(MESSAGE_END)
        self._system = tokenizer.encode(f"{MESSAGE_START}system\n")
        self._assistant = tokenizer.encode(f"{MESSAGE_START}assistant\n")

    def weights(self, ids: list[int]) -> list[float]:
        """The weight of each token of a rendered dialogue.

        An answer counts from after its header up to its end token: exactly what the model generates.
        """
        weights = [PROMPT_WEIGHT] * len(ids)
        starts = [index for index, token in enumerate(ids) if token == self._start]
        for start, following in pairwise([*starts, len(ids)]):
            stop = ids.index(self._end, start, following) + 1
            header = start + len(self._assistant)
            if ids[start : start + len(self._system)] == self._system:
                weights[start:stop] = [0.0] * (stop - start)
            elif ids[start:header] == self._assistant:
                weights[start:header] = [0.0] * (header - start)
                weights[header:stop] = [ANSWER_WEIGHT] * (stop - header)
        return weights


def examples(tokenizer: PreTrainedTokenizerFast, dialogues: Iterator[Dialogue]) -> Iterator[list[Example]]:
    """Chunks of `SORTED_TOGETHER` encoded dialogues."""
    weigher = Weigher(tokenizer)
    while chunk := list(islice(dialogues, SORTED_TOGETHER)):
        texts = [render(tokenizer, dialogue.messages, dialogue.tools, to_answer=False) for dialogue in chunk]
        yield [
            Example(ids, [weight * KIND_WEIGHTS.get(dialogue.kind, 1.0) for weight in weigher.weights(ids)])
            for dialogue, ids in zip(chunk, tokenizer(texts)["input_ids"], strict=True)
        ]


def _cut(chunk: list[Example], tokens: int) -> list[list[Example]]:
    """The chunk, sorted by length, in groups that hold at most `tokens` tokens with their padding."""
    groups: list[list[Example]] = [[]]
    for example in sorted(chunk, key=lambda example: len(example.ids)):
        if len(example.ids) * (len(groups[-1]) + 1) > tokens and groups[-1]:
            groups.append([])
        groups[-1].append(example)
    return groups


def collate(group: list[Example], padding: int) -> Batch:
    """The examples as one batch, padded to the longest."""
    shape = (len(group), max(len(example.ids) for example in group))
    ids, weights = torch.full(shape, padding), torch.zeros(shape)
    for row, example in enumerate(group):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        weights[row, : len(example.ids)] = torch.tensor(example.weights)
    return Batch(ids, weights)


def batches(
    tokenizer: PreTrainedTokenizerFast, dialogues: Iterator[Dialogue], tokens: int, rng: Random
) -> Iterator[Batch]:
    """Batches of at most `tokens` tokens each; lengths come in random order."""
    for chunk in examples(tokenizer, dialogues):
        groups = _cut(chunk, tokens)
        rng.shuffle(groups)
        for group in groups:
            yield collate(group, tokenizer.pad_token_id)
