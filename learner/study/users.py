"""Simulated users: what they ask, how they judge an answer, and the calls they make."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

import httpx
import openai

from learner.study.measure import Rollout
from learner.study.pace import Pace
from learner.tiny.corpus import writing_prompt
from learner.tiny.scorers import style_score
from learner.tiny.styles import STYLE_NAMES

TEMPERATURE = 1.0
MAX_TOKENS = 72
SEEDS = 2**31
TIMEOUT_S = 60.0
UNDECIDED = ("captured", "waiting")

Clock = Callable[[], float]


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


def parse_version(name: str) -> int:
    """The number in `riacho@12`, and 0 for `riacho@base`. Raises ValueError for anything else."""
    _, at, version = name.rpartition("@")
    if not at:
        raise ValueError(f"X-Riacho-Version = {name!r}: expected policy@number or policy@base")
    return 0 if version == "base" else int(version)


def requests(rng: Random, name: str, max_tokens: int = MAX_TOKENS) -> Iterator[Request]:
    """Writing requests without end, in sessions `name-1`, `name-2`, …; the same generator gives the same requests."""
    for number in count(1):
        yield Request(f"{name}-{number}", writing_prompt(rng), rng.randrange(SEEDS), max_tokens)


def scores(answer: Answer) -> dict[str, float]:
    """How well the answer is written in each style."""
    return {style: style_score(answer.text, style, answer.finished) for style in STYLE_NAMES}


class Users:
    """The clients of one service, over one connection pool for answers and one for all else."""

    def __init__(self, url: str, policy: str, key: str, clock: Clock) -> None:
        self._policy, self._clock = policy, clock
        # No retries: a request that fails is a finding.
        self._chat = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT_S)
        self._http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT_S)
        self._pace = Pace(self.learned, clock, time.sleep)

    def close(self) -> None:
        self._chat.close()
        self._http.close()

    def ask(self, request: Request) -> Answer:
        """Send one request and wait for its answer."""
        started = self._clock()
        response = self._chat.chat.completions.with_raw_response.create(
            model=self._policy,
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
            ended=self._clock(),
        )

    def reward(self, completion_id: str, reward: float) -> float:
        """Post the judgement; the time at which the service accepted it."""
        body = {"completion_id": completion_id, "reward": reward}
        self._http.post("/v1/feedback", json=body).raise_for_status()
        return self._clock()

    def learned(self, completion_id: str) -> bool:
        """Whether the learner has trained on a completion or will never do so."""
        response = self._http.get(f"/v1/completions/{completion_id}")
        response.raise_for_status()
        return response.json()["state"] not in UNDECIDED

    def converse(self, request: Request, style: str) -> Rollout:
        """Ask when the service has kept up, judge by the preferred style, and tell the service."""
        self._pace.wait()
        answer = self.ask(request)
        judged = scores(answer)
        accepted = self.reward(answer.completion_id, judged[style])
        self._pace.judged(answer.completion_id)
        return Rollout(
            session=request.session,
            style=style,
            version=answer.version,
            started=answer.started,
            accepted=accepted,
            scores=judged,
            text=answer.text,
        )

    def settle(self) -> None:
        """Wait until the learner is done with all that was judged."""
        self._pace.wait(unlearned=0)

    def phase(self, wanted: Iterable[Request], style: str) -> Iterator[Rollout]:
        """All conversations of one preference, one after the other."""
        for request in wanted:
            yield self.converse(request, style)
