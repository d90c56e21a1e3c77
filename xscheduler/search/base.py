"""The contract of a search: the spaces of one policy in, the best allowed point and the proof out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from xgpt.schema import PolicySettings
from xscheduler.space import Space

Method = Literal["branch-and-bound", "exhaustive", "optuna"]


@dataclass(frozen=True, slots=True)
class Found:
    """What a search of one policy's spaces found.

    Attributes:
        space: where the best point lies; None where no point is allowed.
        settings: the best point that fits and keeps the constraint; None where no point does.
        values: its predictions, by name.
        evaluations: points predicted.
        gap: no point of the spaces has over (1 + gap) times this throughput; None where nothing proves it.
        bound: what the gap rests on.
        method: what found it; another one than was asked for where that one's bounds do not hold.
    """

    space: Space | None = field(compare=False)
    settings: PolicySettings | None
    values: dict[str, float]
    evaluations: int
    gap: float | None
    bound: str
    method: Method = "branch-and-bound"

    @property
    def throughput(self) -> float:
        return self.values["throughput"] if self.settings else 0.0


Search = Callable[[Sequence[Space]], Found]
