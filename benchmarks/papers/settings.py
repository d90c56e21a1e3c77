"""The papers' set-ups: models on clusters, tasks, and FasterTransformer as the papers ran it."""

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
"""Of FasterTransformer's latencies over its batch sizes; None: no bound. Source: ExeGPT sec. 7.1."""


NUM_PLANNED = 1000
"""Lengths that a plan for a trace is made from: about a tenth of it."""


@cache
def workload_of(task: str, model: str) -> Workload:
    return load_workload(task, load_model(model)[0])


def observed(lengths: npt.NDArray[np.int_]) -> Histogram:
    """How often each length was seen."""
    values, counts = np.unique(lengths, return_counts=True)
    probabilities = counts / counts.sum()
    return Histogram(lengths=tuple(values.tolist()), probabilities=tuple(probabilities.tolist()))


def cut(histogram: Histogram, longest: int) -> Histogram:
    """Without what a model has no context for."""
    kept = [(n, p) for n, p in zip(histogram.lengths, histogram.probabilities, strict=True) if n <= longest]
    total = sum(p for _, p in kept)
    return Histogram(lengths=tuple(n for n, _ in kept), probabilities=tuple(p / total for _, p in kept))


def trace_of(task: str, longest_input: int, longest_output: int) -> Workload:
    """A trace's requests that the paper's models, with contexts of 2,048 tokens, can take."""
    whole = load_workload(task)
    lengths = {"input": cut(whole.input, longest_input), "output": cut(whole.output, longest_output)}
    return whole.model_copy(update=lengths)


def problem(model: str, cluster: str | ClusterSpec, workload: Workload, bound_s: float | None = None) -> Problem:
    """Return the problem in the model's own type, on a datasheet's profile."""
    spec, _ = load_model(model)
    devices = load_cluster(cluster) if isinstance(cluster, str) else cluster
    profile = analytic.profile(spec, devices, spec.default_dtype)
    return Problem(spec, None, devices, workload, profile, Constraint(latency_bound_s=bound_s))


def best(subject: Problem, kinds: Sequence[str]) -> Plan | None:
    """None where no schedule keeps the bound."""
    try:
        return Scheduler(subject).best(kinds)
    except InfeasibleError:
        return None


@dataclass(frozen=True)
class Baseline:
    """FasterTransformer over its batch sizes, multiples of four up to its memory.

    Attributes:
        latency: of a request of the 99th percentile's length, which the bounds are taken from. # [batches]
        longest: of a batch with a request of maximum length, which has to keep them. # [batches]
        throughput: # [batches]
    """

    latency: np.ndarray
    longest: np.ndarray
    throughput: np.ndarray

    def bounds(self) -> list[float | None]:
        return [None if q is None else float(np.quantile(self.latency, q)) for q in BOUND_QUANTILES]

    def at(self, bound_s: float | None, *, at_quantile: bool = False) -> float:
        """Its highest throughput under a bound, requests a second; 0 where it has none.

        Args:
            at_quantile: let it keep the bound as all others do, at the 99th percentile's length.
        """
        kept = (self.latency if at_quantile else self.longest) <= (np.inf if bound_s is None else bound_s)
        return float(self.throughput[kept].max(initial=0.0))


def faster_transformer(subject: Problem) -> Baseline:
    """Tensor parallelism over each whole machine, a pipeline over the machines; batches end with their longest member.

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
