"""Rollouts: which token a reward belongs to, and which turns share a sequence."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.rollouts import PackedSequence, Rollout, Turn, build_rollout, pack
from tests.builders import completion, feedback, turn

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    """Turns that extend the history, edit a token of it, drop what came before, or start anew; some not trainable."""
    turns: list[Turn] = []
    history: tuple[int, ...] = ()
    for number in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["extend", "extend", "edit", "drop", "fresh"]))
        if kind == "edit" and history:
            spot = draw(st.integers(0, len(history) - 1))
            history = (*history[:spot], history[spot] + 1, *history[spot + 1 :])
        elif kind == "drop" and turns:
            history = turns[-1].prompt_ids
        elif kind == "fresh":
            history = ()
        prompt = history + draw(TOKENS)
        sampled = draw(TOKENS)
        made = turn(
            prompt,
            sampled,
            completion_id=f"c{number}",
            logprobs=tuple(-float(number) - i / 8 for i in range(len(sampled))),
            temperature=1.0 + number / 4,
            trainable=draw(st.integers(0, 3)) > 0,
        )
        turns.append(made)
        history = prompt + sampled
    return turns


def _is_prefix(short: tuple[int, ...], long: tuple[int, ...]) -> bool:
    return len(short) <= len(long) and all(a == b for a, b in zip(short, long, strict=False))


def _groups(turns: list[Turn]) -> list[list[Turn]]:
    """By the definition: a turn joins the one before it if its prompt begins with all of that turn's tokens."""
    groups = [[turns[0]]]
    for before, now in pairwise(turns):
        if _is_prefix(before.prompt_ids + before.completion_ids, now.prompt_ids):
            groups[-1].append(now)
        else:
            groups.append([now])
    return [group for group in groups if any(t.trainable for t in group)]


def _contexts(sequences: list[PackedSequence]) -> list[tuple[int, ...]]:
    """What stands before each action token, token by token."""
    return [tuple(s.ids[:position].tolist()) for s in sequences for position in s.positions.tolist()]


@given(conversations())
def test_every_action_token_keeps_its_own_context_and_time_order(turns: list[Turn]) -> None:
    """Packed or not, token j of a turn is preceded by exactly that turn's prompt and its first j tokens."""
    trainable = [t for t in turns if t.trainable]
    sequences = pack(turns)
    assert _contexts(sequences) == [
        t.prompt_ids + t.completion_ids[:j] for t in trainable for j in range(len(t.completion_ids))
    ]
    assert [i for s in sequences for i in s.actions.tolist()] == [i for t in trainable for i in t.completion_ids]


@given(conversations())
def test_every_action_token_keeps_its_logprob_and_temperature(turns: list[Turn]) -> None:
    """The recorded numbers stay with the token that they were recorded for."""
    trainable = [t for t in turns if t.trainable]
    sequences = pack(turns)
    assert [p for s in sequences for p in s.behaviour.tolist()] == [p for t in trainable for p in t.logprobs]
    assert [x for s in sequences for x in s.temperature.tolist()] == [
        t.temperature for t in trainable for _ in t.completion_ids
    ]


@given(conversations())
def test_turns_share_a_sequence_exactly_when_the_prompt_extends_the_turn_before(turns: list[Turn]) -> None:
    """Brute force by the definition; a sequence without action tokens is left out."""
    last = [group[-1] for group in _groups(turns)]
    assert [tuple(s.ids.tolist()) for s in pack(turns)] == [t.prompt_ids + t.completion_ids for t in last]


def test_extension_shares_one_sequence() -> None:
    """A tool result after the answer, then the next answer: one sequence, two runs of action tokens."""
    [sequence] = pack([turn((1, 2), (3, 4)), turn((1, 2, 3, 4, 9, 9), (5,))])
    assert sequence.ids.tolist() == [1, 2, 3, 4, 9, 9, 5]
    assert sequence.positions.tolist() == [2, 3, 6]
    assert sequence.actions.tolist() == [3, 4, 5]


def test_edited_history_starts_a_new_sequence() -> None:
    """One changed token of the history, and the second turn stands alone."""
    first, second = pack([turn((1, 2), (3, 4)), turn((1, 2, 3, 8, 9), (5,))])
    assert first.ids.tolist() == [1, 2, 3, 4]
    assert (second.ids.tolist(), second.positions.tolist()) == ([1, 2, 3, 8, 9, 5], [5])


def test_dropped_thinking_starts_a_new_sequence() -> None:
    """A template that leaves the thinking (7, 7) out of the next prompt breaks the prefix."""
    first, second = pack([turn((1,), (7, 7, 3)), turn((1, 3, 9), (4,))])
    assert first.actions.tolist() == [7, 7, 3]
    assert second.ids.tolist() == [1, 3, 9, 4]


def test_untrainable_turn_is_an_observation() -> None:
    """A served turn that cannot be trained on stays in the context and has no action tokens."""
    [sequence] = pack([turn((1,), (2, 3), trainable=False), turn((1, 2, 3, 9), (4,))])
    assert sequence.ids.tolist() == [1, 2, 3, 9, 4]
    assert sequence.positions.tolist() == [4]


def test_rewards_lie_on_the_last_action_token_of_the_judged_turn() -> None:
    """Turns of 2, 3 and 1 tokens judged .5, nothing and -1, and the session 2, on tokens 1, 5 and 5."""
    turns = (
        turn((1,), (2, 3), reward=0.5),
        turn((1, 2, 3, 9), (4, 5, 6)),
        turn((1, 2, 3, 9, 4, 5, 6, 9, 9), (7,), reward=-1.0),
    )
    assert Rollout("s", turns, 2.0).token_rewards().tolist() == [0.0, 0.5, 0.0, 0.0, 0.0, 1.0]


def test_untrainable_judged_turn_hands_its_reward_to_the_action_token_before() -> None:
    """The reward of a turn without action tokens goes to the turn before it, not to the one after."""
    turns = (turn((1,), (2, 3)), turn((5,), (6, 6), reward=0.75, trainable=False), turn((7,), (8,)))
    assert Rollout("s", turns, 0.25).token_rewards().tolist() == [0.0, 0.75, 0.25]


def test_reward_with_no_action_token_before_it_teaches_nothing() -> None:
    """A judged first turn that cannot be trained on must not credit what was sampled after it."""
    turns = (turn((5,), (6, 6), reward=0.75, trainable=False), turn((7,), (8, 9)))
    assert Rollout("s", turns, 0.0).token_rewards().tolist() == [0.0, 0.0]


@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([-1.0, 0.0, 0.25, 0.5])), min_size=1, max_size=5),
    st.sampled_from([0.0, 1.0, -0.5]),
    st.integers(0, 30),
)
def test_length_of_the_observations_does_not_matter(
    turns: list[tuple[int, float]], session_reward: float, observation: int
) -> None:
    """However long the tool results are, the rewards over the action tokens are the same."""

    def rewards(gap: int) -> list[float]:
        made: list[Turn] = []
        history: tuple[int, ...] = ()
        for count, reward in turns:
            prompt = (*history, 0, *[7] * gap)
            made.append(turn(prompt, range(1, count + 1), reward=reward))
            history = prompt + made[-1].completion_ids
        assert len(pack(made)) == 1
        return Rollout("s", tuple(made), session_reward).token_rewards().tolist()

    assert rewards(observation) == rewards(0)


def test_joined_events_become_a_rollout() -> None:
    """Each completion's numbers come over exactly; rewards go to the turn that they name, or to the session."""
    events = [
        completion("s", "a", version=3, temperature=0.7),
        completion("s", "b", completion_ids=(9,), version=4, finish_reason="length"),
    ]
    judgements = [
        feedback("s", "f1", completion_id="b", reward=0.5, final=False),
        feedback("s", "f2", completion_id="b", reward=0.25, final=False),
        feedback("s", "f3", reward=-1.0),
    ]
    rollout = build_rollout("s", events, judgements)
    first, second = rollout.turns
    assert (first.prompt_ids, first.completion_ids, first.logprobs) == ((1, 2), (3, 4), (-0.5, -1.5))
    assert (first.version, first.temperature, first.reward) == (3, 0.7, 0.0)
    assert (second.completion_ids, second.version, second.finish_reason, second.reward) == ((9,), 4, "length", 0.75)
    assert (rollout.session_reward, rollout.total_reward) == (-1.0, -0.25)
    assert rollout.token_rewards().tolist() == [0.0, 0.0, -0.25]


def test_untrainable_completion_has_no_action_tokens() -> None:
    """What was served and not recorded exactly stays in the rollout, without action tokens or a say in its age."""
    bad = completion("s", "b", trainable=False, not_trainable_reason="top_p", version=1)
    rollout = build_rollout("s", [completion("s", "a", version=5), bad], [feedback("s")])
    assert [t.action_tokens for t in rollout.turns] == [2, 0]
    assert (rollout.action_tokens, rollout.oldest_version) == (2, 5)


def test_oldest_version_is_the_oldest_that_sampled_an_action_token() -> None:
    """A rollout over several versions is as old as its oldest action token."""
    turns = (turn(version=6), turn(version=4), turn(version=9))
    assert Rollout("s", turns, 0.0).oldest_version == 4


def test_logprobs_reach_the_update_with_float32_bits() -> None:
    """The recorded float32 is the tensor's value, bit for bit."""
    exact = torch.tensor([-0.1, -1 / 3, -1e-7], dtype=torch.float32)
    event = completion(completion_ids=(3, 4, 5), logprobs=tuple(exact.tolist()))
    [sequence] = pack(build_rollout("s", [event], [feedback()]).turns)
    assert torch.equal(sequence.behaviour, exact)


@pytest.mark.parametrize("trainable", [True, False])
def test_pack_does_not_change_what_a_turn_says(trainable: bool) -> None:
    """A lone turn is packed as it is, or not at all."""
    lone = replace(turn((4, 5), (6, 7), temperature=0.5), trainable=trainable)
    sequences = pack([lone])
    assert len(sequences) == int(trainable)
    assert _contexts(sequences) == ([(4, 5), (4, 5, 6)] if trainable else [])
