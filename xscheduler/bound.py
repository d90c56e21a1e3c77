"""Upper bounds on the throughput of a box of settings, on tables that never fall and get ever cheaper per unit.

On such tables (xscheduler.minorant) the directions of rra, orca and chunked hold: a larger batch never costs more per
request, and more decode iterations a phase never cost less. So no point of a box exceeds its fast corner there, even
where that corner itself does not fit in memory. The batches of static and of waa's encode lane have no such direction:
what each of them serves a period is bounded from its largest, and the period from its smallest settings. As boxes
shrink the bounds close on what is predicted; and because a box is left out once its slowest corner breaks a latency
bound, what remains open is what the constraint allows. What whole placements can reach is in xscheduler.screen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from xsimulator.analytic import TwoLaneModel

if TYPE_CHECKING:
    from xscheduler.space import Evaluation, Space

Array = npt.NDArray[np.float64]

BOUND = "fast corners of boxes on monotone tables below the profile, least iteration times of placements"
SLACK = 0.002
"""By how much predictions may miss the directions of their tables: closed forms put iterations together."""


def box_bounds(space: Space, evaluation: Evaluation, floor: Evaluation, corners: int, fast: int | None) -> Array:
    """Throughput, all replicas together, that no point of each box exceeds.

    Args:
        evaluation, floor: predictions of the boxes' corners, on the profile and on its minorant; `corners` a box, the
            one with all values at their lowest first and at their highest last.
        fast: which of them is the fast one; None where there is none.
    """
    most, least, model = evaluation.performance, floor.performance, space.models.floor
    low, high = slice(0, None, corners), slice(corners - 1, None, corners)
    if fast is not None:
        return np.minimum(floor.throughput[fast::corners] * (1 + SLACK), space.bound)
    if isinstance(model, TwoLaneModel):
        micro = np.full(len(most.throughput[high]), float(space.placement.microbatches))
        encode, _ = model.limits(most.encode_batch[high], most.peak_requests[high], micro)
        _, decode = model.limits(most.encode_batch[low], most.peak_requests[high], micro)
        per_replica = np.minimum(encode, decode)
    else:
        per_replica = most.encode_batch[high] / least.cycle[low]
    return np.minimum(space.placement.replicas * per_replica * (1 + SLACK), space.bound)
