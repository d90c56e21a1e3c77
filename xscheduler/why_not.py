"""Explain why no candidate keeps a constraint, and find the nearest bound that a candidate keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xgpt.core.errors import InfeasibleError
from xgpt.core.numbers import rounded_up
from xgpt.core.schema.constraint import Bounds
from xgpt.core.workload import quantile
from xscheduler.candidates import Candidates
from xscheduler.engine_limits import why_not_divided
from xscheduler.space import Space
from xsimulator.forecast.base import Ints


class Fastest(NamedTuple):
    """The schedule with the lowest latency for an output of the quantile's length."""

    kind: str
    first_s: float
    each_s: float


def infeasible(candidates: Candidates, kinds: Sequence[str]) -> InfeasibleError:
    constraint = candidates.problem.constraint
    nearest, quickest = _nearest(candidates, kinds)
    reason = _reason(candidates, quickest)
    if not any(candidates.placements.of(kind) for kind in kinds):
        num_devices = candidates.placements.num_devices
        return InfeasibleError(
            f"devices: {', '.join(kinds)} needs at least 2 devices with links between them, but "
            f"{candidates.problem.cluster.name} has {num_devices}; take a larger cluster or another policy",
            binding="devices",
        )
    if not nearest:
        return _no_memory(candidates) if not candidates.problem.fixed else _not_held(candidates, kinds)
    given = {name: bound for name in nearest if (bound := getattr(constraint, name)) is not None}
    broken = [name for name, bound in given.items() if bound < nearest[name]]
    if not broken:
        return _not_together(candidates, kinds, given)
    binding = broken[0]
    return InfeasibleError(
        f"{binding}: no schedule of {', '.join(kinds)} keeps {given[binding]:g} s on "
        f"{candidates.problem.cluster.name}; the nearest bound that can be kept is {rounded_up(nearest[binding]):g} s"
        + (reason if binding == "latency_bound_s" else ""),
        nearest_bound_s=nearest[binding],
        binding=binding,
        because=reason,
    )


def why_slow(candidates: Candidates, kinds: Sequence[str]) -> str:
    return _reason(candidates, fastest(candidates, kinds))


def fastest(candidates: Candidates, kinds: Sequence[str]) -> Fastest | None:
    return _nearest(candidates, kinds)[1]


def _reason(candidates: Candidates, found: Fastest | None) -> str:
    if found is None:
        return ""
    constraint = candidates.problem.constraint
    tokens = quantile(candidates.problem.workload.output, constraint.quantile)
    headroom = constraint.headroom
    kept = f", plus {100 * headroom:.0f}% of headroom (--headroom)" if headroom else ""
    return (
        f"; the reason: {100 * (1 - constraint.quantile):.3g}% of the outputs have {tokens:,} tokens or more, and the "
        f"fastest schedule, {found.kind}, takes {found.first_s:.3g} s for the first token and "
        f"{1e3 * found.each_s:.3g} ms for each further one{kept}"
    )


def _nearest(candidates: Candidates, kinds: Sequence[str]) -> tuple[dict[str, float], Fastest | None]:
    constraint = candidates.problem.constraint
    relaxed = constraint.but(**Bounds()._asdict())
    headroom = 1 + relaxed.headroom
    only_latency = constraint.ttft_s is None and constraint.tpot_s is None
    nearest: dict[str, float] = {}
    quickest: Fastest | None = None
    candidates = candidates.under(relaxed)
    for kind in kinds:
        spaces = candidates.spaces(kind)
        least_s = headroom * candidates.screen.least_latency([space.placement for space in spaces])
        for i in np.argsort(least_s, kind="stable"):
            if only_latency and least_s[i] > nearest.get("latency_bound_s", np.inf):
                break
            space = spaces[i]
            evaluation = space.evaluate(_slowest_points(space))
            if not evaluation.fits.any():
                continue
            times = evaluation.performance
            fastest_point = int(np.argmin(np.where(evaluation.fits, times.latency, np.inf)))
            if headroom * float(times.latency[fastest_point]) < nearest.get("latency_bound_s", np.inf):
                quickest = Fastest(kind, float(times.ttft[fastest_point]), float(times.tpot[fastest_point]))
            for name, values in (("latency_bound_s", times.latency), ("ttft_s", times.ttft), ("tpot_s", times.tpot)):
                least = float(values[evaluation.fits].min()) * headroom
                nearest[name] = min(nearest.get(name, least), least)
    return nearest, quickest


def _not_together(candidates: Candidates, kinds: Sequence[str], given: Mapping[str, float]) -> InfeasibleError:
    free = candidates.problem.constraint.but(**dict.fromkeys(given))
    longer, least = 1 + free.headroom, np.inf
    figures = {"latency_bound_s": "latency", "ttft_s": "ttft", "tpot_s": "tpot"}
    for space in (space for kind in kinds for space in candidates.under(free).spaces(kind)):
        evaluation = space.evaluate(_slowest_points(space))
        over = [getattr(evaluation.performance, figures[name]) / bound for name, bound in given.items()]
        least = min(least, float(np.where(evaluation.fits, np.max(over, axis=0), np.inf).min()))
    factor = longer * least
    kept = {name: rounded_up(factor * bound) for name, bound in given.items()}
    binding = next(iter(given))
    asked, loose = (" and ".join(f"`{name}={bound:g}`" for name, bound in bounds.items()) for bounds in (given, kept))
    return InfeasibleError(
        f"{binding}: no schedule of {', '.join(kinds)} keeps {asked} together on "
        f"{candidates.problem.cluster.name}; each bound {factor:.3g} times as long can be kept: {loose}",
        binding=binding,
    )


def _not_held(candidates: Candidates, kinds: Sequence[str]) -> InfeasibleError:
    problem = candidates.problem
    fixed = ", ".join(f"{name}={value}" for name, value in problem.fixed.items())
    tp = problem.fixed.get("tp", 1)
    parts = [problem.fixed["ep"]] if "ep" in problem.fixed else [1, tp]
    reasons = [why_not_divided(problem.model, problem.engine, tp, ep) for ep in parts]
    if reasons[0] is not None and None not in reasons:
        return InfeasibleError(f"fix: {fixed}: {reasons[0]}; give another degree", binding="fix")
    needed = math.prod(problem.fixed.get(name, 1) for name in ("tp", "pp", "replicas"))
    if needed > candidates.placements.num_devices:
        have = f"but the plan is for {candidates.placements.num_devices} devices of {problem.cluster.name}"
        return InfeasibleError(
            f"fix: {fixed} needs {needed} devices, {have}; lower a degree, or take a larger cluster", binding="fix"
        )
    if tp > problem.cluster.devices_per_node:
        says = (
            f"devices of a tensor-parallel group are in one machine, which has {problem.cluster.devices_per_node} here"
        )
        return InfeasibleError(f"fix: {fixed}: {says}; fix pp={tp} instead, or lower tp", binding="fix")
    if candidates.placements.num_devices == 1 and any("microbatches" in name for name in problem.fixed):
        accepted = "only a pipeline over several devices has micro-batches: leave them out"
        return InfeasibleError(f"fix: {fixed}: {accepted}", binding="fix")
    leave_out = "leave one of these out" if len(problem.fixed) > 1 else "leave it out"
    return InfeasibleError(
        f"fix: no schedule of {', '.join(kinds)} on {problem.cluster.name} fits in memory with {fixed}; {leave_out}",
        binding="fix",
    )


def _no_memory(candidates: Candidates) -> InfeasibleError:
    problem, number = candidates.problem, candidates.placements.num_devices
    memory, needed = candidates.memory(candidates.placements.widest), candidates.devices_needed()
    device = problem.cluster.device.name
    if problem.speculation is not None and needed is not None and needed <= number:
        return InfeasibleError(
            f"speculative: {number} devices of {device} hold {problem.model.name} only as a pipeline, and drafts are "
            "planned only without pipeline stages; give another number of `devices`, or leave `speculative` out",
            binding="speculative",
        )
    if number > 1 and problem.cluster.devices_per_node > 1 and problem.cluster.intra_node is None:
        return InfeasibleError(
            f"memory: one {device} does not hold {problem.model.name} and a request, and {problem.cluster.name} states "
            "no `intra_node`, the link between devices that would divide it: add it to the cluster's file",
            binding="memory",
        )
    enough = "" if needed is None or needed <= number else f"; {needed} devices of {device} would be enough"
    says = "memory: the K/V of a single request does not fit; take devices with more memory, or shorter requests"
    if isinstance(memory, InfeasibleError):
        says = str(memory)
    return InfeasibleError(says + enough, binding="memory")


def _slowest_points(space: Space) -> dict[str, Ints]:
    branches = space.branches()
    columns = {name: np.asarray([branch[name] for branch in branches]) for name in branches[0]}
    for axis in space.searched:
        slow = axis.values[0] if axis.variable.latency == "rises" else axis.values[-1]
        columns[axis.variable.name] = np.full(len(branches), slow)
    return columns
