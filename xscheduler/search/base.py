"""Define the interface of a search method, which returns the best allowed point of a policy's spaces and a proof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xgpt.core.schema import PolicySettings, SearchMethod
from xscheduler.space import Space


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search of one policy's spaces.

    Attributes:
        space: the space of the best point. None means that no point is allowed.
        settings: the best point that fits in memory and keeps the constraint. None means that no point is allowed.
        values: the best point's predictions, by name.
        evaluations: number of points that were predicted.
        gap: no point of the spaces has more than (1 + gap) times the best point's throughput. None means that nothing
            is proven.
        bound: a description of the bound to which the gap refers.
        method: the method that found the point. It differs from the requested method if that method's bounds were not
            valid.
    """

    space: Space | None = field(compare=False)
    settings: PolicySettings | None
    values: dict[str, float]
    evaluations: int
    gap: float | None
    bound: str
    method: SearchMethod = "branch-and-bound"

    @property
    def throughput(self) -> float:
        return self.values["throughput"] if self.settings else 0.0


Search = Callable[[Sequence[Space]], SearchResult]
