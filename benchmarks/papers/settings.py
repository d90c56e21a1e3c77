"""Define the papers' settings: models on clusters, tasks, and FasterTransformer as in the papers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InfeasibleError
from xgpt.core.schema import ClusterSpec, Constraint, Histogram, Plan, Workload
from xgpt.resolve import load_cluster, load_model, load_workload
from xprofiler import analytic
from xscheduler.problem import Problem
from xscheduler.schedule import Scheduler

SMALL_TASKS = ("summarization", "translation", "chat-short")
BOUND_QUANTILES = (0.1, 0.3, 0.7, None)
"""Quantiles of FasterTransformer's latencies over its batch sizes. None means no bound. Source: ExeGPT sec. 7.1."""


NUM_PLANNED = 1000
"""Number of lengths from which a trace's plan is made, about a tenth of the trace."""


@cache
def workload_of(task: str, model: str) -> Workload:
    return load_workload(task, load_model(model)[0])


def observed(lengths: npt.NDArray[np.int_]) -> Histogram:
    values, counts = np.unique(lengths, return_counts=True)
    probabilities = counts / counts.sum()
    return Histogram(lengths=tuple(values.tolist()), probabilities=tuple(probabilities.tolist()))


def cut(histogram: Histogram, longest: int) -> Histogram:
    kept = [(n, p) for n, p in zip(histogram.lengths, histogram.probabilities, strict=True) if n <= longest]
    total = sum(p for _, p in kept)
    return Histogram(lengths=tuple(n for n, _ in kept), probabilities=tuple(p / total for _, p in kept))


def trace_of(task: str, longest_input: int, longest_output: int) -> Workload:
    """Return a trace's lengths, cut to the paper's models with contexts of 2,048 tokens."""
    whole = load_workload(task)
    lengths = {"input": cut(whole.input, longest_input), "output": cut(whole.output, longest_output)}
    return whole.model_copy(update=lengths)


def problem(model: str, cluster: str | ClusterSpec, workload: Workload, bound_s: float | None = None) -> Problem:
    """Return the problem with the model's own dtype and a profile from the datasheet."""
    spec, _ = load_model(model)
    devices = load_cluster(cluster) if isinstance(cluster, str) else cluster
    profile = analytic.profile(spec, devices, spec.default_dtype)
    return Problem(spec, None, devices, workload, profile, Constraint(latency_bound_s=bound_s))


def best(subject: Problem, kinds: Sequence[str]) -> Plan | None:
    try:
        return Scheduler(subject).best(kinds)
    except InfeasibleError:
        return None


@dataclass(frozen=True)
class Baseline:
    """FasterTransformer's figures for its batch sizes, which are multiples of four up to the limit of memory.

    Attributes:
        latency: latency of a request of the 99th percentile's length, which gives the bounds. # [batches]
        longest: latency of a batch with a request of maximum length, which must keep the bounds. # [batches]
        throughput: # [batches]
    """

    latency: np.ndarray
    longest: np.ndarray
    throughput: np.ndarray

    def bounds(self) -> list[float | None]:
        return [None if q is None else float(np.quantile(self.latency, q)) for q in BOUND_QUANTILES]

    def at(self, bound_s: float | None, *, at_quantile: bool = False) -> float:
        """Return the highest throughput under a bound, in requests a second, or 0 if no batch keeps it.

        Args:
            at_quantile: whether the bound holds only at the 99th percentile's length, as for all other systems.
        """
        kept = (self.latency if at_quantile else self.longest) <= (np.inf if bound_s is None else bound_s)
        return float(self.throughput[kept].max(initial=0.0))


def faster_transformer(subject: Problem) -> Baseline:
    """Return the figures of tensor parallelism within machines and a pipeline over them. Batches end with their longest
    request.

    "For FT and DSI, which do not apply early termination of completed queries, we applied the latency bound to
    generating an output sequence of maximum length." Source: ExeGPT sec. 7.1.
    """
    cluster, found = subject.cluster, []
    for quantile in (0.99, 1 - 1e-9):
        scheduler = Scheduler(replace(subject, constraint=Constraint(quantile=quantile)))
        tp = min(cluster.devices_per_node, cluster.num_devices)
        placement = scheduler.candidates.uniform_placement("static", tp, cluster.num_devices // tp, 1)
        space = scheduler.candidates.space("static", placement)
        batches = np.arange(4, max(5, int(space.capacity) + 1), 4)
        evaluation = space.evaluate({"batch": batches})
        fits = evaluation.fits
        found.append((evaluation.performance.latency[fits], evaluation.throughput[fits]))
    return Baseline(found[0][0], found[1][0], found[0][1])
