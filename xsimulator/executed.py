"""Compare executed steps with what was predicted of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xgpt import policies
from xgpt.policies import Step
from xgpt.schema import Plan, Profile
from xgpt.schema.step_log import StepRecord
from xsimulator.clock import step_counts
from xsimulator.costs.step_cost import lanes_of
from xsimulator.costs.step_counts import StepCounts
from xsimulator.events import replay

Array = npt.NDArray[np.float64]


class Executed(NamedTuple):
    """A step of a log.

    Attributes:
        seconds: that its lane was busy with it, from the end of the step before it where that came later.
    """

    record: StepRecord
    counts: StepCounts
    seconds: float


class Paces(NamedTuple):
    """Steps against their predictions. # each [steps]

    Attributes:
        measured_s, predicted_s: what each took, and was to take.
        tokens: in each.
    """

    measured_s: Array
    predicted_s: Array
    tokens: Array

    @property
    def ratio(self) -> float:
        """How many times as long as predicted all steps together took: the machine's pace."""
        return float(self.measured_s.sum() / self.predicted_s.sum())

    def where(self, mask: npt.NDArray[np.bool_]) -> Paces:
        """Return some of the steps."""
        return Paces(self.measured_s[mask], self.predicted_s[mask], self.tokens[mask])


def executed(plan: Plan, log: Sequence[StepRecord]) -> list[Executed]:
    """Return the steps of a log with what their cost depends on, as far as it replays; transfers are left out.

    A log of several replicas is replayed as that of each, one after the other.
    """
    logs = [[record for record in log if record.replica == number] for number in range(plan.replicas)]
    return [step for of_one in logs for step in _of_replica(plan, of_one)]


def _of_replica(plan: Plan, log: Sequence[StepRecord]) -> list[Executed]:
    schedule = policies.build(plan)
    last_end_ns: dict[str, int] = {}
    busy: dict[int, float] = {}
    for record in log:
        busy[record.number] = (record.end_ns - max(record.start_ns, last_end_ns.get(record.lane, 0))) / 1e9
        last_end_ns[record.lane] = record.end_ns
    found: list[Executed] = []

    def note(record: StepRecord, step: Step) -> None:
        if step.lane != "transfer":
            has_encoder = plan.model.is_encoder_decoder
            counts = step_counts(schedule, step, has_encoder=has_encoder)
            found.append(Executed(record, counts, busy[record.number]))

    replay(schedule, log, note)
    return found


def paces(
    plan: Plan, profile: Profile, log: Sequence[StepRecord], within: Sequence[StepRecord] | None = None
) -> Paces | None:
    """Compare the steps of a log with their predictions; None where a lane has several stages, whose steps also wait
    for each other, or nothing was executed.

    Args:
        within: the steps of the log that count; None: all.
    """
    lanes = lanes_of(plan, profile)
    if any(lane.num_stages > 1 for lane in lanes.values()):
        return None
    numbers = {(record.replica, record.number) for record in (log if within is None else within)}
    steps = [step for step in executed(plan, log) if (step.record.replica, step.record.number) in numbers]
    if not steps:
        return None
    measured = [step.seconds for step in steps]
    predicted = [lanes[step.record.lane].step(step.counts)[0] for step in steps]  # type: ignore[index]
    return Paces(np.asarray(measured), np.asarray(predicted), np.asarray([float(s.counts.num_tokens) for s in steps]))
