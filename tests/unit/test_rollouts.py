"""Rollouts: which token a reward belongs to, and which turns share a sequence."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.rollouts import PackedSequence, Rollout, Turn, build_rollout, pack
from tests.builders import completion, feedback, turn

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    """Two agents that take turns: each extends its history, edits a token of it, drops the last answer, tries again,
    or starts anew; some turns are not trainable.
    """
    turns: list[Turn] = []
    histories: list[tuple[int, ...]] = [(), ()]
    prompts: list[tuple[int, ...]] = [(), ()]
    for number in range(draw(st.integers(1, 8))):
        agent = draw(st.integers(0, 1))
        history = histories[agent]
        kind = draw(st.sampled_from(["extend", "extend", "edit", "drop", "retry", "fresh"]))
        if kind == "edit" and history:
            spot = draw(st.integers(0, len(history) - 1))
            history = (*history[:spot], history[spot] + 1, *history[spot + 1 :])
        elif kind == "drop":
            history = prompts[agent]
        elif kind == "fresh":
            history = ()
        prompt = prompts[agent] if kind == "retry" and prompts[agent] else history + draw(TOKENS)
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
        histories[agent], prompts[agent] = prompt + sampled, prompt
    return turns


def _groups(turns: list[Turn]) -> list[list[Turn]]:
    """By the definition: of the groups with all of whose tokens a prompt begins, token by token, the longest."""
    groups: list[list[Turn]] = []
    for now in turns:
        joined: list[Turn] = []
        for group in groups:
            tokens = _tokens(group)
            begins = len(tokens) <= len(now.prompt_ids) and all(
                tokens[i] == now.prompt_ids[i] for i in range(len(tokens))
            )
            if begins and (not joined or len(tokens) > len(_tokens(joined))):
                joined = group
        if not joined:
            groups.append(joined)
        joined.append(now)
    return [group for group in groups if any(t.trainable for t in group)]


def _tokens(group: list[Turn]) -> tuple[int, ...]:
    return group[-1].prompt_ids + group[-1].completion_ids


def _contexts(sequences: list[PackedSequence]) -> list[tuple[int, ...]]:
    """What stands before each action token, in time order."""
    return _in_time(sequences, [[tuple(s.ids[:p].tolist()) for p in s.positions.tolist()] for s in sequences])


def _in_time(sequences: list[PackedSequence], columns: list[list[Any]]) -> list[Any]:
    """Something of each action token, given sequence by sequence, in time order; each time occurs once."""
    pairs = [
        pair
        for s, column in zip(sequences, columns, strict=True)
        for pair in zip(s.times.tolist(), column, strict=True)
    ]
    assert sorted(time for time, _ in pairs) == list(range(len(pairs)))
    return [thing for _, thing in sorted(pairs, key=lambda pair: pair[0])]


@given(conversations())
def test_every_action_token_keeps_its_own_context_and_time(turns: list[Turn]) -> None:
    """Packed or not, token j of a turn is preceded by exactly that turn's prompt and its first j tokens."""
    trainable = [t for t in turns if t.trainable]
    sequences = pack(turns)
    assert _contexts(sequences) == [
        t.prompt_ids + t.completion_ids[:j] for t in trainable for j in range(len(t.completion_ids))
    ]
    actions = _in_time(sequences, [s.actions.tolist() for s in sequences])
    assert actions == [i for t in trainable for i in t.completion_ids]


@given(conversations())
def test_every_action_token_keeps_its_logprob_and_temperature(turns: list[Turn]) -> None:
    """The recorded numbers stay with the token that they were recorded for."""
    trainable = [t for t in turns if t.trainable]
    sequences = pack(turns)
    behaviour = _in_time(sequences, [s.behaviour.tolist() for s in sequences])
    assert behaviour == [p for t in trainable for p in t.logprobs]
    temperature = _in_time(sequences, [s.temperature.tolist() for s in sequences])
    assert temperature == [t.temperature for t in trainable for _ in t.completion_ids]


@given(conversations())
def test_a_turn_joins_the_longest_sequence_that_its_prompt_extends(turns: list[Turn]) -> None:
    """Brute force by the definition; a sequence without action tokens is left out."""
    assert [tuple(s.ids.tolist()) for s in pack(turns)] == [_tokens(group) for group in _groups(turns)]


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


def test_interleaved_agents_have_a_sequence_each() -> None:
    """Turns of a main agent (1 ...) and of its helper (6 ...) alternate: two sequences, and times that alternate."""
    main, helper = pack(
        [
            turn((1,), (2, 3)),
            turn((6,), (7,)),
            turn((1, 2, 3, 9), (4,)),
            turn((6, 7, 9), (8, 8)),
        ]
    )
    assert (main.ids.tolist(), main.times.tolist()) == ([1, 2, 3, 9, 4], [0, 1, 3])
    assert (helper.ids.tolist(), helper.times.tolist()) == ([6, 7, 9, 8, 8], [2, 4, 5])


def test_turn_asked_again_after_an_abort_goes_on_where_the_aborted_one_did() -> None:
    """The half answer is in no sequence, and the session stays one."""
    first = turn((1,), (2, 3))
    broken = turn((1, 2, 3, 4), (5,), trainable=False, finish_reason="abort")
    again = turn((1, 2, 3, 4), (6, 7))
    [sequence] = pack([first, broken, again])
    assert sequence.ids.tolist() == [1, 2, 3, 4, 6, 7]
    assert sequence.actions.tolist() == [2, 3, 6, 7]
    assert sequence.times.tolist() == [0, 1, 2, 3]


def test_retried_turn_is_a_branch_of_its_own() -> None:
    """The same prompt answered again starts a sequence, in which the history is context; both branches can go on."""
    first, second = pack(
        [
            turn((1,), (2,)),
            turn((1, 2, 9), (3,)),
            turn((1, 2, 9), (4,)),
            turn((1, 2, 9, 3, 9), (5,)),
            turn((1, 2, 9, 4, 9), (6,)),
        ]
    )
    assert (first.ids.tolist(), first.times.tolist()) == ([1, 2, 9, 3, 9, 5], [0, 1, 3])
    assert (second.ids.tolist(), second.times.tolist()) == ([1, 2, 9, 4, 9, 6], [2, 4])


def test_turn_that_extends_two_sequences_joins_the_longer() -> None:
    """(1 2) + (3) and (1 2) + (3 4): the prompt 1 2 3 4 9 goes on with the second."""
    short, long = pack([turn((1, 2), (3,)), turn((1, 2), (3, 4)), turn((1, 2, 3, 4, 9), (5,))])
    assert short.ids.tolist() == [1, 2, 3]
    assert (long.ids.tolist(), long.times.tolist()) == ([1, 2, 3, 4, 9, 5], [1, 2, 3])


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
