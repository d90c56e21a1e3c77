"""Fit a plan's step times to a user's results of `vllm bench serve`, AIPerf, guidellm or genai-perf.

Each measured load is simulated with its own lengths, and with its number of clients or its arrival rate. The values of
`xsimulator.fitted.Fit` are fitted to the mean TTFT and the mean time between tokens. If there are several loads, every
second one is left out of the fit. The fit's error is measured on these. A prediction that is already good stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from xgpt.core.documents import read_json
from xgpt.core.errors import InputError, cut
from xgpt.core.io import read_text
from xgpt.core.schema import EngineSpec, FittedLoads, PlanDraft, Profile, Workload
from xgpt.core.schema.documents import CalibratedLoadOutput, CalibrateOutput
from xgpt.core.workload import ArrivalProcess, Ints, TraceLengths, histogram_of
from xsimulator.benchmarked import LEAST_CV, Benchmark, simulate_benchmark, times_at, variation_of
from xsimulator.fitted import Fit
from xsimulator.run import run_simulation

SCALES_S = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
NAMES = ("throughput_rps", "ttft_s", "tpot_s")
REQUESTS, MOST_REQUESTS = 200, 1000
ROUNDS = 6
SHIFT = 4.0
MOST_PATH_S = 0.5
"""Longest fitted time of a request outside the engine's loop. A longer one is a queue, which no parameter describes: a
load below saturation shows it.
"""
ERRORS = {1: 0.1, 2: 0.03}
"""Standard deviations of the logarithmic errors of mean TTFT and mean time between tokens (indices of `Figures`)."""
PRIOR = np.asarray((0.5, 0.3, 0.2, 0.5))
"""Standard deviations of the fitted values: logarithms of the factor on decode and of that on prefill relative to it,
the time added to a step as a share of the time between tokens, and that added to a request as a share of TTFT.
"""
UNKNOWN = 0.7
"""A value is hardly determined if the loads leave more than this share of its deviation."""
SHOWN_BY = (
    "decode: measure a load with long outputs",
    "prefill: measure a load with long prompts and short outputs",
    "the time of a step: measure loads with different numbers of clients",
    "the time of a request: measure one client, for whom nothing waits",
)
GOOD = {0: 0.05, 1: 0.1, 2: 0.05}
"""Largest errors of a prediction that is left as it is: of throughput, mean TTFT and mean time between tokens."""
QUEUED = 3.0
VLLM_ONLY = {"mean_ttft_ms", "mean_tpot_ms", "total_input_tokens"}
MOSTLY = 0.8
"""A load with a rate counts as a closed loop if, on average, at least this share of the allowed number of concurrent
requests run.
"""
Figures = tuple[float, float, float]
Array = npt.NDArray[np.float64]


class MeasuredLoad(NamedTuple):
    """What a benchmark measured at one load.

    Attributes:
        inputs, outputs: tokens of each request, or a single mean if the file states only a mean.
        clients, rate_per_s: number of concurrent clients, or rate at which requests are sent. The other one is None.
        num_requests: number of requests that ended. None means not known.
    """

    source: str
    inputs: tuple[float, ...]
    outputs: tuple[float, ...]
    clients: int | None
    rate_per_s: float | None
    throughput_rps: float
    ttft_s: float
    tpot_s: float
    variation: float = 1.0
    num_requests: int | None = None

    @property
    def arrivals(self) -> ArrivalProcess | None:
        return None if self.rate_per_s is None else ArrivalProcess.at(self.rate_per_s, self.variation)

    @property
    def workload(self) -> Workload:
        inputs, outputs = map(histogram_of, self._lengths)
        return Workload(name=self.source, input=inputs, output=outputs)

    @property
    def benchmark(self) -> Benchmark | None:
        """The requests as they were sent, or None if their number is not known."""
        count = self.num_requests or (len(self.inputs) if len(self.inputs) > 1 else 0)
        if not count:
            return None
        inputs, outputs = (np.resize(each, count) for each in self._lengths)
        rate = self.rate_per_s
        times = None if rate is None else times_at(rate, self.variation, count, np.random.default_rng(0))
        return Benchmark(self.source, TraceLengths(inputs, outputs, times), self.clients)

    @property
    def _lengths(self) -> tuple[Ints, Ints]:
        inputs, outputs = (np.maximum(1, np.rint(each)).astype(int) for each in (self.inputs, self.outputs))
        return inputs, outputs

    @property
    def outstanding(self) -> float:
        """Mean number of outstanding requests, by Little's law."""
        return self.throughput_rps * (self.ttft_s + self.tpot_s * (float(np.mean(self.outputs)) - 1))

    @property
    def figures(self) -> Figures:
        return self.throughput_rps, self.ttft_s, self.tpot_s


@dataclass(frozen=True)
class CalibratedLoads:
    """A profile fitted to measured loads.

    Attributes:
        engine: the plan's engine or, if the plan has none, the profile's. It contains the fitted time of a request
            outside the engine's loop.
    """

    profile: Profile
    engine: EngineSpec
    output: CalibrateOutput


def calibrate(plan: PlanDraft, profile: Profile, loads: Sequence[MeasuredLoad]) -> CalibratedLoads:
    """Fit a plan's profile and engine to measured loads. Return both, with the prediction errors before and after the
    fit.
    """
    used = tuple(len(loads) < 2 or i % 2 == 0 for i in range(len(loads)))
    plan = plan if plan.engine is not None else plan.but(engine=_bare_engine(profile))
    first = [predicted(plan, profile, load) for load in loads]
    fitted_to = [(load, figures) for load, figures, is_used in zip(loads, first, used, strict=True) if is_used]
    found, unknown, last = Fit(), list[str](), first
    if not all(_is_good(figures, load) for load, figures in zip(loads, first, strict=True)):
        found, unknown = _fit(plan, profile, fitted_to)
        last = [predicted(found.of_plan(plan), found.of_profile(profile), load) for load in loads]
        judged = [i for i, is_used in enumerate(used) if not is_used] or list(range(len(loads)))
        if _off([last[i] for i in judged], [loads[i] for i in judged]) >= _off(
            [first[i] for i in judged], [loads[i] for i in judged]
        ):  # a fit to noise makes loads that were left out worse
            found, last = Fit(), first
    results = [
        CalibratedLoadOutput(
            source=load.source,
            used=is_used,
            measured=dict(zip(NAMES, load.figures, strict=True)),
            before=_errors(before, load),
            after=_errors(after, load),
        )
        for load, is_used, before, after in zip(loads, used, first, last, strict=True)
    ]
    output = CalibrateOutput(**found._asdict(), unknown=tuple(unknown), loads=tuple(results))
    assert plan.engine is not None
    running = [load.outstanding / plan.replicas for load in loads]
    left = max(abs(value) for load in results for value in load.after.values())
    fitted = found.of_profile(profile).but(fitted=FittedLoads(running=(min(running), max(running)), error=left))
    return CalibratedLoads(fitted, found.of_engine(plan.engine), output)


def _is_good(figures: Figures, load: MeasuredLoad) -> bool:
    return all(abs(figures[i] / load.figures[i] - 1) <= most for i, most in GOOD.items())


def _off(found: Sequence[Figures], loads: Sequence[MeasuredLoad]) -> float:
    return float(np.mean([np.abs(np.log(np.divide(a, load.figures))) for a, load in zip(found, loads, strict=True)]))


def _errors(predicted: Sequence[float], load: MeasuredLoad) -> dict[str, float]:
    return {name: a / b - 1 for name, a, b in zip(NAMES, predicted, load.figures, strict=True)}


def _fit(plan: PlanDraft, profile: Profile, loads: Sequence[tuple[MeasuredLoad, Figures]]) -> tuple[Fit, list[str]]:
    """Return the most probable correction, and what would have to be measured to know each value that these loads
    hardly determine.

    Logarithmic errors of mean TTFT and mean time between tokens have the standard deviations `ERRORS`, and the values
    those of `PRIOR`. A TTFT that contains a queue which is not predicted says nothing about these values.
    """
    assert plan.engine is not None
    gap_s, first_s = (float(np.mean([load.figures[i] for load, _ in loads])) for i in (2, 1))
    queues = [load.ttft_s > MOST_PATH_S + QUEUED * figures[1] for load, figures in loads]

    def fit_of(values: Array) -> Fit:
        decode, split, step, path = map(float, values)
        return Fit(float(np.exp(decode)), float(np.exp(decode + split)), step * gap_s, path * first_s)

    def errors(values: Array) -> Array:
        fit = fit_of(values)
        changed_plan, changed = fit.of_plan(plan), fit.of_profile(profile)
        found = [predicted(changed_plan, changed, load) for load, _ in loads]
        off = [
            np.log(figures[i] / load.figures[i]) / deviation
            for figures, (load, _), is_queue in zip(found, loads, queues, strict=True)
            for i, deviation in ERRORS.items()
            if not (is_queue and i == 1)
        ]
        return np.asarray([*off, *(values / PRIOR)])

    pace = float(np.mean([np.log(load.tpot_s / figures[2]) for load, figures in loads]))
    lowest = (-1.5, -1.0, 0.0, -plan.engine.before_admission_s / first_s - 1e-9)
    highest = (1.5, 1.0, 1.0, min(1.0, MOST_PATH_S / first_s))
    start = np.clip((pace, 0.0, 0.05, 0.05), np.add(lowest, 1e-6), np.subtract(highest, 1e-6))
    # The optimiser's step sizes are proportional to the variables, so the variables are shifted away from 0.
    bounds = np.add(lowest, SHIFT), np.add(highest, SHIFT)
    found = least_squares(
        lambda x: errors(x - SHIFT),
        start + SHIFT,
        bounds=bounds,
        diff_step=0.02 / SHIFT,
        x_scale="jac",
        ftol=1e-3,
        max_nfev=ROUNDS,
    )
    deviations = np.sqrt(np.diag(np.linalg.inv(found.jac.T @ found.jac))) / PRIOR
    return fit_of(found.x - SHIFT), [text for text, left in zip(SHOWN_BY, deviations, strict=True) if left > UNKNOWN]


def _bare_engine(profile: Profile) -> EngineSpec:
    framework, version = profile.engine or "xgpt", profile.engine_version or "1"
    return EngineSpec(name=f"{framework}-{version}", framework=framework, version=version)


def predicted(plan: PlanDraft, profile: Profile, load: MeasuredLoad) -> Figures:
    if (benchmark := load.benchmark) is not None:
        run = simulate_benchmark(plan, profile, benchmark)
    else:
        count = min(MOST_REQUESTS, max(REQUESTS, 4 * (load.clients or 0)))
        run = run_simulation(plan, profile, load.workload, count, load.arrivals, 0, clients=load.clients)
    times = run.times
    assert times is not None
    return run.measured.throughput_rps, float(np.mean(times.ttft_s)), float(np.mean(times.tpot_s))


def read_loads(path: Path) -> list[MeasuredLoad]:
    """Read the loads in a result file of `vllm bench serve`, AIPerf, guidellm or genai-perf.

    Raises:
        InputError: the file is not such a result, or a figure is missing.
    """
    try:
        data = read_json(read_text(path, "measured"))
    except ValueError as error:
        says = f"it cannot be read as JSON: {error}; give the JSON file that the benchmark wrote"
        raise InputError("measured", str(path), says) from None
    try:
        found = list(_loads(data if isinstance(data, dict) else {}, path.name))
    except (KeyError, IndexError) as error:
        accepted = f"it lacks {str(error).strip(chr(39))}: give the complete result of a streamed benchmark"
        raise InputError("measured", str(path), accepted) from None
    except (TypeError, ValueError, AttributeError) as error:
        says = f"a figure in it is not a number ({error}); give the file as the benchmark wrote it"
        raise InputError("measured", str(path), says) from None
    except ZeroDivisionError:
        raise InputError("measured", str(path), f"none of its requests completed{_failures(data)}") from None
    if not found:
        known = "`vllm bench serve --save-result`, AIPerf (profile_export_aiperf.json), guidellm (benchmarks.json)"
        raise InputError("measured", str(path), f"it is no known result; give that of {known} or genai-perf")
    for load in found:
        for name, value in zip(NAMES, load.figures, strict=True):
            if not (np.isfinite(value) and value > 0):
                accepted = "it must be above 0: give the result of streamed requests that completed"
                raise InputError(f"measured: {load.source}: {name}", value, accepted)
    return found


def _failures(data: dict[str, Any]) -> str:
    errors = data.get("errors")
    first = next((str(each) for each in errors if each), "") if isinstance(errors, list) else ""
    return f"; the first error: {cut(' '.join(first.split()))}" if first else ": see the errors of the benchmark"


def _loads(data: Any, name: str) -> Iterator[MeasuredLoad]:
    if VLLM_ONLY & data.keys():
        yield _of_vllm(data, name)
    elif "time_to_first_token" in data or "input_sequence_length" in data:
        yield _of_nvidia(data, name)
    else:
        yield from (_of_guidellm(each, f"{name}, {i + 1}") for i, each in enumerate(data.get("benchmarks", ())))


def _of_vllm(data: dict[str, Any], name: str) -> MeasuredLoad:
    def number(key: str) -> float:
        if not isinstance(data.get(key), int | float):
            raise KeyError(key)
        return float(data[key])

    count, rate = number("completed"), data.get("request_rate", "inf")
    lengths = zip(data.get("input_lens") or (), data.get("output_lens") or (), strict=False)
    answered = [pair for pair in lengths if pair[1]]  # a failed request has no output
    if not answered:
        answered = [(number("total_input_tokens") / count, number("total_output_tokens") / count)]
    inputs, outputs = zip(*answered, strict=True)
    figures = throughput, first_s, gap_s = (
        number("request_throughput"),
        number("mean_ttft_ms") / 1e3,
        number("mean_tpot_ms") / 1e3,
    )
    limit = data.get("max_concurrency")
    outstanding = throughput * (first_s + gap_s * (float(np.mean(outputs)) - 1))
    is_open = rate not in ("inf", None) and float(rate) < float("inf") and outstanding < MOSTLY * (limit or np.inf)
    return MeasuredLoad(
        f"vllm bench serve, {name}",
        inputs,
        outputs,
        None if is_open else limit or data.get("num_prompts") or int(count),
        float(rate) if is_open else None,
        *figures,
        variation=variation_of(float(data.get("burstiness", 1.0))),
        num_requests=int(count),
    )


def _of_nvidia(data: dict[str, Any], name: str) -> MeasuredLoad:
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
    ended = int(mean("request_count")) if "request_count" in data else None
    return MeasuredLoad(f"{tool}, {name}", inputs, outputs, sent, None if sent else rate, *figures, num_requests=ended)


def _found(config: Any, key: str) -> float | None:
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
    variation = LEAST_CV if kind == "constant" else 1.0
    ended = metrics.get("request_totals", data.get("request_totals", {})).get("successful")
    rate_per_s = None if clients else float(rate)
    return MeasuredLoad(f"guidellm, {name}", *tokens, clients, rate_per_s, *figures, variation, ended and int(ended))
