"""Whether answers are JSON that fits a schema: 1 or 0 each."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn

import jsonschema_rs
from pydantic import BeforeValidator, Field, field_validator

from learner.rewards.options import Options
from learner.rewards.reading import last_turn, spread, text_of
from learner.rewards.view import RewardFunction, Scores, SessionView


def _from_text(schema: object) -> object:
    return json.loads(schema) if isinstance(schema, str) else schema


class JsonSchemaOptions(Options):
    """`schema` is a table or its JSON text; its draft is that of its `$schema`, 2020-12 where it names none.

    `last` scores the session by its last answer. `every` scores every answer that calls no tool, on its turn; the
    session's total is their mean, 0 where there is none.
    """

    schema_: Annotated[dict[str, Any], BeforeValidator(_from_text)] = Field(alias="schema")
    answers: Literal["last", "every"] = "last"

    @field_validator("schema_")
    @classmethod
    def _is_schema(cls, schema: dict[str, Any]) -> dict[str, Any]:
        try:
            _validator(schema)
        except jsonschema_rs.ValidationError as error:
            raise ValueError(f"is no JSON schema: {error.message}") from error
        return schema


def factory(options: Mapping[str, Any]) -> RewardFunction:
    """Raises CannotScore where an answer's text is not kept."""
    given = JsonSchemaOptions.model_validate(options)
    validator = _validator(given.schema_)

    def last(session: SessionView) -> Scores:
        return Scores(session=_fits(text_of(last_turn(session)), validator))

    def every(session: SessionView) -> Scores:
        last_turn(session)
        answers = [turn for turn in session.turns if not turn.tool_calls]
        if not answers:
            return Scores(session=0.0)
        return spread({turn.completion_id: _fits(text_of(turn), validator) for turn in answers})

    return last if given.answers == "last" else every


def _validator(schema: dict[str, Any]) -> jsonschema_rs.Validator:
    """Schemas come from the settings alone: references to the network are refused."""
    return jsonschema_rs.validator_for(schema, offline=True)


def _fits(text: str, validator: jsonschema_rs.Validator) -> float:
    """Strict JSON: no NaN, no infinity, no half of a surrogate pair; nested so deep that it cannot be read is unfit."""
    try:
        return float(validator.is_valid(json.loads(text, parse_constant=_refuse)))
    except (ValueError, RecursionError):
        return 0.0


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
