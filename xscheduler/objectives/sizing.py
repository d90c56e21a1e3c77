"""Find the smallest number of devices that sustains an arrival rate, and the cheapest of several clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.numbers import rounded_down
from xscheduler.problem import Problem

LESS_SURE = "less sure than wanted"
MOST_GUESSES = 3
"""Number of guesses of the smallest number before bisection."""


class Judged(NamedTuple):
    """How surely the best plan on a number of devices sustains the rate, and why not more surely, in words.

    Attributes:
        needed: number of devices that this plan's rate per device would need, or 0 if it is not known.
        unverified: what of the plan measurements do not verify, in words.
        kept_per_s: if the plan does not sustain the rate, the highest rate at which it keeps the bounds; 0: not known.
    """

    confidence: float
    why_not: str = ""
    needed: int = 0
    unverified: tuple[str, ...] = ()
    kept_per_s: float = 0.0


Judge = Callable[[int], Judged]
"""Judges a number of devices. Raises InfeasibleError if no plan keeps the constraint."""


class Fewest(NamedTuple):
    """The smallest number of devices that sustains a rate with the wanted confidence."""

    number: int
    tried: tuple[tuple[int, Judged], ...] = ()

    @property
    def judged(self) -> Judged:
        return dict(self.tried)[self.number]

    @property
    def why_not_fewer(self) -> str:
        """Why one device fewer is not enough. "" if the number is 1."""
        below = self.number - 1
        if not below:
            return ""
        judged, devices = dict(self.tried)[below], f"{below} device{'s are' if below > 1 else ' is'}"
        return f"{devices} {'less sure' if judged.confidence else 'not enough'}: {judged.why_not}"


@dataclass(frozen=True)
class ClusterChoice:
    """A cluster, the number of its devices that sustains the arrival rate, and the price of these devices."""

    problem: Problem
    fewest: Fewest | None
    price_per_hour: float | None
    why_not: str = ""


def _in_words(error: InfeasibleError) -> str:
    return error.reason or str(error).partition(": ")[2]


def fewest_devices(most: int, judge: Judge, wanted: float) -> Fewest:
    """Return the smallest number of devices on which a plan sustains the rate with the wanted confidence.

    If no number reaches the wanted confidence, return the smallest number with the highest one, as far as words say it.
    """
    tried = {most: judge(most)}
    if not tried[most].confidence:
        raise InfeasibleError(f"arrival_rate_per_s: {tried[most].why_not}", binding="arrival_rate_per_s")
    wanted = min(wanted, rounded_down(tried[most].confidence))

    def is_enough(number: int) -> bool:
        try:
            tried[number] = judge(number)
        except InfeasibleError as error:
            tried[number] = Judged(0.0, _in_words(error), kept_per_s=error.kept_per_s)
        return tried[number].confidence >= wanted

    below, enough, guess = 0, most, tried[most].needed
    while enough - below > 1:
        is_guessed = below < guess < enough and len(tried) <= MOST_GUESSES
        number = guess if is_guessed else (below + enough) // 2
        if is_enough(number):
            enough, guess = number, number - 1
        else:
            below, guess = number, number + 1
    return Fewest(enough, tuple(_rising(tried)))


def _rising(tried: Mapping[int, Judged]) -> Iterator[tuple[int, Judged]]:
    """Yield the numbers, rising. A plan for fewer devices also runs on more, so these are judged no worse."""
    best = Judged(0.0)
    for number, judged in sorted(tried.items()):
        is_slower = judged.confidence == best.confidence and 0 < judged.kept_per_s < best.kept_per_s
        best = best if judged.confidence < best.confidence or is_slower else judged
        yield number, judged._replace(confidence=best.confidence, why_not=best.why_not)


def cheapest(problems: Sequence[Problem], judges: Sequence[Judge], wanted: float) -> list[ClusterChoice]:
    """Return for each cluster the smallest number of devices that sustains the arrival rate: first the clusters that
    sustain it with the wanted confidence, by price, then those that do so less surely, last those that do not.
    """
    ranked = list[tuple[int, float, ClusterChoice]]()
    for problem, judge in zip(problems, judges, strict=True):
        price = problem.cluster.price_per_device_hour
        if price is None:
            says = "it has no price: write it as NAME=PRICE in `among`, the price of a device for an hour"
            raise InputError("cluster", problem.cluster.name, says)
        try:
            fewest = fewest_devices(problem.cluster.num_devices, judge, wanted)
        except InfeasibleError as error:
            ranked.append((2, 0.0, ClusterChoice(problem, None, None, _in_words(error))))
            continue
        unsure = fewest.judged.confidence < wanted
        cost = price * fewest.number
        ranked.append((int(unsure), cost, ClusterChoice(problem, fewest, cost, "costs more")))
    ranked.sort(key=lambda each: each[:2])
    choices = [replace(choice, why_not=LESS_SURE) if ranked[0][0] < rank == 1 else choice for rank, _, choice in ranked]
    first, *others = choices
    return choices if first.fewest is None else [replace(first, why_not=""), *others]
