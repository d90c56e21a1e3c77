"""Compute the expected load of experts, for the cost of a step.

A step reads the weights of only those experts to which at least one token is routed. If a group's devices hold
different experts, the busiest device determines the group's time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xgpt.core.schema import Experts

Array = npt.NDArray[np.float64]


def chances(experts: Experts) -> Array:
    """Return each expert's probability that a token is routed to it, highest first. The sum is `active`. # [experts]

    The experts' shares are quantiles of the power law x ** -skew between 1 and the number of experts, limited to a
    probability of 1.
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
    """Computes the load of a group's busiest device. Each device has `number / ep_degree` whole experts or slices.

    Experts are assigned to devices in turn, the likeliest first. Chance makes the loads still less equal: if the tokens
    are routed to r experts in all, the busiest of t devices gets about sqrt(2 r (t - 1) ln t) / t more of them than the
    mean. The class counts this as further tokens.
    """

    def __init__(self, experts: Experts, ep_degree: int = 1) -> None:
        self._of_token = float(experts.active)
        self._ep_degree = ep_degree
        self._chances = chances(experts)[::ep_degree]

    def unevenness(self, tokens: npt.ArrayLike) -> Array:
        """Return by what factor the busiest device has more work than the mean because of chance. # [n] -> [n]"""
        ep = self._ep_degree
        spread = np.sqrt(2 * (ep - 1) * np.log(ep) / (self._of_token * np.asarray(tokens, float)))
        return np.minimum(1 + spread, ep)

    def expected(self, tokens: float) -> tuple[Array, Array]:
        """Return, for each of the device's experts, the expected number of tokens and the probability of at least one
        token. # [experts] each
        """
        tokens = tokens * float(self.unevenness(tokens))
        missed = (1 - np.minimum(self._chances, 1 - 1e-12)) ** tokens
        return tokens * self._chances, 1 - missed
