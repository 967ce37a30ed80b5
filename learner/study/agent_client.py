"""The agent's client: the tool loop over `openai` against the running service, and a reward for each right answer."""

from collections.abc import Sequence
from random import Random

from learner.study.agent_loop import Episode, Reply, converse
from learner.study.agent_task import MAX_TOKENS, TEMPERATURE, TOOLS, Call, Task
from learner.study.client import Client, parse_version
from learner.tiny.messages import Message


class AgentClient:
    """Works through tasks, one session each, no faster than the service learns."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def work(self, task: Task) -> Episode:
        """One session, and its reward on the turn that ended it."""
        self._client.pace.wait()
        seeds = Random(task.seed)
        episode = converse(task, lambda messages: self._ask(task.session, messages, seeds.getrandbits(31)))
        self._client.reward(episode.completion_id, episode.reward)
        self._client.pace.judged(episode.completion_id)
        return episode

    def _ask(self, session: str, messages: Sequence[Message], seed: int) -> Reply:
        response = self._client.openai.chat.completions.with_raw_response.create(
            model=self._client.policy,
            messages=list(messages),  # type: ignore[arg-type]  # plain dicts, as most loops send them
            tools=TOOLS,  # type: ignore[arg-type]
            temperature=TEMPERATURE,
            max_tokens=MAX_TOKENS,
            seed=seed,
            extra_headers={"X-Riacho-Session": session},
        )
        completion = response.parse()
        message = completion.choices[0].message
        return Reply(
            completion_id=completion.id,
            version=parse_version(response.headers["X-Riacho-Version"]),
            message=message.model_dump(exclude_none=True),
            calls=tuple(
                Call(call.id, call.function.name, call.function.arguments)
                for call in message.tool_calls or ()
                if call.type == "function"
            ),
        )
