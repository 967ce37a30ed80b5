"""Simulated users: what they ask, how they judge an answer, and the calls they make."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from random import Random

import httpx
import openai

from learner.study.measure import Rollout
from learner.tiny.corpus import writing_prompt
from learner.tiny.scorers import style_score
from learner.tiny.styles import STYLE_NAMES

MODEL = "riacho"
TEMPERATURE = 1.0
MAX_TOKENS = 72
SEEDS = 2**31
TIMEOUT_S = 60.0
# One at a time keeps answers close to the newest version: the local engine has one thread for the model.
USERS = 1

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
    """The clients of one service, over one connection pool each for answers and for feedback."""

    def __init__(self, url: str, key: str, clock: Clock) -> None:
        self._clock = clock
        # No retries: a request that fails is a finding.
        self._chat = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT_S)
        self._feedback = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT_S)

    def close(self) -> None:
        self._chat.close()
        self._feedback.close()

    def ask(self, request: Request) -> Answer:
        """Send one request and wait for its answer."""
        started = self._clock()
        response = self._chat.chat.completions.with_raw_response.create(
            model=MODEL,
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
        self._feedback.post("/v1/feedback", json=body).raise_for_status()
        return self._clock()

    def converse(self, request: Request, style: str) -> Rollout:
        """Ask, judge by the preferred style, and tell the service."""
        answer = self.ask(request)
        judged = scores(answer)
        accepted = self.reward(answer.completion_id, judged[style])
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
        """All conversations of one preference, in the order of their requests."""
        with ThreadPoolExecutor(USERS) as pool:
            yield from pool.map(lambda request: self.converse(request, style), wanted)
