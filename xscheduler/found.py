"""Define what a search returns: a schedule with its figures, and what was proven about the question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from xgpt.core.schema import Ceiling, Plan, PlanDraft


@dataclass(frozen=True)
class Found:
    """The best schedule that a search found.

    Attributes:
        rival: see `SearchCertificate`.
        closed_rate: for a schedule that was not simulated, the closed form's highest arrival rate, requests/s. None if
            it was simulated, or if its objective is no rate.
        beside: returns the best schedule of the same policy on a placement of another shape than a draft's or, if the
            draft has several stages, on undivided replicas. None means that the search keeps none.
        shapes: returns the best schedule on replicas that are not divided, for each other parallel degree.
    """

    draft: PlanDraft
    ceiling: Ceiling
    rival: str | None = None
    closed_rate: float | None = None
    beside: Callable[[PlanDraft], PlanDraft | None] | None = field(default=None, compare=False, repr=False)
    shapes: Callable[[PlanDraft], list[PlanDraft]] | None = field(default=None, compare=False, repr=False)

    @cached_property
    def at_side(self) -> PlanDraft | None:
        found = None if self.beside is None else self.beside(self.draft)
        return None if found is None else found.but(pinned=self.draft.pinned)

    @cached_property
    def other_shapes(self) -> list[PlanDraft]:
        found = [] if self.shapes is None else self.shapes(self.draft)
        return [draft.but(pinned=self.draft.pinned) for draft in found]

    @property
    def plan(self) -> Plan:
        return self.draft.proven(self.ceiling, self.rival)

    def estimating(self, **figures: Any) -> Found:
        return replace(self, draft=self.draft.with_estimate(**figures))
