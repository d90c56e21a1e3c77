"""Find the smallest number of devices that sustains an arrival rate, and the cheapest of several clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from xgpt.core.errors import InfeasibleError, InputError
from xscheduler.objectives.reusing import FindEach
from xscheduler.problem import Problem


@dataclass(frozen=True)
class ClusterChoice:
    """A cluster, the number of its devices that sustains the arrival rate, and the price of these devices.

    Attributes:
        num_devices: the smallest number of devices that sustains the arrival rate, or None if all devices do not
            sustain it.
        price_per_hour: price of these devices for an hour, or None if the rate is not sustained.
        why_not: the error if the rate is not sustained.
        why_not_fewer: see `Fewest`.
    """

    problem: Problem
    num_devices: int | None
    price_per_hour: float | None
    why_not: str | None
    why_not_fewer: str = ""


class Fewest(NamedTuple):
    """The smallest number of devices that sustains a rate, and why one device fewer is not enough ("" if the number is
    1).
    """

    number: int
    why_not_fewer: str


def fewest_devices(problem: Problem, find_each: FindEach) -> Fewest:
    """Return the smallest number of the cluster's devices on which a plan keeps the constraint at the arrival rate.

    Args:
        find_each: returns each policy's best plan, with the policy, search and order that the final plan will have.

    Raises:
        InfeasibleError: all devices together do not sustain the rate.
    """
    low, high, why = 1, problem.cluster.num_devices, ""
    find_each(replace(problem, max_devices=high))
    while low < high:
        middle = (low + high) // 2
        try:
            find_each(replace(problem, max_devices=middle))
            high = middle
        except InfeasibleError as error:
            low, why = (
                middle + 1,
                f"{middle} device{'s' * (middle > 1)} {'are' if middle > 1 else 'is'} not enough: {error}",
            )
    return Fewest(high, why)


def cheapest(problems: Sequence[Problem], find_each: FindEach) -> list[ClusterChoice]:
    """Return for each cluster the smallest number of devices that sustains the arrival rate, sorted by price.

    Clusters that do not sustain the rate come last.

    Args:
        find_each: see `fewest_devices`.

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
            num_devices, why_not_fewer = fewest_devices(problem, find_each)
        except InfeasibleError as error:
            choices.append(ClusterChoice(problem, None, None, str(error)))
            continue
        choices.append(ClusterChoice(problem, num_devices, price * num_devices, None, why_not_fewer))
    return sorted(choices, key=lambda choice: (choice.price_per_hour is None, choice.price_per_hour or 0.0))
