"""Define the base class of every type that is stored in a file."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """An immutable model that rejects unknown fields, NaN and infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def but(self, **fields: Any) -> Self:
        """Return a copy with these values of fields. They are not validated."""
        return self.model_copy(update=fields)
