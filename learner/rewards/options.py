"""The base of the built-in reward functions' options."""

from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    """An option that no one knows is an error, so that a typing mistake is never a silent default."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
