"""Find the smallest number of devices that sustains an arrival rate, and the cheapest of several clusters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.schema import PlanDraft
from xscheduler.objectives.reusing import FindEach
from xscheduler.problem import Problem


@dataclass(frozen=True)
class ClusterChoice:
    """A cluster, the number of its devices that sustains the arrival rate, and the price of these devices.

    Attributes:
        num_devices: the smallest number of devices that sustains the arrival rate, or None if all devices do not
            sustain it.
        why_not_fewer, tried: see `Fewest`.
    """

    problem: Problem
    num_devices: int | None
    price_per_hour: float | None
    why_not: str | None
    why_not_fewer: str = ""
    tried: tuple[tuple[int, float], ...] = ()


Confidence = Callable[[PlanDraft], float]
"""Returns the probability that a plan sustains the rate."""


class Fewest(NamedTuple):
    """The smallest number of devices that sustains a rate with the wanted confidence.

    Attributes:
        why_not_fewer: why one device fewer is not enough. "" if the number is 1.
        tried: the confidence of each number that was tried, rising. 0 means that the rate is not even predicted.
    """

    number: int
    why_not_fewer: str
    tried: tuple[tuple[int, float], ...] = ()


def fewest_devices(problem: Problem, find_each: FindEach, confidence: Confidence, wanted: float) -> Fewest:
    """Return the smallest number of the cluster's devices on which a plan keeps the constraint at the arrival rate.

    If no number reaches the wanted confidence, return the smallest number with the highest confidence.

    Args:
        wanted: probability with which the plan must sustain the rate.

    Raises:
        InfeasibleError: all devices together do not sustain the rate.
    """
    tried, why = dict[int, float](), dict[int, str]()

    def of(number: int) -> float:
        try:
            tried[number] = confidence(next(iter(find_each(replace(problem, max_devices=number)).values())).draft)
        except InfeasibleError as error:
            tried[number], why[number] = 0.0, str(error)
            if number == problem.cluster.num_devices:
                raise
        return tried[number]

    low, high = 1, problem.cluster.num_devices
    wanted = min(wanted, of(high))
    while low < high:
        middle = (low + high) // 2
        if of(middle) >= wanted:
            high = middle
        else:
            low = middle + 1
    below = high - 1
    devices = f"{below} device{'s are' if below > 1 else ' is'} not enough"
    reason = why.get(below, f"they sustain the rate in {100 * tried.get(below, 0):.0f} of 100 cases")
    return Fewest(high, f"{devices}: {reason}" if below else "", tuple(sorted(tried.items())))


def cheapest(
    problems: Sequence[Problem], find_each: FindEach, confidence: Callable[[Problem], Confidence], wanted: float
) -> list[ClusterChoice]:
    """Return for each cluster the smallest number of devices that sustains the arrival rate, sorted by price.

    Clusters that do not sustain the rate come last.

    Raises:
        InputError: the cluster of a problem states no price.
    """
    choices = []
    for problem in problems:
        price = problem.cluster.price_per_device_hour
        if price is None:
            raise InputError(
                "cluster",
                problem.cluster.name,
                "it has no price: write it as NAME=PRICE in `among`, the price of a device for an hour",
            )
        try:
            num_devices, why_not_fewer, tried = fewest_devices(problem, find_each, confidence(problem), wanted)
        except InfeasibleError as error:
            choices.append(ClusterChoice(problem, None, None, str(error)))
            continue
        choices.append(ClusterChoice(problem, num_devices, price * num_devices, None, why_not_fewer, tried))
    return sorted(choices, key=lambda choice: (choice.price_per_hour is None, choice.price_per_hour or 0.0))
