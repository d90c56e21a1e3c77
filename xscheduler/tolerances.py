"""Define the tolerances of a search in one place. All are shares of a rate, a throughput or a time."""

from __future__ import annotations

from pydantic import Field

from xgpt.core.schema import Frozen


class Tolerances(Frozen):
    """The differences that a search ignores, and the doubts that it allows for."""

    throughput: float = Field(
        default=0.002, description="a block is dropped if its fast corner, raised by this, does not beat the best point"
    )
    latency: float = Field(
        default=0.01, description="a box is dropped if its least latency exceeds the bound by more than this"
    )
    target_gap: float = Field(
        default=0.01, description="blocks are divided until none can exceed the best point by more than this"
    )
    breach: float = Field(
        default=0.02, description="bounds of boxes are not valid if a point exceeds its own by more than this"
    )
    close: float = Field(
        default=0.005, description="a placement is settled if its bound exceeds the best rate by at most this"
    )
    rate: float = Field(default=0.005, description="precision of the best plan's rate; better rates are higher by more")
    rate_of_others: float = Field(default=0.03, description="precision of the rate of a policy that cannot win")
    behind: float = Field(
        default=0.3, description="a policy cannot win if its closed form is below the best simulated rate by this"
    )
    doubt: float = Field(
        default=0.06, description="a plan is simulated if its closed form is below the best rate by at most this"
    )
    doubt_nearby: float = Field(
        default=0.15,
        description="the same for the best plan's placement and prefill groups, where closed forms can err by as much",
    )
    batch: float = Field(default=0.05, description="two batch sizes count as equal if they differ by at most this")
    noise: float = Field(
        default=0.05, description="by chance, a simulated rate may exceed its upper bound by at most this"
    )
    simulated: float = Field(
        default=0.1, description="figures of simulation and closed form count as equal if they differ by at most this"
    )

    def rows(self) -> list[tuple[str, float, str]]:
        """Return each tolerance's name, value and meaning, for `--explain`."""
        return [(name, getattr(self, name), str(field.description)) for name, field in type(self).model_fields.items()]


TOLERANCES = Tolerances()
