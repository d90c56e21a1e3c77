"""Provide the contents of the live page at /, of GET /plan and of GET /plan/history."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from xgpt.core.schema import Histogram, Observation, Plan
from xrunner.channel.remote import RemoteEngine
from xrunner.server.observe.backlog import Backlog
from xrunner.server.observe.metrics import Metrics
from xrunner.server.observe.watch import MAX_HISTORY, Watch

SAMPLE_S = 2.0
MAX_SAMPLES = 450
"""Number of two-second samples in a quarter of an hour."""
NUM_BINS = 32
SHOWN_DECISIONS = 20


class Live:
    """Reads the state of the engine and the watch, both on request and every two seconds for the page's charts."""

    def __init__(self, engine: RemoteEngine, backlog: Backlog, watch: Watch, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._backlog = backlog
        self._watch = watch
        self._samples: deque[dict[str, Any]] = deque(maxlen=MAX_SAMPLES)
        self._start_s = time.perf_counter()

    async def run(self) -> None:
        while True:
            self._samples.append({"at_s": round(time.perf_counter() - self._start_s, 1), **self._figures()})
            await asyncio.sleep(SAMPLE_S)

    # What reads the state runs in the event loop. What it returns makes a page, in any thread.

    def plan(self) -> Callable[[], Any]:
        plan, now = self._watch.plan, self._watch.snapshot()

        def page() -> dict[str, Any]:
            observed = None if now is None else now.observation()
            return {
                "plan": plan.model_dump(mode="json"),
                "observed": None if observed is None else observed.model_dump(mode="json"),
            }

        return page

    def history(self, most: int = MAX_HISTORY) -> Callable[[], list[dict[str, Any]]]:
        decisions = list(self._watch.history)[-most:]
        return lambda: [decision.model_dump(mode="json") for decision in decisions]

    async def decision(self) -> dict[str, Any] | None:
        decision = await self._watch.would_decide()
        return None if decision is None else decision.model_dump(mode="json")

    def now(self) -> Callable[[], dict[str, Any]]:
        watch = self._watch
        plan, now, step_ratio = watch.plan, watch.snapshot(lengths_alone=True), watch.step_ratio
        history = self.history(SHOWN_DECISIONS)
        read = {
            "plan": {
                "policy": plan.policy.kind,
                "settings": {v.name: getattr(plan.policy, v.name) for v in plan.policy.variables},
                "throughput_rps": plan.estimate.throughput_rps,
                "latency_s": plan.estimate.latency_s,
                "latency_bound_s": plan.constraint.latency_bound_s,
                "planned_under_s": watch.planned_under_s,
                "ttft_bound_s": plan.constraint.ttft_s,
                "counts_from": plan.constraint.counts_from,
                "arrival_rate_per_s": None if plan.estimate.capacity is None else plan.estimate.capacity.rate_per_s,
                "quantile": plan.constraint.quantile,
                "decode_batch": plan.estimate.decode_batch,
            },
            "replans": watch.can_replan,
            "judging_since": watch.judging_since,
            "failures": watch.num_failures,
            "is_redeploying": self._engine.is_emptying,
            "now": self._figures(),
            "samples": list(self._samples),
        }

        def page() -> dict[str, Any]:
            observed = None if now is None else now.observation()
            lengths = None if observed is None else observed.workload
            return read | {
                "observation": None if observed is None else observed.model_dump(mode="json", exclude={"workload"}),
                "causes": causes_of(plan, step_ratio, observed),
                "lengths": {
                    "input": _bins(plan.workload.input, None if lengths is None else lengths.input),
                    "output": _bins(plan.workload.output, None if lengths is None else lengths.output),
                },
                "keys": self._metrics.goodput(),
                "classes": self._metrics.goodput_of_classes(),
                "decisions": history(),
            }

        return page

    def _figures(self) -> dict[str, float | None]:
        pool = self._engine.pool
        return {
            **self._watch.recent.figures(),
            "running": len(pool.running),
            "waiting": len(self._backlog),
            "kv_share": pool.room.reserved_blocks / pool.limits.kv_blocks,
            "step_ratio": self._watch.step_ratio,
        }


FAR = 1.2
"""Factor from which observed lengths count as a cause of broken bounds."""


def causes_of(plan: Plan, step_ratio: float | None, observation: Observation | None) -> list[str]:
    """Return why a plan may break its bounds now, in sentences, the cause with the largest effect first."""
    found: list[tuple[float, str]] = []
    if step_ratio is not None and step_ratio > 1 + max(plan.constraint.headroom, 0.05):
        found.append((step_ratio, f"This machine is {step_ratio:.2f} times slower than when it was profiled."))
    capacity = plan.estimate.capacity
    if observation is not None and capacity is not None and (rate := observation.arrival_rate_per_s) is not None:
        most = capacity.rate_per_s
        if rate > most > 0:
            text = f"{rate:.3g} requests arrive a second; the plan keeps its bounds up to {most:.3g}."
            found.append((rate / most, text))
    if observation is not None:
        for name, mean, planned in (
            ("Prompts", observation.recent_input_mean or observation.workload.input.mean, plan.workload.input.mean),
            ("Outputs", observation.recent_output_mean or observation.workload.output.mean, plan.workload.output.mean),
        ):
            if mean > FAR * planned:
                found.append((mean / planned, f"{name} are {mean / planned:.2f} times as long as planned."))
    return [text for _, text in sorted(found, reverse=True)]


def _bins(planned: Histogram, observed: Histogram | None) -> dict[str, list[float] | None]:
    """Return both histograms with the same bins, as shares of requests."""
    longest = max(planned.lengths[-1], observed.lengths[-1] if observed else 0)
    edges = np.linspace(0, longest, NUM_BINS + 1)

    def shares(histogram: Histogram) -> list[float]:
        return np.histogram(histogram.lengths, edges, weights=histogram.probabilities)[0].tolist()

    return {"edges": edges.tolist(), "planned": shares(planned), "observed": observed and shares(observed)}
