"""How many devices, and of which cluster, an arrival rate takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from xgpt.app.planning import PolicyChoice, Subject, plan_each
from xgpt.errors import InfeasibleError, InputError
from xgpt.schema import Constraint, KvPromise

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Choice:
    """One of several clusters.

    Attributes:
        num_devices: the fewest that sustain the arrival rate; None where all of them do not.
        price_per_hour: of so many.
        why_not: where they do not.
    """

    subject: Subject
    num_devices: int | None
    price_per_hour: float | None
    why_not: str | None


def fewest_devices(
    subject: Subject, constraint: Constraint, policy: PolicyChoice = "auto", kv: KvPromise = "reserve"
) -> int:
    """The smallest number of the cluster's devices that sustains the arrival rate under the constraint.

    Raises:
        InfeasibleError: all of them together do not.
    """
    low, high = 1, subject.cluster.num_devices
    plan_each(subject, constraint, policy, kv=kv, max_devices=high)
    while low < high:
        middle = (low + high) // 2
        try:
            plan_each(subject, constraint, policy, kv=kv, max_devices=middle)
            high = middle
        except InfeasibleError:
            low = middle + 1
    return high


def cheapest(
    subjects: Sequence[Subject], constraint: Constraint, policy: PolicyChoice = "auto", kv: KvPromise = "reserve"
) -> list[Choice]:
    """What the fewest devices of each cluster that sustain the arrival rate cost, the cheapest first.

    Clusters that do not sustain it come last.

    Raises:
        InputError: a cluster without a price.
    """
    choices = []
    for subject in subjects:
        price = subject.cluster.price_per_device_hour
        if price is None:
            raise InputError("cluster", subject.cluster.name, "it has no price of a device for an hour")
        try:
            num_devices = fewest_devices(subject, constraint, policy, kv)
        except InfeasibleError as error:
            choices.append(Choice(subject, None, None, str(error)))
            continue
        choices.append(Choice(subject, num_devices, price * num_devices, None))
    return sorted(choices, key=lambda choice: (choice.price_per_hour is None, choice.price_per_hour or 0.0))
