"""The experts that a step's tokens are sent to, and what grouped products cost beyond the products of their tokens.

A step of n tokens reads the weights of those experts alone that at least one token is routed to. Where each expert is
on one device of a group, the busiest device decides how long the group takes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xgpt.core.schema import Experts

Array = npt.NDArray[np.float64]


def chances(experts: Experts) -> Array:
    """Return by which chance a token is routed to each expert, the likeliest first. They add up to `active`.

    Shares are quantiles of the power law x ** -skew between 1 and the number of experts; no expert sees a token twice.
    """
    number, active = experts.number, experts.active
    if not experts.skew:
        return np.full(number, active / number)
    share = 1 - (np.arange(number) + 0.5) / number
    power = 1 - experts.skew
    shares = number**share if abs(power) < 1e-9 else (1 + share * (number**power - 1)) ** (1 / power)
    found = active * shares / shares.sum()
    for _ in range(number):  # what exceeds one goes to the others
        over = found > 1
        if not over.any():
            break
        rest = ~over & (found < 1)
        found[over] = 1
        found[rest] *= (active - (~rest).sum()) / found[rest].sum()
    return found


class Routing:
    """The busiest device of a group of which each has `number / ep_degree` whole experts, or a slice of each.

    Experts are dealt to the devices in turn, the likeliest first. Beyond what that leaves uneven, chance gives one
    device more than another: with r routings of one token to one expert, the busiest of t devices has about
    sqrt(2 r (t - 1) ln t) / t more than the mean. These count as further tokens.
    """

    def __init__(self, experts: Experts, ep_degree: int = 1) -> None:
        self._of_token = float(experts.active)
        self._ep_degree = ep_degree
        self._chances = chances(experts)[::ep_degree]

    def unevenness(self, tokens: npt.ArrayLike) -> Array:
        """Return how many times the mean of all devices the busiest has to do by chance. # [n] -> [n]"""
        ep = self._ep_degree
        spread = np.sqrt(2 * (ep - 1) * np.log(ep) / (self._of_token * np.asarray(tokens, float)))
        return np.minimum(1 + spread, ep)

    def expected(self, tokens: float) -> tuple[Array, Array]:
        """Return the tokens of each of its experts, and the chance that there is one. # two of [experts]"""
        tokens = tokens * float(self.unevenness(tokens))
        missed = (1 - np.minimum(self._chances, 1 - 1e-12)) ** tokens
        return tokens * self._chances, 1 - missed
