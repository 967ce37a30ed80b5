"""Request bodies are strict, and become exactly what the client asked for."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from app.api.chat import generate_request
from app.api.schemas import ChatRequest, FeedbackRequest, PinRequest, RollbackRequest

CHAT: dict[str, Any] = {"model": "riacho", "messages": [{"role": "user", "content": "x"}]}


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate(CHAT | fields)


def sampling(**fields: Any) -> Any:
    return generate_request(chat(**fields), 256).sampling


def test_defaults_are_openais() -> None:
    """A request that names nothing samples at temperature 1 from the whole distribution."""
    plain = sampling()
    assert (plain.temperature, plain.top_p, plain.top_k, plain.min_p) == (1.0, 1.0, 0, 0.0)
    assert (plain.presence_penalty, plain.frequency_penalty, plain.seed, plain.stop) == (0.0, 0.0, None, ())
    assert plain.max_tokens == 256
    assert not plain.logit_bias
    assert not plain.structured


NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"]
INTEGERS = ["n", "max_tokens", "max_completion_tokens", "top_k", "seed", "top_logprobs"]
FLAGS = ["stream", "logprobs", "store", "parallel_tool_calls"]


@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS, *FLAGS, "stop", "logit_bias", "tools", "metadata"])
def test_null_is_the_default(name: str) -> None:
    """Clients send null for what they leave alone."""
    given_null = chat(**{name: None})
    assert generate_request(given_null, 256) == generate_request(chat(), 256)


def test_what_was_asked_for_takes_effect() -> None:
    """Every sampling parameter arrives as it was sent; temperature 0 is not the default."""
    wanted: dict[str, Any] = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "presence_penalty": -1.5,
        "frequency_penalty": 1.5,
        "seed": 0,
        "max_tokens": 3,
    }
    got = sampling(**wanted, stop=["a", "b"], logit_bias={"7": -5})
    assert {name: getattr(got, name) for name in wanted} == wanted
    assert got.stop == ("a", "b")
    assert got.logit_bias
    assert generate_request(chat(logit_bias={"7": -5}), 256).logit_bias == {7: -5.0}


def test_newer_name_of_the_limit_wins() -> None:
    """max_completion_tokens over max_tokens."""
    assert sampling(max_tokens=5, max_completion_tokens=9).max_tokens == 9


def test_top_k_of_minus_one_is_off() -> None:
    """-1 means no top_k, as in vLLM."""
    assert sampling(top_k=-1).top_k == 0


@pytest.mark.parametrize(
    ("fields", "structured"),
    [
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": {"type": "json_object"}}, True),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "none"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
    ],
    ids=str,
)
def test_constrained_output_is_known(fields: dict[str, Any], structured: bool) -> None:
    """What a grammar shapes is marked, so that it is not trained on."""
    assert sampling(**fields).structured is structured


@pytest.mark.parametrize("value", ["1", True, [1], {}], ids=repr)
@pytest.mark.parametrize("name", NUMBERS + INTEGERS)
def test_numbers_are_numbers(name: str, value: Any) -> None:
    """Neither strings nor booleans are numbers."""
    with pytest.raises(ValidationError):
        chat(**{name: value, **({"logprobs": True} if name == "top_logprobs" else {})})


@pytest.mark.parametrize("name", INTEGERS)
def test_counts_are_whole(name: str) -> None:
    """1.5 is no count."""
    with pytest.raises(ValidationError):
        chat(**{name: 1.5, **({"logprobs": True} if name == "top_logprobs" else {})})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_finite(name: str, value: float) -> None:
    """No NaN and no infinity gets in, by whatever encoding."""
    with pytest.raises(ValidationError):
        chat(**{name: value})


def test_bias_is_finite() -> None:
    """A bias of NaN would make every logit NaN."""
    with pytest.raises(ValidationError):
        chat(logit_bias={"1": float("nan")})


@pytest.mark.parametrize("value", ["true", 1, 0, "no"], ids=repr)
@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_booleans(name: str, value: Any) -> None:
    """1 and "true" are no booleans."""
    with pytest.raises(ValidationError):
        chat(**{name: value})


def test_extra_fields_of_messages_reach_the_template() -> None:
    """What only the chat template reads, such as a name, passes through unchanged."""
    message = {"role": "user", "content": "x", "name": "Ada", "custom": {"a": [1]}}
    assert generate_request(chat(messages=[message]), 256).messages == [message]


def judgement(**fields: Any) -> FeedbackRequest:
    return FeedbackRequest.model_validate({"completion_id": "c", "reward": 1.0} | fields)


@pytest.mark.parametrize("value", [True, False, "1", float("nan"), float("inf"), [1], {}], ids=repr)
def test_reward_is_a_finite_number(value: Any) -> None:
    """Bools, strings, NaN and infinities are no rewards."""
    with pytest.raises(ValidationError):
        judgement(reward=value)


@given(reward=st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**6), 10**6))
def test_finite_numbers_are_rewards(reward: float) -> None:
    """Whole numbers too; the range is the policy's affair."""
    assert judgement(reward=reward).reward == reward


@pytest.mark.parametrize(
    "fields",
    [
        {"reward": None},
        {"thumb": "up"},
        {"completion_id": None},
        {"session_id": "s"},
        {"final": None},
        {"final": 1},
        {"thumb": "maybe", "reward": None},
        {"unknown": 1},
    ],
    ids=str,
)
def test_one_target_and_one_value(fields: dict[str, Any]) -> None:
    """Exactly one target, exactly one of reward and thumb, `final` a boolean, nothing unknown."""
    with pytest.raises(ValidationError):
        judgement(**fields)


@pytest.mark.parametrize("to", ["base", 0, 7])
def test_rollback_names_a_version(to: Any) -> None:
    """A number, 0 or "base"."""
    assert RollbackRequest.model_validate({"to": to, "reason": "x"}).to == to


@pytest.mark.parametrize("to", [None, True, -1, 2**31, 1.5, "7", "newest", ""], ids=repr)
def test_rollback_to_nonsense_is_refused(to: Any) -> None:
    """Nothing else."""
    with pytest.raises(ValidationError):
        RollbackRequest.model_validate({"to": to, "reason": "x"})


@pytest.mark.parametrize("pinned", [None, 1, 0, "true"], ids=repr)
def test_pin_is_a_boolean(pinned: Any) -> None:
    """True or false, spelt so."""
    with pytest.raises(ValidationError):
        PinRequest.model_validate({"pinned": pinned})
