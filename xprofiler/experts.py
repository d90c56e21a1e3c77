"""Compute the expected load of experts, for the cost of a step.

A step reads the weights of only those experts to which at least one token is routed. If each expert is on one device of
a group, the busiest device determines the group's time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xgpt.core.schema import Experts

Array = npt.NDArray[np.float64]


def chances(experts: Experts) -> Array:
    """Return the probability that a token is routed to each expert, the highest first. They add up to `active`. #
    [experts]

    Shares are quantiles of the power law x ** -skew between 1 and the number of experts; no expert sees a token twice.
    """
    number, active = experts.number, experts.active
    if not experts.skew:
        return np.full(number, active / number)
    share = 1 - (np.arange(number) + 0.5) / number
    power = 1 - experts.skew
    shares = number**share if abs(power) < 1e-9 else (1 + share * (number**power - 1)) ** (1 / power)
    found = active * shares / shares.sum()
    for _ in range(number):  # probability above one is distributed among the other experts
        over = found > 1
        if not over.any():
            break
        rest = ~over & (found < 1)
        found[over] = 1
        found[rest] *= (active - (~rest).sum()) / found[rest].sum()
    return found


class Routing:
    """The load of the busiest device of a group in which each device has `number / ep_degree` whole experts or slices.

    Experts are assigned to the devices in turn, the likeliest first. Besides that imbalance, chance gives some devices
    more tokens: if r is the number of pairs of a token and an expert that it is routed to, the busiest of t devices has
    about sqrt(2 r (t - 1) ln t) / t more pairs than the mean. These count as further tokens.
    """

    def __init__(self, experts: Experts, ep_degree: int = 1) -> None:
        self._of_token = float(experts.active)
        self._ep_degree = ep_degree
        self._chances = chances(experts)[::ep_degree]

    def unevenness(self, tokens: npt.ArrayLike) -> Array:
        """Return the ratio of the busiest device's work to the mean, as far as it is due to chance. # [n] -> [n]"""
        ep = self._ep_degree
        spread = np.sqrt(2 * (ep - 1) * np.log(ep) / (self._of_token * np.asarray(tokens, float)))
        return np.minimum(1 + spread, ep)

    def expected(self, tokens: float) -> tuple[Array, Array]:
        """Return the expected number of tokens of each of the device's experts, and the probability that an expert has
        any token. # [experts] each
        """
        tokens = tokens * float(self.unevenness(tokens))
        missed = (1 - np.minimum(self._chances, 1 - 1e-12)) ** tokens
        return tokens * self._chances, 1 - missed
