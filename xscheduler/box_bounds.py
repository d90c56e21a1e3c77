"""Compute upper bounds on the throughput of a box of settings, on the lower tables.

On these tables (xscheduler.lower_tables) rra, orca and chunked are monotone: a larger batch never costs more per
request, and more decode iterations a phase never cost less. So no point of a box exceeds the box's fast corner, even if
that corner does not fit in memory. There is one exception: in rra on several stages, the last decode steps before an
encode phase go through all stages while some stages idle, and more iterations make these steps smaller. So a point may
have a higher throughput than the corner: smaller steps may shorten its cycle, at most by the idle time. Batches of
static and of waa's encode lane are not monotone: the largest settings bound the requests served in a period, and the
smallest settings bound the period. If waa's cap on running requests holds only a few encode batches, throughput exceeds
the closed form, and Little's law is the bound. As boxes shrink, the bounds approach the predictions. A box is dropped
once its slow corner breaks a latency bound, so the remaining boxes are those that the constraint allows.
xscheduler.placement_bounds bounds whole placements.

These bounds are tested: `breach` draws random boxes and points inside them, and if a point exceeds the bound of its
box, a search that needs no bounds is used instead.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from xscheduler.space import Array, Evaluation, Ints, Space

BOUND = "the fastest corner of each box of settings and the shortest iteration of each placement, from monotone tables"
SLACK = 0.002
"""Share by which predictions may deviate from the monotone directions of their tables, because closed forms merge
iterations.
"""

LATENCY_TOLERANCE = 0.01
"""A box is dropped if its slow corner breaks a bound by more than this share."""


def ends_of(space: Space) -> tuple[int, int | None]:
    """Return the index of the corner with the lowest latency, and that of the corner with the highest throughput.

    The second index is None unless the directions of all variables are known."""
    slow = fast = 0
    for axis in space.searched:
        slow = 2 * slow + (axis.variable.latency == "falls")
        fast = 2 * fast + (axis.variable.throughput == "rises")
    directed = all(axis.variable.throughput != "none" for axis in space.searched)
    return slow, fast if directed else None


def least_excess(space: Space, floor: Evaluation, corners: int, slow: int) -> Array:
    """Return the least share by which the points of each box break the constraint."""
    micro, models, box_latencies = float(space.placement.microbatches), space.models, space.forecast.box_latencies
    return floor.excess_at(
        np.arange(slow, len(floor.left), corners),
        lambda: box_latencies(models.floor, lambda: floor.lesser, floor.performance, corners, micro),
    )


def box_bounds(space: Space, evaluation: Evaluation, floor: Evaluation, corners: int, fast: int | None) -> Array:
    """Return the throughput, all replicas together, that no point of each box exceeds.

    Args:
        evaluation, floor: predictions of the boxes' corners, on the profile and on its lower tables. Each box has
            `corners` entries: the corner with the lowest values first, the one with the highest last.
        fast: index of the fast corner, or None if there is none.
    """
    low, high = slice(0, None, corners), slice(corners - 1, None, corners)
    if fast is not None:
        return np.minimum(floor.throughput[fast::corners] * _saved(floor, corners, fast) * (1 + SLACK), space.bound)
    least, most, on_floor = evaluation.lesser.take(low), evaluation.performance.take(high), floor.lesser.take(low)
    micro = np.full(len(most.throughput), float(space.placement.microbatches))
    per_replica = space.forecast.box_throughput(
        space.models.floor, least, most, on_floor, micro, space.constraint.allowed_latency_s
    )
    return np.minimum(space.placement.replicas * per_replica * (1 + SLACK), space.bound)


def _saved(floor: Evaluation, corners: int, fast: int) -> Array:
    """Return the factor by which a box's points may exceed the fast corner's throughput because of steps in which the
    pipeline drains.
    """
    performance = floor.performance
    share = (performance.filling[fast::corners] - performance.filling[corners - 1 :: corners]) / performance.cycle[
        fast::corners
    ]
    return 1 / (1 - np.minimum(np.maximum(share, 0.0), performance.bubble[fast::corners]))


def breach(space: Space, num_boxes: int, rng: np.random.Generator) -> float:
    """Return the largest share by which a random point beats the bound of a random box around it.

    The share is infinite if the search would drop a box because of its slow corner's memory or latency although the
    point keeps both limits. With sound bounds and directions it is 0 for every draw.
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
    left_out |= least_excess(space, floor, len(corners), slow) > LATENCY_TOLERANCE
    beaten = np.where(left_out, np.inf, inside.throughput / np.maximum(bounds, 1e-300) - 1)
    return float(np.where(inside.feasible, beaten, 0.0).max(initial=0.0))
