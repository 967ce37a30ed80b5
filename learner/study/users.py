"""Simulated users: what they ask, how they judge an answer, and the calls they make."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

from learner.study.client import Client, parse_version
from learner.study.measure import Rollout
from learner.tiny.corpus import writing_prompt
from learner.tiny.scorers import style_score
from learner.tiny.styles import STYLE_NAMES

TEMPERATURE = 1.0
MAX_TOKENS = 72
SEEDS = 2**31


@dataclass(frozen=True, slots=True)
class Request:
    """One writing request; the session makes its rollout recognisable in the learner's update reports."""

    session: str
    prompt: str
    seed: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back; `started` and `ended` are of the run's clock, `version` 0 is the base."""

    completion_id: str
    version: int
    text: str
    finished: bool
    started: float
    ended: float


def requests(rng: Random, name: str, max_tokens: int = MAX_TOKENS) -> Iterator[Request]:
    """Writing requests without end, in sessions `name-1`, `name-2`, …; the same generator gives the same requests."""
    for number in count(1):
        yield Request(f"{name}-{number}", writing_prompt(rng), rng.randrange(SEEDS), max_tokens)


def scores(answer: Answer) -> dict[str, float]:
    """How well the answer is written in each style."""
    return {style: style_score(answer.text, style, answer.finished) for style in STYLE_NAMES}


class Users:
    """Users of one service who like a style and judge by it."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def ask(self, request: Request) -> Answer:
        """Send one request and wait for its answer."""
        started = self._client.clock()
        response = self._client.openai.chat.completions.with_raw_response.create(
            model=self._client.policy,
            messages=[{"role": "user", "content": request.prompt}],
            temperature=TEMPERATURE,
            max_tokens=request.max_tokens,
            seed=request.seed,
            extra_headers={"X-Riacho-Session": request.session},
        )
        completion = response.parse()
        choice = completion.choices[0]
        return Answer(
            completion_id=completion.id,
            version=parse_version(response.headers["X-Riacho-Version"]),
            text=choice.message.content or "",
            finished=choice.finish_reason == "stop",
            started=started,
            ended=self._client.clock(),
        )

    def converse(self, request: Request, style: str) -> Rollout:
        """Ask when the service has kept up, judge by the preferred style, and tell the service."""
        self._client.pace.wait()
        answer = self.ask(request)
        judged = scores(answer)
        accepted = self._client.reward(answer.completion_id, judged[style])
        self._client.pace.judged(answer.completion_id)
        return Rollout(
            session=request.session,
            style=style,
            version=answer.version,
            started=answer.started,
            accepted=accepted,
            scores=judged,
            text=answer.text,
        )

    def phase(self, wanted: Iterable[Request], style: str) -> Iterator[Rollout]:
        """All conversations of one preference, one after the other."""
        for request in wanted:
            yield self.converse(request, style)
