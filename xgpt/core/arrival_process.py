"""Draw the times at which requests arrive: at one rate or in stages, as a Poisson process or in bursts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xgpt.core.errors import InputError
from xgpt.core.workload import Floats, gamma_arrivals


class RateStage(NamedTuple):
    """A period in which requests arrive at one rate.

    Attributes:
        rate_per_s: mean requests a second.
        seconds: its length. None means that it never ends.
    """

    rate_per_s: float
    seconds: float | None = None


@dataclass(frozen=True)
class ArrivalProcess:
    """A random process of arrivals at one rate, or at several rates in turn.

    Attributes:
        stages: at least one. The rate of the last stage continues for ever.
        burstiness: coefficient of variation of the gaps between arrivals: 1 for Poisson arrivals, above for bursts.
    """

    stages: tuple[RateStage, ...]
    burstiness: float = 1.0

    @classmethod
    def at(cls, rate: float | Sequence[tuple[float, float | None]], burstiness: float = 1.0) -> ArrivalProcess:
        """Return the process of one rate, or of stages.

        Raises:
            InputError: a rate or a time is not positive, or a stage before the last one has no end.
        """
        given = [(rate, None)] if isinstance(rate, int | float) else list(rate)
        stages = tuple(RateStage(*rate_stage) for rate_stage in given)
        for stage in stages:
            for value in stage:
                if value is not None and not (value > 0 and math.isfinite(value)):
                    raise InputError("arrival_rate_per_s", value, "it must be a positive number")
        if not stages or any(stage.seconds is None for stage in stages[:-1]):
            raise InputError("arrival_rate_per_s", rate, "every stage except the last needs seconds: RATE:SECONDS,RATE")
        return cls(stages, burstiness)

    @property
    def num_requests(self) -> int | None:
        """Expected number of requests in all stages, or None if the last one has no end."""
        total = sum(stage.rate_per_s * (stage.seconds or math.inf) for stage in self.stages)
        return max(1, round(total)) if math.isfinite(total) else None

    def mean_rate(self, n: int) -> float:
        """Return the mean rate at which the first n requests arrive."""
        seconds = 0.0
        left = float(n)
        for stage in self.stages:
            inside = left if stage.seconds is None else min(left, stage.rate_per_s * stage.seconds)
            seconds, left = seconds + inside / stage.rate_per_s, left - inside
        return n / (seconds + left / self.stages[-1].rate_per_s)

    def times(self, n: int, rng: np.random.Generator, share: float = 1.0) -> Floats:
        """Return the arrival times, in s, of the first n requests at a server that gets this share of all requests. #
        [n]

        Raises:
            InputError: the variation is not positive.
        """
        work = gamma_arrivals(1.0, n, self.burstiness, rng)
        rates = np.asarray([share * stage.rate_per_s for stage in self.stages])
        seconds = np.asarray([stage.seconds or 0.0 for stage in self.stages[:-1]])
        starts_s = np.concatenate([[0.0], np.cumsum(seconds)])
        reached = np.concatenate([[0.0], np.cumsum(rates[:-1] * seconds)])
        stage = np.searchsorted(reached, work, side="right") - 1
        times: Floats = starts_s[stage] + (work - reached[stage]) / rates[stage]
        return times
