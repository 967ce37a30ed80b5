"""Whether an answer has given texts or matches given regular expressions: 1 or 0 on the session."""

from collections.abc import Mapping
from typing import Any, Literal, Self

import regex
from pydantic import Field, field_validator, model_validator

from learner.rewards.options import Options
from learner.rewards.reading import last_turn, text_of
from learner.rewards.view import CannotScore, RewardFunction, Scores, SessionView


class ContainsOptions(Options):
    """`literals` and `patterns` are searched for anywhere in an answer.

    `need` says whether an answer must have all of them or any. `answers` says whether the last answer must have them,
    or any one answer of the session. `ignore_case` goes by Unicode's simple case folding.
    """

    literals: tuple[str, ...] = ()
    patterns: tuple[str, ...] = Field((), description="regular expressions of the `regex` package, `^` at the start")
    need: Literal["all", "any"] = "all"
    answers: Literal["last", "any"] = "last"
    ignore_case: bool = False
    timeout_s: float = Field(1.0, gt=0, description="one search; a pattern can take for ever on an unlucky text")

    @field_validator("patterns")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                regex.compile(pattern)
            except regex.error as error:
                raise ValueError(f"is no regular expression: {error}") from error
        return patterns

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not any(self.literals + self.patterns):
            raise ValueError("literals and patterns are empty: give at least one text to look for")
        return self


def factory(options: Mapping[str, Any]) -> RewardFunction:
    """Raises CannotScore where an answer's text is not kept or a search takes longer than `timeout_s`."""
    given = ContainsOptions.model_validate(options)
    flags = regex.IGNORECASE if given.ignore_case else 0
    wanted = [regex.compile(text, flags) for text in (*map(regex.escape, given.literals), *given.patterns)]
    enough = all if given.need == "all" else any

    def found(pattern: regex.Pattern, text: str) -> bool:
        try:  # concurrent: other threads of the process go on meanwhile
            return pattern.search(text, timeout=given.timeout_s, concurrent=True) is not None
        except TimeoutError as error:
            raise CannotScore(f"the pattern {pattern.pattern!r} took longer than {given.timeout_s:g} s") from error

    def score(session: SessionView) -> Scores:
        turns = [last_turn(session)] if given.answers == "last" else session.turns
        texts = [text_of(turn) for turn in turns]
        return Scores(session=float(any(enough(found(pattern, text) for pattern in wanted) for text in texts)))

    return score
