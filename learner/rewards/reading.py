"""What the built-in reward functions share: reading answers, and spreading a mean over turns."""

from collections.abc import Mapping

from learner.rewards.view import CannotScore, Scores, SessionView, TurnView


def last_turn(session: SessionView) -> TurnView:
    """Raises CannotScore for a session without turns."""
    if not session.turns:
        raise CannotScore("the session has no turns")
    return session.turns[-1]


def text_of(turn: TurnView) -> str:
    """The answer's text, empty where it only called tools; raises CannotScore where it is not kept."""
    if turn.output is None and not turn.tool_calls:
        raise CannotScore("the answer's text is not kept")
    return turn.output or ""


def spread(values: Mapping[str, float]) -> Scores:
    """Turn rewards that add up to the mean of `values`, so that a session is not worth more for being longer."""
    return Scores(turns={turn: value / len(values) for turn, value in values.items()})
