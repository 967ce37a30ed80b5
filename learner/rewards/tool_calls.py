"""How well the tools were called, from the kinds of the calls; needs no stored content.

A turn with calls is worth the mean of its calls' values; the session's total is the mean over such turns, paid where
it was earned (each turn gets its value divided by the number of turns with calls). With the defaults that is the share
of valid calls, 0 to 1.

Only a valid call is worth more than the others by default: were `empty` (no arguments where the tool has some),
`repeated` (an earlier call again) or `none` (no call at all) punished less than a wrong call, doing nothing would be
the safest thing to learn. Raise `empty` or `repeated` only where the tools make such calls useful: all arguments
optional, or a state to poll.
"""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from learner.rewards.options import Options
from learner.rewards.reading import spread
from learner.rewards.view import CannotScore, RewardFunction, Scores, SessionView

NONE = "none"


class ToolCallOptions(Options):
    """The value of a call of each kind.

    All must lie in the policy's range of rewards, 0 to 1 unless the settings say otherwise.

    `none` is the value of a session that was offered tools and called none; a turn without calls in a session with
    calls, such as an agent's final answer, does not count.
    """

    valid: float = 1.0
    repeated: float = 0.0
    empty: float = 0.0
    invalid_arguments: float = 0.0
    unknown_tool: float = 0.0
    malformed: float = 0.0
    none: float = 0.0


def factory(options: Mapping[str, Any]) -> RewardFunction:
    """Scores every session; one that was never offered a tool has no reward of this signal."""
    values = ToolCallOptions.model_validate(options).model_dump()

    def score(session: SessionView) -> Scores:
        unknown = {kind for turn in session.turns for kind in turn.tool_call_kinds} - values.keys()
        if unknown:
            raise CannotScore(f"unknown kinds of tool calls: {', '.join(sorted(unknown))}")
        calls = {
            turn.completion_id: fmean(values[kind] for kind in turn.tool_call_kinds)
            for turn in session.turns
            if turn.tool_call_kinds and NONE not in turn.tool_call_kinds
        }
        if calls:
            return spread(calls)
        offered = any(turn.tool_call_kinds for turn in session.turns)
        return Scores(session=values[NONE] if offered else None)

    return score
