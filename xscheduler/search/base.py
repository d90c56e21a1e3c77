"""The contract of a search method: one policy's spaces in, the best allowed point and its proof out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xgpt.core.schema import PolicySettings, SearchMethod
from xscheduler.space import Space


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search of one policy's spaces found.

    Attributes:
        space: the space of the best point; None: no point is allowed.
        settings: the best point that fits and keeps the constraint; None: no point does.
        values: the point's predictions, by name.
        evaluations: number of points predicted.
        gap: no point of the spaces has more than (1 + gap) times this throughput; None: nothing proves it.
        bound: what the gap is based on, in words.
        method: the method that found it; not the requested one if that one's bounds did not hold.
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
