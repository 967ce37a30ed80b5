"""The agents' task without a service: a policy samples and learns in this process, on-policy at every step."""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerFast

from app.settings import TINY_MODEL
from learner.critic import make_policy_and_critic
from learner.models import POLICY, Policy, load_base
from learner.rollouts import Rollout, Turn
from learner.settings import TrainingSettings
from learner.study.agent_loop import Episode, Reply, Tool, converse
from learner.study.agent_task import MAX_TOKENS, TEMPERATURE, TOOLS, Call, Task
from learner.tiny.evaluate import TOOL_CALL
from learner.tiny.messages import Message, assistant
from learner.tiny.tokenizer import render
from learner.tiny.tool_dialogues import call
from learner.trainer import Trainer


class Sampler:
    """Answers from the policy as it is now, and keeps the turns for training."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self._policy = policy
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY_MODEL)
        self._generator = torch.Generator().manual_seed(seed)
        self._turns: list[Turn] = []

    def ask(self, messages: Sequence[Message]) -> Reply:
        text = render(self._tokenizer, list(messages), TOOLS, to_answer=True)
        prompt = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        ids, logprobs = self._sample(prompt)
        reason = "stop" if ids[-1] == self._tokenizer.eos_token_id else "length"
        name = f"turn-{len(self._turns)}"
        self._turns.append(Turn(name, 0, tuple(prompt), tuple(ids), tuple(logprobs), TEMPERATURE, True, reason))
        return parsed(name, str(self._tokenizer.decode(ids, skip_special_tokens=True)))

    def taken(self) -> list[Turn]:
        """The turns since this was last asked, oldest first."""
        turns, self._turns = self._turns, []
        return turns

    @torch.inference_mode()
    def _sample(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        """Token ids up to the end token or the limit, and the logprobs that they were sampled with."""
        self._policy.activate(POLICY)
        ids: list[int] = []
        logprobs: list[float] = []
        unread, cache = prompt, None
        while len(ids) < MAX_TOKENS and self._tokenizer.eos_token_id not in ids[-1:]:
            output = self._policy.causal_lm(
                input_ids=torch.tensor([unread]), cache=cache, use_cache=True, logits_to_keep=1
            )
            cache = output.cache
            distribution = (output.logits[0, -1] / TEMPERATURE).log_softmax(-1)
            token = int(torch.multinomial(distribution.exp(), 1, generator=self._generator))
            ids.append(token)
            logprobs.append(float(distribution[token]))
            unread = [token]
        return ids, logprobs


def parsed(name: str, text: str) -> Reply:
    """An answer with its one tool call in the API's shape; a malformed one stays text."""
    match = re.fullmatch(TOOL_CALL, text.strip())
    try:
        made = json.loads(match[1]) if match else None
    except json.JSONDecodeError:
        made = None
    if not isinstance(made, dict) or not isinstance(made.get("arguments"), dict) or "name" not in made:
        return Reply(name, 0, assistant(text), ())
    message = call(str(made["name"]), made["arguments"])
    [shaped] = message["tool_calls"]
    return Reply(name, 0, message, (Call(shaped["id"], shaped["function"]["name"], shaped["function"]["arguments"]),))


class Offline:
    """A policy of its own that learns task by task."""

    def __init__(self, seed: int, trainer: type[Trainer] = Trainer) -> None:
        settings = TrainingSettings(seed=seed, on_shift="none")  # as in the demo
        policy, critic = make_policy_and_critic(load_base(str(TINY_MODEL)), settings)
        self._trainer = trainer(policy, critic, settings, (0.0, 1.0), time.perf_counter)
        self._sampler = Sampler(policy, seed)

    def work(self, task: Task, tool: Tool) -> Episode:
        """One session and the update that learns from it."""
        episode = converse(task, self._sampler.ask, tool)
        *earlier, last = self._sampler.taken()
        turns = (*earlier, replace(last, reward=episode.reward))
        self._trainer.update([Rollout(task.session, turns, 0.0)])
        return episode
