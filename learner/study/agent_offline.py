"""The agents' task without a service: the policy samples and learns in this process, always on-policy."""

import json
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random

import torch
from transformers import PreTrainedTokenizerFast

from app.settings import TINY_MODEL
from learner.models import Policy
from learner.rollouts import Rollout, Turn
from learner.study.agent_loop import Episode, Reply, converse
from learner.study.agent_task import TOOLS, Call, Task, tasks
from learner.study.measure import mean
from learner.tiny.evaluate import TOOL_CALL
from learner.tiny.messages import Message, assistant
from learner.tiny.tokenizer import render
from learner.trainer import Trainer

MAX_TOKENS = 96


class Sampler:
    """Answers one conversation from the policy as it is now, and keeps the turns for training."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self._policy = policy
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY_MODEL)
        self._generator = torch.Generator().manual_seed(seed)
        self.turns: list[Turn] = []

    def ask(self, messages: Sequence[Message]) -> Reply:
        text = render(self._tokenizer, messages, TOOLS, to_answer=True)
        prompt = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        ids, logprobs = self._sample(prompt)
        name = f"c{len(self.turns)}"
        ended = ids[-1] == self._tokenizer.eos_token_id
        self.turns.append(
            Turn(name, 0, tuple(prompt), tuple(ids), tuple(logprobs), 1.0, True, "stop" if ended else "length")
        )
        return parsed(name, str(self._tokenizer.decode(ids, skip_special_tokens=True)))

    @torch.inference_mode()
    def _sample(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        self._policy.activate("policy")
        unread, cache = torch.tensor([prompt]), None
        ids: list[int] = []
        logprobs: list[float] = []
        while len(ids) < MAX_TOKENS and self._tokenizer.eos_token_id not in ids[-1:]:
            output = self._policy.causal_lm(input_ids=unread, cache=cache, use_cache=True, logits_to_keep=1)
            cache = output.cache
            distribution = output.logits[0, -1].log_softmax(-1)
            token = int(torch.multinomial(distribution.exp(), 1, generator=self._generator))
            ids.append(token)
            logprobs.append(float(distribution[token]))
            unread = torch.tensor([[token]])
        return ids, logprobs


def parsed(name: str, text: str) -> Reply:
    """An answer's one tool call in the API's shape; a malformed one stays text."""
    match = TOOL_CALL.search(text)
    try:
        call = json.loads(match[1]) if match else None
    except json.JSONDecodeError:
        call = None
    if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict) or "name" not in call:
        return Reply(name, 0, assistant(text), ())
    function = {"name": str(call["name"]), "arguments": json.dumps(call["arguments"])}
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": name, "type": "function", "function": function}]}
    return Reply(name, 0, message, (Call(name, function["name"], function["arguments"]),))
