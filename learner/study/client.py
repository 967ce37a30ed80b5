"""What every simulated client does: answers over `openai`, judgements over HTTP, no faster than the service learns."""

import time
from collections.abc import Callable

import httpx
import openai

from learner.study.pace import Pace
from learner.study.server import Service

TIMEOUT_S = 60.0
UNDECIDED = ("captured", "waiting", "scoring", "parked")

Clock = Callable[[], float]


def parse_version(name: str) -> int:
    """The number in `riacho@12`, and 0 for `riacho@base`. Raises ValueError for anything else."""
    _, at, version = name.rpartition("@")
    if not at:
        raise ValueError(f"X-Riacho-Version = {name!r}: expected policy@number or policy@base")
    return 0 if version == "base" else int(version)


class Client:
    """One connection pool for answers and one for all else.

    Attributes:
        openai: the public client, as anybody has it.
        pace: holds back whoever waits at it while the learner is behind.
    """

    def __init__(self, service: Service, clock: Clock) -> None:
        self.policy, self.clock = service.policy, clock
        # No retries: a request that fails is a finding.
        self.openai = openai.OpenAI(
            base_url=f"{service.url}/v1", api_key=service.client_key, max_retries=0, timeout=TIMEOUT_S
        )
        headers = {"Authorization": f"Bearer {service.client_key}"}
        self._http = httpx.Client(base_url=service.url, headers=headers, timeout=TIMEOUT_S)
        self.pace = Pace(self.learned, clock, time.sleep)

    def close(self) -> None:
        self.openai.close()
        self._http.close()

    def reward(self, completion_id: str, reward: float) -> float:
        """Post the judgement; the time at which the service accepted it."""
        body = {"completion_id": completion_id, "reward": reward}
        self._http.post("/v1/feedback", json=body).raise_for_status()
        return self.clock()

    def learned(self, completion_id: str) -> bool:
        """Whether the learner has trained on a completion or will never do so."""
        response = self._http.get(f"/v1/completions/{completion_id}")
        response.raise_for_status()
        return response.json()["state"] not in UNDECIDED

    def settle(self) -> None:
        """Wait until the learner is done with all that was judged."""
        self.pace.wait(unlearned=0)
