"""The base of every type that is stored in a file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """An immutable model that rejects unknown fields, NaN and infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
