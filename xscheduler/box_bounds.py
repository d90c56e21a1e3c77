"""Compute upper bounds on the throughput of a box of settings (a range of each variable) from the lower tables.

On these tables (xscheduler.lower_tables) rra, orca and chunked are monotone: a larger batch never costs more per
request, and more decode iterations a phase never cost less. So no point of a box has a higher throughput than the box's
fast corner, even if this corner does not fit in memory. There is one exception. In rra on several stages, some stages
idle during the last decode steps before an encode phase, and more iterations make these steps smaller. These smaller
steps may shorten a point's cycle by up to the idle time, so the point's throughput may exceed the corner's. Batches of
static and of waa's encode lane are not monotone. For them, the largest settings bound the requests served in a period,
and the smallest settings bound the period. If waa's cap on running requests allows only a few encode batches,
throughput exceeds the closed form, and Little's law is the bound. A box is dropped once its slow corner breaks a
latency bound. xscheduler.placement_bounds bounds whole placements.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from xscheduler.space import Array, Evaluation, Ints, Space
from xscheduler.tolerances import TOLERANCES

CORNER = "the fastest corner of each box of settings and the shortest iteration of each placement, from monotone tables"
SLACK = 0.002
"""Predictions may fail to be monotone by at most this share: the tables are monotone, but closed forms merge
iterations.
"""


def ends_of(space: Space) -> tuple[int, int | None]:
    """Return the indices of a box's slow corner (lowest latency) and fast corner (highest throughput).

    The second index is None unless throughput is known to rise or fall with each variable.
    """
    slow = fast = 0
    for axis in space.searched:
        slow = 2 * slow + (axis.variable.latency == "falls")
        fast = 2 * fast + (axis.variable.throughput == "rises")
    directed = all(axis.variable.throughput != "none" for axis in space.searched)
    return slow, fast if directed else None


def least_excess(space: Space, floor: Evaluation, corners: int, slow: int) -> Array:
    """Return, for each box, a lower bound on `Evaluation.excess` of its points."""
    micro, models, box_latencies = float(space.placement.microbatches), space.models, space.forecast.box_latencies
    return floor.excess_at(
        np.arange(slow, len(floor.left), corners),
        lambda: box_latencies(models.floor, lambda: floor.lesser, floor.performance, corners, micro),
        _most_left(floor, corners),
    )


def _most_left(floor: Evaluation, corners: int) -> Array:
    return floor.left.reshape(-1, corners).max(axis=1)


def box_bounds(space: Space, evaluation: Evaluation, floor: Evaluation, corners: int, fast: int | None) -> Array:
    """Return an upper bound on the throughput of the points of each box, all replicas together."""
    low, high = slice(0, None, corners), slice(corners - 1, None, corners)
    if fast is not None:
        return np.minimum(floor.throughput[fast::corners] * _saved(floor, corners, fast) * (1 + SLACK), space.bound)
    least, most, on_floor = evaluation.lesser.take(low), evaluation.performance.take(high), floor.lesser.take(low)
    micro = np.full(len(most.encode_batch), float(space.placement.microbatches))
    left = _most_left(floor, corners)
    latency_s = np.where(left > 0, space.constraint.allowed_latency_s, 0.0) * np.where(left > 0, left, 1.0)
    per_replica = space.forecast.box_throughput(space.models.floor, least, most, on_floor, micro, latency_s)
    return np.minimum(space.placement.replicas * per_replica * (1 + SLACK), space.bound)


def _saved(floor: Evaluation, corners: int, fast: int) -> Array:
    performance = floor.performance
    share = (performance.filling[fast::corners] - performance.filling[corners - 1 :: corners]) / performance.cycle[
        fast::corners
    ]
    return 1 / (1 - np.minimum(np.maximum(share, 0.0), performance.bubble[fast::corners]))


def breach(space: Space, num_boxes: int, rng: np.random.Generator) -> float:
    """Draw random boxes and a point in each. Return the largest share by which a point's throughput exceeds the bound
    of its box.

    The share is infinite if the search would drop a box for its slow corner although the drawn point is feasible. It is
    0 if all bounds are valid.
    """
    branches = space.branches()
    branch = rng.integers(len(branches), size=num_boxes)
    columns: dict[str, Ints] = {
        axis.variable.name: np.asarray([branches[b][axis.variable.name] for b in branch]) for axis in space.enumerated
    }
    ends = {axis.variable.name: np.sort(rng.choice(axis.values, (num_boxes, 3)), axis=1) for axis in space.searched}
    corners = list(product((0, 2), repeat=len(ends)))
    boxes = {name: np.repeat(column, len(corners)) for name, column in columns.items()}
    for i, (name, values) in enumerate(ends.items()):
        boxes[name] = values[:, [corner[i] for corner in corners]].ravel()
    plain = space.under(space.constraint, space.bound)
    inside = plain.evaluate(columns | {name: values[:, 1] for name, values in ends.items()})
    evaluation = space.evaluate(boxes)
    floor = space.evaluate_floor(boxes, evaluation)
    slow, fast = ends_of(space)
    bounds = box_bounds(space, evaluation, floor, len(corners), fast)
    left_out = ~evaluation.in_memory[slow :: len(corners)]
    left_out |= least_excess(space, floor, len(corners), slow) > TOLERANCES.latency
    beaten = np.where(left_out, np.inf, inside.throughput / np.maximum(bounds, 1e-300) - 1)
    return float(np.where(inside.feasible, beaten, 0.0).max(initial=0.0))
