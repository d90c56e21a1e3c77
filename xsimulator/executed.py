"""Compare the measured times of executed steps with predicted times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xgpt.core import policies
from xgpt.core.policies import Rule, Step
from xgpt.core.schema import PlanDraft, Profile
from xgpt.core.schema.step_log import StepRecord
from xsimulator.clock import step_counts
from xsimulator.costs.step_cost import StepCounts, lanes_of
from xsimulator.events import replay

Array = npt.NDArray[np.float64]
BETWEEN_NS = 5_000_000
"""Longest gap between consecutive steps of a busy engine."""


class Executed(NamedTuple):
    """A step of a log.

    Attributes:
        seconds: time for which the step kept its lane busy. On a single lane, this time begins at the end of the
            previous step if one of the step's requests had arrived by then and less than `BETWEEN_NS` passed between
            the steps.
    """

    record: StepRecord
    counts: StepCounts
    seconds: float


class Paces(NamedTuple):
    """The measured and predicted times of steps. # each [steps]

    Attributes:
        lanes: name of the lane that executed each step, with the replica's number if there are several replicas.
    """

    measured_s: Array
    predicted_s: Array
    tokens: Array
    lanes: npt.NDArray[np.str_]

    @property
    def ratio(self) -> float:
        return float(self.measured_s.sum() / self.predicted_s.sum())

    def where(self, mask: npt.NDArray[np.bool_]) -> Paces:
        return Paces(self.measured_s[mask], self.predicted_s[mask], self.tokens[mask], self.lanes[mask])

    @property
    def by_lane(self) -> dict[str, float]:
        return {str(name): self.where(self.lanes == name).ratio for name in np.unique(self.lanes)}


def executed(plan: PlanDraft, log: Sequence[StepRecord], rule: Rule | None = None) -> list[Executed]:
    """Return the steps of a log, except transfers. If a step cannot be replayed, later steps are left out."""
    logs = [[record for record in log if record.replica == number] for number in range(plan.replicas)]
    return [step for of_one in logs for step in _of_replica(plan, of_one, rule)]


def _of_replica(plan: PlanDraft, log: Sequence[StepRecord], rule: Rule | None) -> list[Executed]:
    schedule = policies.build(plan, rule)
    last_end_ns: dict[str, int] = {}
    arrival_ns: dict[int, int] = {}
    busy: dict[int, float] = {}
    for record in log:
        arrival_ns |= {arrival.id: arrival.arrival_ns for arrival in record.arrivals}
        last_ns, start_ns = last_end_ns.get(record.lane, 0), record.start_ns
        inside = (*record.decode, *(chunk[0] for chunk in record.encode))  # none in a transfer
        first_ns = min((arrival_ns.get(id_, 0) for id_ in inside), default=0)
        follows = record.lane == "both" and first_ns < last_ns and start_ns - last_ns < BETWEEN_NS
        busy[record.number] = (record.end_ns - (last_ns if follows else max(start_ns, last_ns))) / 1e9
        last_end_ns[record.lane] = record.end_ns
    found: list[Executed] = []

    def note(record: StepRecord, step: Step) -> None:
        if step.lane != "transfer":
            counts = step_counts(schedule, step, has_encoder=plan.model.is_encoder_decoder)
            found.append(Executed(record, counts, busy[record.number]))

    replay(schedule, log, note)
    return found


def paces(
    plan: PlanDraft,
    profile: Profile,
    log: Sequence[StepRecord],
    within: Sequence[StepRecord] | None = None,
    rule: Rule | None = None,
) -> Paces | None:
    """Return the measured and predicted times of the steps of a log.

    Return None if a lane has several stages, since steps then wait for each other (see `paces_of_workers`), or if no
    step was executed.
    """
    lanes = lanes_of(plan, profile)
    if any(lane.num_stages > 1 for lane in lanes.values()):
        return None
    numbers = {(record.replica, record.number) for record in (log if within is None else within)}
    steps = [step for step in executed(plan, log, rule) if (step.record.replica, step.record.number) in numbers]
    if not steps:
        return None
    return Paces(
        np.asarray([step.seconds for step in steps]),
        np.asarray([lanes[step.record.lane].step(step.counts)[0] for step in steps]),  # type: ignore[index]
        np.asarray([float(step.counts.num_tokens) for step in steps]),
        np.asarray([_lane_name(plan, step.record) for step in steps]),
    )


def paces_of_workers(
    plan: PlanDraft, profile: Profile, log: Sequence[StepRecord], busy_s: Mapping[str, float]
) -> Paces | None:
    """Return the measured and predicted times of each stage's worker, summed over all steps of a log.

    Return None if the time of a worker is missing, or if workers were restarted and report only the time since then.
    For a stage with several tensor-parallel workers, its first worker counts, since it waits for the others.

    Args:
        busy_s: seconds for which each worker was busy. The keys are the workers' names in the server's metrics.
    """
    begun = [record.replica for record in log if record.number == 0]
    if len(begun) > len(set(begun)):
        return None
    lanes = lanes_of(plan, profile)
    predicted: defaultdict[str, float] = defaultdict(float)
    for record, counts, _ in executed(plan, log):
        stages = [stage for stage in plan.stages if stage.lane == record.lane]
        for stage, seconds in zip(stages, lanes[record.lane].step(counts), strict=True):  # type: ignore[index]
            replica = f"replica {record.replica}, " if plan.replicas > 1 else ""
            predicted[f"{replica}worker {stage.devices[0]}"] += seconds
    if not predicted or not predicted.keys() <= busy_s.keys():
        return None
    names = sorted(predicted)
    measured = np.asarray([busy_s[name] for name in names])
    return Paces(measured, np.asarray([predicted[name] for name in names]), np.zeros(len(names)), np.asarray(names))


def _lane_name(plan: PlanDraft, record: StepRecord) -> str:
    words = [f"replica {record.replica}"] if plan.replicas > 1 else []
    if record.lane != "both" or not words:
        words.append(record.lane)
    return ", ".join(words)
