"""Choose the replica for a request: the one that was last sent the prompt's prefix, unless it is much busier than
another.
"""

from __future__ import annotations

from collections import OrderedDict

from xgpt.core.schema import PlanDraft
from xgpt.core.schema.step_log import Chain

BLOCKS_A_KEY = 4
"""Number of K/V blocks for each key."""
MOST_KEYS = 131_072
SLACK = 0.5
"""The replica that has cached a request's whole prompt gets the request, unless it has many more requests than the
replica with the fewest. The difference may be at most this share of the requests that a replica runs at once. If the
replica has cached only a fraction of the prompt, the share is multiplied by the square of this fraction, since less
work is saved.
"""


class ReplicaRouter:
    """Routes requests by the number of requests at each replica, and by where the prompt's prefix was last sent."""

    def __init__(self, count: int, slack: float) -> None:
        self.load = [0] * count
        self.slack = slack
        self._home: OrderedDict[bytes, int] = OrderedDict()

    @classmethod
    def of(cls, plan: PlanDraft) -> ReplicaRouter:
        return cls(plan.replicas, max(1.0, SLACK * plan.estimate.decode_batch))

    def route(self, chain: Chain) -> int:
        load, home = self.load, self._home
        least = min(load)
        found = next((count for count in range(len(chain), 0, -1) if chain[count - 1] in home), 0)
        number = home[chain[found - 1]] if found else load.index(least)
        if found and load[number] - least > self.slack * (found / len(chain)) ** 2:
            number = load.index(least)
        for key in chain:
            home[key] = number
            home.move_to_end(key)
        while len(home) > MOST_KEYS:
            home.popitem(last=False)
        load[number] += 1
        return number

    def leave(self, number: int) -> None:
        self.load[number] -= 1
