"""Speculative decoding: a draft proposes tokens ahead, and the model accepts as many as it would have made itself."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from xgpt.core.schema.base import Frozen

SpeculativeMethod = Literal["eagle3", "eagle", "mtp", "ngram"]
MOST_AHEAD = 16
"""Largest number of tokens ahead."""


class Speculation(Frozen):
    """How a draft runs ahead of the model.

    A decode step first makes `tokens` draft tokens, one after the other, then verifies them all at once with the token
    before them; it emits those accepted from the first on, and one token of the model's own.

    Source: Leviathan et al., arXiv 2211.17192, Algorithm 1; EAGLE-3, arXiv 2503.01840; multi-token prediction,
    DeepSeek-V3, arXiv 2412.19437 sec. 2.2.
    """

    method: SpeculativeMethod
    """What drafts: a head of one layer that was trained for the model (eagle, eagle3), the model's own layer for
    multi-token prediction (mtp), or a search for the last tokens in the text so far (ngram)."""
    tokens: PositiveInt = Field(le=MOST_AHEAD)
    """Tokens ahead in a step."""
    acceptance: tuple[float, ...] = Field(min_length=1, max_length=MOST_AHEAD)
    """Share of steps in which the first token ahead is accepted, the first two, and so on: what vLLM logs as acceptance
    by position."""
    draft: str | None = None
    """Checkpoint of the draft, as the engine takes it; None: the model's own, or none."""

    @model_validator(mode="after")
    def _check(self) -> Speculation:
        if any(not 0 <= share <= 1 for share in self.acceptance):
            raise ValueError(f"acceptance: {list(self.acceptance)} must be shares from 0 to 1")
        if any(b > a for a, b in pairwise(self.acceptance)):
            raise ValueError(f"acceptance: {list(self.acceptance)} must not rise: a token counts only after the others")
        if self.tokens > len(self.acceptance):
            raise ValueError(f"tokens: {self.tokens} exceeds the {len(self.acceptance)} positions of acceptance")
        return self

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens that a request gets in a decode step."""
        return 1 + sum(self.acceptance[: self.tokens])

    @property
    def verified(self) -> int:
        """Tokens of a request that the model passes in a decode step."""
        return 1 + self.tokens

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of steps that emit 1, 2, ... tokens."""
        kept = (1.0, *self.acceptance[: self.tokens], 0.0)
        return tuple(a - b for a, b in pairwise(kept))

    def ahead(self, tokens: int) -> Speculation:
        """Return the same draft with another number of tokens ahead."""
        return self.model_copy(update={"tokens": tokens})
