"""Fit a plan's step times to a user's measurements: results of `vllm bench serve`, AIPerf, guidellm or genai-perf.

Each measured load is simulated with its lengths and its clients or arrival rate. A factor on all step times, a constant
for each step, and the time of a request outside the engine's loop are then fitted to the mean time between tokens and
the mean time to the first token. With several loads, every second one is left out of the fit and shows its error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xgpt.core.arrival_process import ArrivalProcess
from xgpt.core.errors import InputError
from xgpt.core.schema import EngineSpec, Plan, Profile, Workload
from xgpt.core.schema.documents import CalibratedLoadOutput, CalibrateOutput
from xgpt.core.workload import histogram_of
from xsimulator.run import run_simulation

SCALES_S = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
NAMES = ("throughput_rps", "ttft_s", "tpot_s")
REQUESTS, MOST_REQUESTS = 200, 1000
ROUNDS = 3


class MeasuredLoad(NamedTuple):
    """The measurements of a benchmark at one load.

    Attributes:
        inputs, outputs: tokens of the requests; only the mean if the file has no more.
        clients, rate_per_s: number of concurrent clients, or requests sent each second.
        throughput_rps, ttft_s, tpot_s: requests a second, and mean times to the first token and between tokens.
    """

    source: str
    inputs: tuple[float, ...]
    outputs: tuple[float, ...]
    clients: int | None
    rate_per_s: float | None
    throughput_rps: float
    ttft_s: float
    tpot_s: float

    @property
    def workload(self) -> Workload:
        """Histograms of the lengths."""
        lengths = (histogram_of(np.maximum(1, np.rint(of)).astype(int)) for of in (self.inputs, self.outputs))
        return Workload(name=self.source, input=next(lengths), output=next(lengths))

    @property
    def figures(self) -> tuple[float, float, float]:
        return self.throughput_rps, self.ttft_s, self.tpot_s


@dataclass(frozen=True)
class CalibratedLoads:
    """A profile fitted to measured loads.

    Attributes:
        engine: the plan's engine with the fitted time of a request; None: the plan has none.
        output: the fitted values, and the errors before and after.
    """

    profile: Profile
    engine: EngineSpec | None
    output: CalibrateOutput


def calibrate(plan: Plan, profile: Profile, loads: Sequence[MeasuredLoad]) -> CalibratedLoads:
    """Return the plan's profile and engine, fitted to measured loads, with the errors before and after.

    Raises:
        InputError: a load has requests that the plan cannot hold.
    """
    used = tuple(len(loads) < 2 or i % 2 == 0 for i in range(len(loads)))
    fitted_to = [load for load, is_used in zip(loads, used, strict=True) if is_used]
    measured = np.asarray([load.figures for load in fitted_to])
    first = [predicted(plan, profile, load) for load in loads]
    found = np.asarray([figures for figures, is_used in zip(first, used, strict=True) if is_used])
    pace, step_s = _line(found[:, 2], measured[:, 2])
    path_s, changed_plan = 0.0, plan
    for _ in range(ROUNDS):  # batches depend on the pace
        changed_plan, changed = with_path(plan, path_s), slowed(profile, pace, step_s)
        found = np.asarray([predicted(changed_plan, changed, load) for load in fitted_to])
        ratio = float(np.exp(np.mean(np.log(measured[:, 2] / found[:, 2]))))
        pace, step_s = pace * ratio, step_s * ratio
        if plan.engine is not None:
            low = int(measured[:, 1].argmin())  # at the lowest load hardly any request waits
            path_s = max(path_s + float(measured[low, 1] - found[low, 1]), -plan.engine.before_admission_s)
    changed_plan, changed = with_path(plan, path_s), slowed(profile, pace, step_s)
    last = [predicted(changed_plan, changed, load) for load in loads]
    told = [
        CalibratedLoadOutput(
            source=load.source,
            used=is_used,
            measured=dict(zip(NAMES, load.figures, strict=True)),
            before=_errors(before, load),
            after=_errors(after, load),
        )
        for load, is_used, before, after in zip(loads, used, first, last, strict=True)
    ]
    output = CalibrateOutput(pace=pace, step_s=step_s, path_s=path_s, loads=tuple(told))
    return CalibratedLoads(changed, changed_plan.engine, output)


def _errors(predicted: Sequence[float], load: MeasuredLoad) -> dict[str, float]:
    return {name: a / b - 1 for name, a, b in zip(NAMES, predicted, load.figures, strict=True)}


def _line(predicted_s: np.ndarray[Any, Any], measured_s: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Return the factor and the constant, at least 0, that turn predicted gaps into measured ones."""
    if len(predicted_s) > 1 and predicted_s.max() > 1.1 * predicted_s.min():
        weight = 1 / measured_s
        factor, constant = np.linalg.lstsq(
            np.stack([weight * predicted_s, weight], axis=1), np.ones(len(weight)), rcond=None
        )[0]
        if factor > 0.2 and constant > 0:
            return float(factor), float(constant)
    return float(np.exp(np.mean(np.log(measured_s / predicted_s)))), 0.0


def slowed(profile: Profile, pace: float, step_s: float) -> Profile:
    """Return the profile with all times multiplied by `pace`, and `step_s` added to each step."""
    found = profile.slowed(pace)
    overhead = found.overhead.model_copy(update={"seconds": tuple(step_s + s for s in found.overhead.seconds)})
    text = f"all steps x{pace:.4g} and {1e3 * step_s:.3g} ms each, fitted to a user's benchmark"
    return found.model_copy(update={"overhead": overhead, "provenance": profile.provenance | {"calibration": text}})


def with_path(plan: Plan, path_s: float) -> Plan:
    """Return the plan with `path_s` more seconds before its engine sees a request."""
    if plan.engine is None or not path_s:
        return plan
    sources = plan.engine.sources | {"before_admission_s": "fitted to a user's benchmark (xgpt calibrate)"}
    more = {"before_admission_s": plan.engine.before_admission_s + path_s, "sources": sources}
    return plan.model_copy(update={"engine": plan.engine.model_copy(update=more)})


def predicted(plan: Plan, profile: Profile, load: MeasuredLoad) -> tuple[float, float, float]:
    """Return the simulated figures `NAMES` of a plan under a load."""
    count = min(MOST_REQUESTS, max(REQUESTS, 4 * (load.clients or 0)))
    arrivals = None if load.rate_per_s is None else ArrivalProcess.at(load.rate_per_s)
    run = run_simulation(plan, profile, load.workload, count, arrivals, 0, clients=load.clients)
    times = run.times
    assert times is not None
    return run.measured.throughput_rps, float(np.mean(times.ttft_s)), float(np.mean(times.tpot_s))


def read_loads(path: Path) -> list[MeasuredLoad]:
    """Return the loads of a result file of `vllm bench serve`, AIPerf, guidellm or genai-perf.

    Raises:
        InputError: the file is not such a result, or lacks a figure.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError("measured", str(path), f"it cannot be read as JSON: {error}") from None
    try:
        found = list(_loads(data, path.name))
    except (KeyError, TypeError, IndexError) as error:
        raise InputError(
            "measured", str(path), f"it lacks {error}: give the complete result of a streamed benchmark"
        ) from None
    if not found:
        known = "`vllm bench serve --save-result`, AIPerf (profile_export_aiperf.json), guidellm (benchmarks.json)"
        raise InputError("measured", str(path), f"it is not a result of {known} or genai-perf")
    return found


def _loads(data: Any, name: str) -> Iterator[MeasuredLoad]:
    if "mean_ttft_ms" in data:
        yield _of_vllm(data, name)
    elif "time_to_first_token" in data:
        yield _of_nvidia(data, name)
    else:
        yield from (_of_guidellm(each, f"{name}, {i + 1}") for i, each in enumerate(data.get("benchmarks", ())))


def _of_vllm(data: dict[str, Any], name: str) -> MeasuredLoad:
    count, rate = data["completed"], data.get("request_rate", "inf")
    inputs = data.get("input_lens") or [data["total_input_tokens"] / count]
    outputs = data.get("output_lens") or [data["total_output_tokens"] / count]
    is_open = rate not in ("inf", None) and float(rate) < float("inf")
    clients = None if is_open else data.get("max_concurrency") or data.get("num_prompts", count)
    figures = data["request_throughput"], data["mean_ttft_ms"] / 1e3, data["mean_tpot_ms"] / 1e3
    return MeasuredLoad(
        f"vllm bench serve, {name}", tuple(inputs), tuple(outputs), clients, float(rate) if is_open else None, *figures
    )


def _of_nvidia(data: dict[str, Any], name: str) -> MeasuredLoad:
    """Return a load of AIPerf or genai-perf, whose figures have the same names."""

    def mean(key: str) -> float:
        figure = data[key]
        return float(figure["avg"]) * SCALES_S.get(figure.get("unit", ""), 1.0)

    config = data.get("input_config", {})
    clients, rate = _found(config, "concurrency"), _found(config, "request_rate")
    tool = "genai-perf" if "perf_analyzer" in config else "AIPerf"
    inputs, outputs = (mean("input_sequence_length"),), (mean("output_sequence_length"),)
    figures = mean("request_throughput"), mean("time_to_first_token"), mean("inter_token_latency")
    if clients is None and rate is None:
        raise KeyError("input_config: concurrency or request_rate")
    sent = None if clients is None else int(clients)
    return MeasuredLoad(f"{tool}, {name}", inputs, outputs, sent, None if sent else rate, *figures)


def _found(config: Any, key: str) -> float | None:
    """Return the number under this key at any depth of a configuration; None: there is none."""
    if not isinstance(config, dict):
        return None
    value = config.get(key)
    if isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, int | float) and value:
        return float(value)
    return next((found for each in config.values() if (found := _found(each, key)) is not None), None)


def _of_guidellm(data: dict[str, Any], name: str) -> MeasuredLoad:
    metrics = data["metrics"]

    def mean(key: str) -> float:
        return float(metrics[key]["successful"]["mean"])

    strategy = data["config"]["strategy"]
    kind, rate = strategy["type_"], strategy.get("rate")
    clients = None if kind in ("constant", "poisson") else strategy.get("streams") or 1
    if kind == "throughput":
        clients = round(mean("request_concurrency"))
    tokens = (mean("prompt_token_count"),), (mean("output_token_count"),)
    figures = mean("requests_per_second"), mean("time_to_first_token_ms") / 1e3, mean("inter_token_latency_ms") / 1e3
    return MeasuredLoad(f"guidellm, {name}", *tokens, clients, None if clients else float(rate), *figures)
