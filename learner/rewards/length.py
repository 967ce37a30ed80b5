"""How far the length of answers is from a wanted range, in completion tokens: 0 to 1.

With n tokens, d = max(min_tokens - n, 0, n - max_tokens) is the distance from the range. The score is 1 where d = 0,
and otherwise max(0, 1 - d / falloff_tokens): straight down to 0 at falloff_tokens outside; with falloff_tokens = 0 it
is a step. Against length drift give this signal a small weight beside the task's reward.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from learner.rewards.options import Options
from learner.rewards.reading import last_turn, spread
from learner.rewards.view import RewardFunction, Scores, SessionView


class LengthOptions(Options):
    """`per` = `session` scores all tokens together on the session, `turn` each turn; then the total is their mean."""

    min_tokens: int = Field(0, ge=0)
    max_tokens: int = Field(ge=1)
    falloff_tokens: int = Field(0, ge=0, description="distance at which the score is 0")
    per: Literal["session", "turn"] = "session"

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens = {self.min_tokens} is above max_tokens = {self.max_tokens}; swap them")
        return self


def factory(options: Mapping[str, Any]) -> RewardFunction:
    """Needs no stored content; raises CannotScore for a session without turns only."""
    given = LengthOptions.model_validate(options)

    def value(tokens: int) -> float:
        distance = max(given.min_tokens - tokens, 0, tokens - given.max_tokens)
        if distance < given.falloff_tokens:
            return 1.0 - distance / given.falloff_tokens
        return float(distance == 0)

    def score(session: SessionView) -> Scores:
        last_turn(session)
        if given.per == "session":
            return Scores(session=value(sum(turn.completion_tokens for turn in session.turns)))
        return spread({turn.completion_id: value(turn.completion_tokens) for turn in session.turns})

    return score
