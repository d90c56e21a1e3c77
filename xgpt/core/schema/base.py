"""The base of every type that is stored in a file."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """An immutable model that rejects unknown fields, NaN and infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def but(self, **fields: Any) -> Self:
        """Return a copy with other values of these fields. The values are not checked."""
        return self.model_copy(update=fields)
