"""Define speculative decoding: a draft proposes tokens, and the model accepts or rejects them."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from xgpt.core.schema.base import Frozen

SpeculativeMethod = Literal["eagle3", "eagle", "mtp", "ngram"]
MOST_AHEAD = 16
"""Largest number of draft tokens in a step."""


class Speculation(Frozen):
    """Settings of speculative decoding.

    A decode step first generates `tokens` draft tokens, one after the other. Then the model verifies all of them in one
    pass, together with the token before them. The step emits the draft tokens before the first rejected one, and one
    token of the model.

    Source: Leviathan et al., arXiv 2211.17192, Algorithm 1; EAGLE-3, arXiv 2503.01840; multi-token prediction,
    DeepSeek-V3, arXiv 2412.19437 sec. 2.2.
    """

    method: SpeculativeMethod
    """The draft: a one-layer head trained for the model (eagle, eagle3), the model's layer for multi-token prediction
    (mtp), or a search for earlier occurrences of the last tokens in the text (ngram).
    """
    tokens: PositiveInt = Field(le=MOST_AHEAD)
    """Number of draft tokens in a step."""
    acceptance: tuple[float, ...] = Field(min_length=1, max_length=MOST_AHEAD)
    """One share for each draft position: entry i is the share of steps in which at least i + 1 draft tokens are
    accepted. vLLM logs these shares as acceptance by position.
    """
    draft: str | None = None
    """Checkpoint of the draft, in the form that the engine accepts. None means that the draft is part of the model, or
    has no weights.
    """

    @model_validator(mode="after")
    def _check(self) -> Speculation:
        if any(not 0 <= share <= 1 for share in self.acceptance):
            raise ValueError(f"acceptance: {list(self.acceptance)} must be shares from 0 to 1")
        if any(b > a for a, b in pairwise(self.acceptance)):
            says = f"acceptance: {list(self.acceptance)} must not rise: a token is accepted only after those before it"
            raise ValueError(says)
        if self.tokens > len(self.acceptance):
            says = f"tokens: {self.tokens} exceeds the number of shares in acceptance, {len(self.acceptance)}"
            raise ValueError(says)
        return self

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens that a request gets in a decode step."""
        return 1 + sum(self.acceptance[: self.tokens])

    @property
    def verified(self) -> int:
        """Number of tokens of a request that the model verifies in a decode step."""
        return 1 + self.tokens

    @property
    def shares(self) -> tuple[float, ...]:
        """Shares of decode steps that emit 1, 2, ... tokens for a request."""
        kept = (1.0, *self.acceptance[: self.tokens], 0.0)
        return tuple(a - b for a, b in pairwise(kept))

    def ahead(self, tokens: int) -> Speculation:
        """Return the same settings with another number of draft tokens in a step."""
        return self.but(tokens=tokens)
