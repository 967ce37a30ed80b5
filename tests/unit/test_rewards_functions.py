"""The built-in reward functions that need no server, against values worked out by hand."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.rewards import contains, json_schema, length, tool_calls
from learner.rewards.transcript import conversations
from learner.rewards.view import CannotScore, RewardFunction, Scores, SessionView
from tests.sessions import call, session, turn

KINDS = ("valid", "repeated", "empty", "invalid_arguments", "unknown_tool", "malformed")
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}

turns = st.builds(
    turn,
    st.integers(0, 9),
    st.none() | st.text() | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps),
    tool_calls=st.none() | st.just(()) | st.just((call("f"),)),
    kinds=st.just(()) | st.just(("none",)) | st.lists(st.sampled_from(KINDS), min_size=1).map(tuple),
    tokens=st.integers(0, 10**9),
)
sessions = st.lists(turns, max_size=5, unique_by=lambda turn: turn.completion_id).map(lambda made: session(*made))


def total(scores: Scores) -> float:
    return (scores.session or 0.0) + sum(scores.turns.values())


@given(
    sessions,
    st.sampled_from(
        [
            tool_calls.factory({}),
            json_schema.factory({"schema": POINT}),
            json_schema.factory({"schema": {"minimum": 3, "minLength": 2}, "answers": "every"}),
            contains.factory({"literals": ["0"], "patterns": [r"\w+$"], "need": "any", "answers": "any"}),
            length.factory({"min_tokens": 3, "max_tokens": 7, "falloff_tokens": 4}),
            length.factory({"max_tokens": 7, "per": "turn"}),
        ]
    ),
)
def test_any_session_scores_from_0_to_1_or_not_at_all(view: SessionView, score: RewardFunction) -> None:
    """With the defaults a session's total is in [0, 1] however long it is, and odd content raises CannotScore only."""
    try:
        scores = score(view)
    except CannotScore:
        return
    assert -1e-9 <= total(scores) <= 1 + 1e-9
    assert scores.turns.keys() <= {turn.completion_id for turn in view.turns}


# tool_calls


def test_turns_share_the_mean_of_their_calls() -> None:
    """Shares 1, 1/2 and 0 of three turns with calls are 1/3, 1/6 and 0; the final answer does not count."""
    view = session(
        turn(0, kinds=("valid",)),
        turn(1, kinds=("valid", "malformed")),
        turn(2, kinds=("unknown_tool",)),
        turn(3, kinds=("none",)),
    )
    scores = tool_calls.factory({})(view)
    assert scores.session is None
    assert scores.turns == pytest.approx({"c0": 1 / 3, "c1": 1 / 6, "c2": 0.0})


def test_more_valid_calls_are_not_worth_more() -> None:
    """Sessions of 1 and of 200 valid calls have the same total."""
    score = tool_calls.factory({})
    short, long = (session(*(turn(i, kinds=("valid",)) for i in range(n))) for n in (1, 200))
    assert total(score(short)) == 1
    assert total(score(long)) == pytest.approx(1)


def test_doing_nothing_is_never_the_safest_by_default() -> None:
    """No kind but `valid` is worth more than another, no call at all included."""
    score = tool_calls.factory({})
    worth = {kind: total(score(session(turn(kinds=(kind,))))) for kind in (*KINDS, "none")}
    assert worth == {**dict.fromkeys(KINDS, 0.0), "none": 0.0, "valid": 1.0}


@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_each_kind_has_its_value(kind: str) -> None:
    """As the options say."""
    values = {**{name: -float(i) for i, name in enumerate(KINDS)}, "none": 9.0}
    assert total(tool_calls.factory(values)(session(turn(kinds=(kind,))))) == values[kind]


def test_a_session_that_was_offered_no_tools_has_no_reward() -> None:
    """No reward is not a 0."""
    assert tool_calls.factory({"none": -1})(session(turn(), turn(1))) == Scores()


def test_a_kind_that_is_not_known_is_not_scored() -> None:
    """A newer app's record is no reason to guess."""
    with pytest.raises(CannotScore, match="brilliant"):
        tool_calls.factory({})(session(turn(kinds=("valid", "brilliant"))))


# json_schema


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ('{"x": 1}', 1.0),
        (' {"x": -3}\n', 1.0),
        ('{"x": 1e1}', 1.0),
        ('{"x": 1.5}', 0.0),
        ('{"x": "1"}', 0.0),
        ('{"x": true}', 0.0),
        ('{"x": 1, "y": 2}', 0.0),
        ("{}", 0.0),
        ("[1]", 0.0),
        ('{"x": 1', 0.0),
        ('```json\n{"x": 1}\n```', 0.0),
        ('{"x": NaN}', 0.0),
        ('{"x": Infinity}', 0.0),
        ('{"x": 1e999}', 0.0),
        ('{"x": ' + "9" * 5000 + "}", 0.0),
        ('{"x": "\\ud800"}', 0.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_answers_against_a_schema(text: str, reward: float) -> None:
    """Strict JSON that fits is 1, all else is 0 and never an error."""
    assert json_schema.factory({"schema": POINT})(session(turn(output=text))) == Scores(session=reward)


def test_the_last_answer_counts() -> None:
    """By default the session is scored by how it ended."""
    score = json_schema.factory({"schema": POINT})
    assert score(session(turn(0, '{"x": 1}'), turn(1, "no"))) == Scores(session=0.0)
    assert score(session(turn(0, "no"), turn(1, '{"x": 1}'))) == Scores(session=1.0)


def test_every_answer_that_calls_no_tool_counts_on_its_turn() -> None:
    """Two of three answers fit: 1/3 each, in place; the turn that called a tool has none."""
    score = json_schema.factory({"schema": POINT, "answers": "every"})
    view = session(turn(0, '{"x": 1}'), turn(1, "", tool_calls=[call("f")]), turn(2, "no"), turn(3, '{"x": 2}'))
    assert score(view) == Scores(turns={"c0": 1 / 3, "c2": 0.0, "c3": 1 / 3})


def test_a_session_that_never_answered_is_worth_nothing() -> None:
    """With `every`, calling tools until the end is no way around the schema."""
    score = json_schema.factory({"schema": POINT, "answers": "every"})
    assert score(session(turn(0, "", tool_calls=[call("f")]))) == Scores(session=0.0)


def test_a_schema_may_be_json_text() -> None:
    """A settings file need not spell nested tables."""
    assert json_schema.factory({"schema": json.dumps(POINT)})(session(turn(output='{"x": 1}'))) == Scores(session=1.0)


def test_a_pattern_in_a_schema_cannot_take_for_ever() -> None:
    """A nested quantifier on a text that it nearly matches ends with a 0."""
    score = json_schema.factory({"schema": {"pattern": "^(a+)+$"}})
    assert score(session(turn(output=json.dumps("a" * 5000 + "!")))) == Scores(session=0.0)


# contains


@pytest.mark.parametrize(
    ("options", "text", "reward"),
    [
        ({"literals": ["a.c"]}, "xa.cx", 1.0),
        ({"literals": ["a.c"]}, "abc", 0.0),
        ({"patterns": ["a.c"]}, "xabcx", 1.0),
        ({"patterns": ["^b"]}, "abc", 0.0),
        ({"literals": ["a", "b"]}, "a", 0.0),
        ({"literals": ["a"], "patterns": ["b+"]}, "bba", 1.0),
        ({"literals": ["a", "b"], "need": "any"}, "b", 1.0),
        ({"literals": ["a", "b"], "need": "any"}, "c", 0.0),
        ({"literals": ["Água"]}, "a água", 0.0),
        ({"literals": ["Água"], "ignore_case": True}, "a áGUA", 1.0),
        ({"patterns": ["(?i)yes"]}, "YES", 1.0),
        ({"literals": ["a"]}, "", 0.0),
    ],
)
def test_texts_that_are_looked_for(options: dict[str, Any], text: str, reward: float) -> None:
    """Literals as they stand, patterns as regular expressions, anywhere in the answer."""
    assert contains.factory(options)(session(turn(output=text))) == Scores(session=reward)


def test_which_answers_are_searched() -> None:
    """The last one; with `any` one of them that has all, not all of them together."""
    view = session(turn(0, "a b"), turn(1, "b c"))
    assert contains.factory({"literals": ["a", "b"]})(view) == Scores(session=0.0)
    assert contains.factory({"literals": ["a", "b"], "answers": "any"})(view) == Scores(session=1.0)
    assert contains.factory({"literals": ["a", "c"], "answers": "any"})(view) == Scores(session=0.0)


def test_a_search_without_end_is_given_up() -> None:
    """A nested quantifier on a text that it nearly matches is no score, with the pattern as the reason."""
    slow = contains.factory({"patterns": [r"^(\w|\w\w)+\d$"], "timeout_s": 0.1})
    with pytest.raises(CannotScore, match="took longer"):
        slow(session(turn(output="a" * 5000 + "!")))


@pytest.mark.parametrize(
    "score",
    [
        json_schema.factory({"schema": {}}),
        json_schema.factory({"schema": {}, "answers": "every"}),
        contains.factory({"literals": ["a"]}),
        contains.factory({"literals": ["a"], "answers": "any"}),
    ],
)
def test_text_that_is_not_kept_is_not_scored(score: RewardFunction) -> None:
    """Absent text is not empty text."""
    with pytest.raises(CannotScore, match="not kept"):
        score(session(turn(output=None)))


# length


@pytest.mark.parametrize(
    ("tokens", "reward"),
    [(0, 0.0), (5, 0.0), (6, 0.2), (9, 0.8), (10, 1.0), (20, 1.0), (21, 0.8), (24, 0.2), (25, 0.0), (10**9, 0.0)],
)
def test_lengths_fall_off_in_a_straight_line(tokens: int, reward: float) -> None:
    """Wanted 10 to 20 with a fall-off of 5: a fifth less for each token outside."""
    score = length.factory({"min_tokens": 10, "max_tokens": 20, "falloff_tokens": 5})
    assert score(session(turn(tokens=tokens))).session == pytest.approx(reward)


@pytest.mark.parametrize(("tokens", "reward"), [(9, 0.0), (10, 1.0), (20, 1.0), (21, 0.0)])
def test_without_a_fall_off_it_is_a_step(tokens: int, reward: float) -> None:
    """One token outside is as bad as any number."""
    score = length.factory({"min_tokens": 10, "max_tokens": 20})
    assert score(session(turn(tokens=tokens))) == Scores(session=reward)


def test_lengths_of_the_session_and_of_turns() -> None:
    """Turns of 8 and 12 tokens: 20 together are too long; of the turns one is, and each carries half."""
    view = session(turn(0, tokens=8), turn(1, tokens=12))
    assert length.factory({"max_tokens": 10})(view) == Scores(session=0.0)
    assert length.factory({"max_tokens": 10, "per": "turn"})(view) == Scores(turns={"c0": 0.5, "c1": 0.0})


@pytest.mark.parametrize(
    "score",
    [
        length.factory({"max_tokens": 1}),
        length.factory({"max_tokens": 1, "per": "turn"}),
        json_schema.factory({"schema": {}}),
        json_schema.factory({"schema": {}, "answers": "every"}),
        contains.factory({"literals": ["a"]}),
    ],
)
def test_a_session_without_turns_is_not_scored(score: RewardFunction) -> None:
    """Where there is no answer there is nothing to score."""
    with pytest.raises(CannotScore, match="no turns"):
        score(session())


# The transcript that a judge reads

USER = {"role": "user", "content": "2 + 2?"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "4"}
CALL = call("add", '{"a": 2, "b": 2}')


def test_a_tool_loop_is_told_once_and_in_order() -> None:
    """The answer that the client sends back is left out for the one that was sampled."""
    echo = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    view = session(
        turn(0, "", messages=[USER], tool_calls=[CALL]),
        turn(1, "It is 4.", messages=[USER, echo, RESULT]),
    )
    assert conversations(view) == [
        [
            USER,
            {"role": "assistant", "content": "", "judged": True, "tool_calls": [CALL]},
            RESULT,
            {"role": "assistant", "content": "It is 4.", "judged": True},
        ]
    ]


def test_an_edited_history_is_another_conversation() -> None:
    """A retried turn and a changed question each start one."""
    other = {"role": "user", "content": "3 + 3?"}
    view = session(turn(0, "5", messages=[USER]), turn(1, "4", messages=[USER]), turn(2, "6", messages=[other]))
    assert [[message["content"] for message in each] for each in conversations(view)] == [
        ["2 + 2?", "5"],
        ["2 + 2?", "4"],
        ["3 + 3?", "6"],
    ]


def test_a_long_session_is_told_in_as_many_messages_as_it_has() -> None:
    """200 turns are 400 messages, though the turns' histories hold 40 000."""
    history: list[dict[str, Any]] = []
    made = []
    for number in range(200):
        history.append({"role": "user", "content": str(number)})
        made.append(turn(number, "ok", messages=tuple(history)))
        history.append({"role": "assistant", "content": "ok"})
    [told] = conversations(session(*made))
    assert len(told) == 400
