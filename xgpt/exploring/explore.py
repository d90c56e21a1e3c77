"""Answer the questions of the planning page in several parts, the quickest first.

A question contains arguments of `xgpt.plan` by name, and optionally `current`: the command of the current deployment.
Closed forms give the first parts immediately. A simulated run follows, then the plan that `xgpt plan` would write, and
last a comparison with the current deployment. A separate process (`python -m xgpt.exploring.explore`) answers. It
abandons a question when a newer one arrives.
"""

from __future__ import annotations

import io
import json
import signal
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xgpt.comparing.compare import Compared, compare, in_engine_of
from xgpt.comparing.launched import read_current
from xgpt.core.errors import InfeasibleError, InputError, XgptError
from xgpt.core.io import dump_json
from xgpt.core.schema import ClusterSpec, Plan
from xgpt.core.schema.constraint import Bounds
from xgpt.core.schema.plan import rate_of
from xgpt.deciding import phrases, words
from xgpt.problems import resolve
from xgpt.reporting import figures, plan_text
from xgpt.requests import PlanRequest, plan_request
from xgpt.resolve import load_cluster
from xgpt.solving import Planned, solve
from xscheduler.objectives.best_plans import best_of_each, kinds_of
from xscheduler.schedule import Scheduler, scheduler
from xsimulator.clock import Span
from xsimulator.run import simulate

Part = dict[str, Any]
"""A part of an answer. Its entry `part` states the kind of part."""

LOOSER = (1.1, 1.25, 1.5, 2.0)
NUM_REQUESTS = 300
MOST_POINTS = 200
MOST_KEPT = 8
FREE = Bounds()._asdict()


@dataclass
class Explorer:
    _kept: OrderedDict[str, tuple[Scheduler, Part]] = field(default_factory=OrderedDict)

    def answers(self, asked: dict[str, Any]) -> Iterator[Part]:
        current = asked.pop("current", None) or None
        if not isinstance(current, str | None):
            raise InputError("current", current, "write the command of the current deployment")
        request = plan_request(**asked)
        search, outline = self._scheduler(request if current is None else _in_engine_of(request, current))
        kinds = kinds_of(search.problem, request.policy)
        best = None
        try:
            plans = quick(search, kinds)
        except InfeasibleError as error:
            yield refusal(error)
        else:
            best = next(iter(plans.values()))[0]
            yield {"part": "plans", "settled": False, **table(plans), **outline_of(best)}
        if not outline:
            outline.update(trade_off(search, kinds))
        yield {"part": "trade-off", **outline}
        if best is not None:
            yield {"part": "timeline", **timeline(best, search)}
            yield {"part": "looser", "rows": looser(search, kinds)}
        judged = None if current is None else _judged(request, current)
        planned = judged.planned if isinstance(judged, Compared) else solve(request)
        yield settled(planned)
        if best is None or _runs_as(best) != _runs_as(planned.best):
            yield {"part": "timeline", **timeline(planned.best, search)}
        if judged is not None:
            yield {"part": "current", **scored(judged)}

    def _scheduler(self, request: PlanRequest) -> tuple[Scheduler, Part]:
        free = request.but(**FREE)
        key = free.model_dump_json()
        if key not in self._kept:
            self._kept[key] = scheduler(resolve(request)), {}
        self._kept.move_to_end(key)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        search, outline = self._kept[key]
        constraint = request.constraint.but(headroom=search.problem.constraint.headroom)
        return search.under(constraint), outline


def _runs_as(plan: Plan) -> tuple[object, ...]:
    return plan.policy, plan.stages, plan.cluster.num_devices


def quick(search: Scheduler, kinds: tuple[str, ...]) -> dict[str, tuple[Plan, float | None]]:
    """Return each policy's best plan in closed form, the best of all first. Each comes with its arrival rate, or with
    None if plans maximise something else.
    """
    found = best_of_each(search, kinds, is_closed=True)
    return {kind: (one.plan, one.closed_rate) for kind, one in found.items()}


def table(plans: dict[str, tuple[Plan, float | None]]) -> Part:
    rows = []
    for kind, (plan, rate) in plans.items():
        e = plan.estimate
        rows.append(
            {
                "policy": kind,
                "settings": plan_text.settings_text(plan),
                "rate_per_s": rate,
                "throughput_rps": e.throughput_rps,
                "latency_s": e.latency_s,
                "ttft_s": e.ttft_s,
                "tpot_s": e.tpot_s,
                "cost": e.cost_per_million_tokens,
            }
        )
    return {"rows": rows}


def outline_of(plan: Plan) -> Part:
    return {
        "title": f"{plan.model.name} on {plan.cluster.name}, {plan.workload.name}",
        "schedule": f"{plan.policy.kind}: {plan_text.schedule_in_words(plan)}",
        "placement": plan_text.placement_in_words(plan),
        "memory": figures.memory(plan)._asdict(),
        "warnings": [*plan.estimate.warnings, *([plan.seeded_weights] if plan.seeded_weights else [])],
    }


def trade_off(search: Scheduler, kinds: tuple[str, ...]) -> Part:
    relaxed = search.under(search.problem.constraint.but(**FREE))
    lines = []
    for kind in kinds:
        points = [
            (point.latency_s, point.throughput_rps) for point in figures.frontier(relaxed.candidates.spaces(kind))
        ]
        if points:
            every = -(-len(points) // MOST_POINTS)
            lines.append({"name": kind, "points": [*points[:-1:every], points[-1]]})
    return {"lines": lines}


def timeline(plan: Plan, search: Scheduler) -> Part:
    spans: list[Span] = []
    simulate(plan, search.problem.profile, plan.workload, NUM_REQUESTS, np.random.default_rng(0), on_span=spans.append)
    return figures.timeline(plan, spans)._asdict()


def looser(search: Scheduler, kinds: tuple[str, ...]) -> list[Part]:
    bound = search.problem.constraint.latency_bound_s
    rows = []
    for factor in () if bound is None else (1.0, *LOOSER):
        constraint = search.problem.constraint.but(latency_bound_s=factor * (bound or 0))
        plan, rate = next(iter(quick(search.under(constraint), kinds).values()))
        served = plan.estimate.throughput_rps if rate is None else rate
        rows.append({"bound_s": constraint.latency_bound_s, "policy": plan.policy.kind, "rate_per_s": served})
    return rows


def _in_engine_of(request: PlanRequest, command: str) -> PlanRequest:
    try:
        cluster = request.cluster if isinstance(request.cluster, ClusterSpec) else load_cluster(request.cluster)
        return in_engine_of(request, read_current(command, cluster), cluster)
    except XgptError:
        return request  # the comparison says what is wrong with the command


def _judged(request: PlanRequest, command: str) -> Compared | XgptError:
    try:
        return compare(request, command)
    except XgptError as error:
        return error


def scored(judged: Compared | XgptError) -> Part:
    if isinstance(judged, XgptError):
        return {"error": str(judged)}
    plan = judged.current
    assert plan is not None
    rate = None if plan.estimate.capacity is None else rate_of(plan)
    gain = words.gain_in_words(judged.recommendation)
    return {**table({"the current deployment": (plan, rate)}), "notes": list(judged.notes), "gain": gain}


def settled(planned: Planned) -> Part:
    rated = {
        kind: (plan, None if plan.estimate.capacity is None else rate_of(plan)) for kind, plan in planned.plans.items()
    }
    best = planned.best
    return {
        "part": "plans",
        "settled": True,
        **table(rated),
        **outline_of(best),
        "words": [*plan_text.arrivals_in_words(best), f"proof: {plan_text.proof_in_words(best)}"],
        "said": words.lines(planned.recommendation, phrases.PAGE),
        "cards": words.cards(planned.recommendation),
        "bounded": _bounded(planned),
        "plan": dump_json(best),
    }


def _bounded(planned: Planned) -> str:
    from xgpt.reporting.report import bounded_chart  # matplotlib takes a while to import

    best = planned.best
    if not best.constraint.maximises_arrivals or not rate_of(best):
        return ""
    return bounded_chart(best, planned.problem.profile, planned.recommendation).source


def refusal(error: Exception) -> Part:
    if isinstance(error, InfeasibleError):
        return {
            "part": "infeasible",
            "reason": str(error),
            "nearest_bound_s": error.nearest_bound_s,
            "binding": error.binding,
        }
    if isinstance(error, XgptError):
        return {"part": "error", "reason": str(error)}
    return {"part": "error", "reason": f"internal error: {type(error).__name__}: {error}"}


class _Superseded(BaseException):
    """Raised when a newer question arrives. It is no Exception, so that no `except Exception` in the planner catches
    it.
    """


def main() -> None:
    """Read questions as lines {"id", "asked"}, and write answers as lines {"id", "part", …}. SIGUSR1 ends the current
    answer.

    The sender may send the signal only after it has read {"part": "ready"}. If it sends the signal, it must do so
    before it sends the next question. Otherwise the signal could end the new answer.
    """
    is_computing = is_superseded = False

    def leave(*_: object) -> None:
        nonlocal is_computing, is_superseded
        is_superseded = True
        if is_computing:  # otherwise a line is being written, which is finished first
            is_computing = False
            raise _Superseded

    signal.signal(signal.SIGUSR1, leave)
    # With PYTHONUNBUFFERED, sys.stdout loses the rest of a line that a signal interrupts.
    output = io.TextIOWrapper(io.BufferedWriter(io.FileIO(sys.stdout.fileno(), "w", closefd=False)))

    def write(line: Part) -> None:
        output.write(json.dumps(line) + "\n")
        output.flush()

    write({"part": "ready"})
    explorer = Explorer()
    for line in sys.stdin:
        question = json.loads(line)
        is_superseded = False
        parts = explorer.answers(question["asked"])
        while not is_superseded:
            try:
                is_computing = True
                part = next(parts, {"part": "end"})
                is_computing = False
            except _Superseded:
                break
            except Exception as error:
                is_computing = False
                part = refusal(error)
            write({"id": question["id"], **part})
            if part["part"] == "end":
                break


if __name__ == "__main__":
    main()
