"""Measure what WAA's buffer time gains when input and output lengths correlate (ExeGPT sec. 5.2).

    python -m benchmarks.correlated --trace FILE [--requests 2000] [--measured] [--seconds 400]

Requests have the lengths of a trace, in four orders of arrival: as recorded; inputs and outputs shuffled separately;
paired so that they correlate by +0.54 (ExeGPT finds +0.57 to +0.94 in translations, Azure has -0.17 in conversations);
and the same pairs sorted by input within each 512, as from a client that works through sorted files. Buffer times are
multiples of the time that a batch without a buffer takes until it joins. Each setting serves the same requests, all of
which wait from the beginning, in the simulated engine. With --measured, a scaled-down trace runs on two devices of this
machine, with all settings in turn, and the table shows predicted and measured changes relative to the setting without a
buffer. Prints tables and writes results/correlated.json and .md (the page docs/results/correlated.md).
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from scipy.special import ndtri
from scipy.stats import rankdata

from benchmarks.drift import SMALL
from xgpt.cli.render import progress_bar
from xgpt.core.errors import InfeasibleError
from xgpt.core.io import write_atomic
from xgpt.core.schema import ClusterSpec, Constraint, Plan, Profile, WaaSettings, Workload
from xgpt.core.schema.step_log import StepRecord
from xgpt.core.workload import TraceLengths, histogram_of
from xgpt.resolve import load_cluster, load_model, load_trace
from xgpt.serving.engine_process import build_engine
from xprofiler import analytic
from xprofiler.store import obtain_profile
from xrunner.engine import Engine
from xrunner.generation import Generation
from xscheduler.problem import Problem
from xscheduler.schedule import Scheduler
from xsimulator.measures import Measured
from xsimulator.run import read_log, requests_to_send, run_requests

RESULTS = Path("results/correlated")
CORRELATION = 0.54
RUN = 512
"""Number of consecutive requests that are sorted by input."""
BUFFERS = (1.0, 1.25, 1.5)
"""Buffer times, as multiples of the decode iterations that pass until a batch without a buffer joins."""
SCALE = 1 / 16
"""Factor on the trace's lengths for the measured model."""
BOUND_FACTOR = 2.0
"""The measured plan's bound, as a multiple of the tightest bound that WAA keeps."""
Ints = np.ndarray[Any, np.dtype[np.int_]]
Pairs = tuple[Ints, Ints]


@dataclass(frozen=True)
class Arm:
    """A buffer time, in decode iterations. 0 means no buffer."""

    buffer: int = 0

    def of(self, plan: Plan) -> Plan:
        policy = plan.policy.model_copy(update={"buffer_iterations": self.buffer})
        return plan.model_copy(update={"policy": policy})

    def __str__(self) -> str:
        return f"buffer {self.buffer}" if self.buffer else "none"


@dataclass(frozen=True)
class Outcome:
    """The figures of a run.

    Attributes:
        spread_of_batches, spread_of_encoding: relative standard deviation of the number of requests in a decode step,
            and of the number of prompt tokens in a step that encodes.
    """

    measured: Measured
    spread_of_batches: float
    spread_of_encoding: float

    @classmethod
    def of(cls, plan: Plan, log: list[StepRecord], num_requests: int) -> Outcome:
        middle = log[len(log) // 5 : -len(log) // 5]
        batches = np.asarray([len(record.decode) for record in middle if record.decode])
        encoded = np.asarray([sum(n for _, _, n in record.encode) for record in middle if record.encode])
        measured = read_log(plan, plan.workload, log, num_requests, saturated=True)
        return cls(measured, float(batches.std() / batches.mean()), float(encoded.std() / encoded.mean()))

    @property
    def cells(self) -> list[str]:
        taken = self.measured
        seconds = (taken.latency_s, taken.request_latency_s, taken.itl_p99_s)
        spreads = (self.spread_of_batches, self.spread_of_encoding)
        return [f"{taken.throughput_rps:.3f}", *(f"{s:.3f}" for s in seconds), *(f"{100 * s:.1f}%" for s in spreads)]


COLUMNS = (
    "req/s",
    "latency s",
    "p99 of all requests' latency, s",
    "p99 gap between tokens, s",
    "spread of decode batches",
    "spread of encoded tokens",
)


def orders_of(trace: TraceLengths, count: int, rng: np.random.Generator) -> dict[str, Pairs]:
    inputs, outputs = trace.input[:count], trace.output[:count]
    chance = rng.permutation(len(inputs))
    inputs_then, apart = inputs[chance], rng.permutation(outputs)
    paired = correlated(inputs_then, outputs, CORRELATION, rng)
    alike = np.concatenate([run[np.argsort(inputs_then[run], kind="stable")] for run in _runs(np.arange(len(inputs)))])
    return {
        "as recorded": (inputs, outputs),
        "independent": (inputs_then, apart),
        "paired": (inputs_then, paired),
        "paired, runs of alike inputs": (inputs_then[alike], paired[alike]),
    }


def correlated(inputs: Ints, outputs: Ints, wanted: float, rng: np.random.Generator) -> Ints:
    """Return the outputs in an order with the wanted correlation to the inputs, by the ranks of two normal
    variables."""
    of_inputs, of_chance = (
        ndtri((rankdata(x, "ordinal") - 0.5) / len(inputs)) for x in (inputs, rng.random(len(inputs)))
    )
    low, high, rising = 0.0, 1.0, np.sort(outputs)
    for _ in range(30):
        share = (low + high) / 2
        score = share * of_inputs + np.sqrt(1 - share**2) * of_chance
        found = rising[rankdata(score, "ordinal") - 1]
        low, high = (share, high) if np.corrcoef(inputs, found)[0, 1] < wanted else (low, share)
    return found


def _runs(order: Ints) -> Iterator[Ints]:
    return (order[i : i + RUN] for i in range(0, len(order), RUN))


def arms_of(plan: Plan, profile: Profile, pairs: Pairs) -> list[Arm]:
    assert isinstance(plan.policy, WaaSettings)
    log = run_requests(plan, profile, TraceLengths(*pairs, None), plan.workload.output.lengths[-1])
    passed = iterations_until_joined(log) / plan.policy.decode_microbatches
    return [Arm(), *dict.fromkeys(Arm(buffer=max(1, round(times * passed))) for times in BUFFERS)]


def iterations_until_joined(log: Sequence[StepRecord]) -> float:
    """Return the mean number of decode steps that begin between a request's encode step and its first decode step."""
    begun: dict[int, int] = {}
    passed: list[int] = []
    count = 0
    for record in sorted(log, key=lambda record: record.number):
        begun |= {id_: count for id_, _, _ in record.encode}
        passed += [count - begun.pop(id_) for id_ in record.decode if id_ in begun]
        count += bool(record.decode)
    return float(np.mean(passed[len(passed) // 5 :]))


def run(plan: Plan, profile: Profile, pairs: Pairs, num_requests: int) -> Outcome:
    log = run_requests(plan, profile, TraceLengths(*pairs, None), plan.workload.output.lengths[-1])
    return Outcome.of(plan, log, num_requests)


def predicted(trace: TraceLengths, num_requests: int) -> list[str]:
    (model, _), cluster = load_model("llama-3.1-8b"), load_cluster("a100x16")
    workload = Workload(name="trace", input=histogram_of(trace.input), output=histogram_of(trace.output))
    profile = analytic.profile(model, cluster, "bfloat16")
    bound_s = 20.0
    problem = Problem(
        model, None, cluster, workload, profile, Constraint(latency_bound_s=bound_s), max_devices=4, replicas=1
    )
    plan = Scheduler(problem).best(["waa"])
    total = num_requests + 4 * round(plan.estimate.decode_batch + plan.estimate.encode_batch)
    orders = orders_of(trace, min(total, len(trace.input)), np.random.default_rng(0))
    rows = []
    arms = arms_of(plan, profile, orders["paired"])
    for name, pairs in orders.items():
        for arm in arms:
            done = run(arm.of(plan), profile, pairs, num_requests)
            rows.append([name, str(arm), *done.cells])
            click.echo("  ".join(rows[-1]))
    return [
        f"### {settings(plan)}",
        "",
        f"{model.name} on four devices of {cluster.name}, a latency bound of {bound_s:g} s; in closed form "
        f"{plan.estimate.throughput_rps:.3f} req/s, {plan.estimate.latency_s:.3f} s.",
        "",
        *table(("arrivals", "setting", *COLUMNS), rows),
    ]


def measured(trace: TraceLengths, num_requests: int, seconds: float) -> list[str]:
    cluster = load_cluster("local:2")
    inputs, outputs = (np.maximum(1, np.rint(SCALE * lengths)).astype(int) for lengths in (trace.input, trace.output))
    small = trace._replace(input=inputs, output=outputs)
    with progress_bar() as progress:
        profile = obtain_profile(SMALL, None, cluster, progress)
    plan = small_plan(cluster, inputs, outputs, profile)
    total = requests_to_send(plan, num_requests, saturated=True)
    orders = orders_of(small, min(total, len(inputs)), np.random.default_rng(0))
    names = ("paired", "paired, runs of alike inputs")
    found: dict[str, dict[Arm, list[Outcome]]] = {name: {} for name in names}
    arms, started, num_rounds = arms_of(plan, profile, orders["paired"]), time.perf_counter(), 0
    while not num_rounds or (time.perf_counter() - started) * (1 + 1 / num_rounds) < seconds:
        for name in names:
            for arm in arms:  # settings take turns, so that the machine's pace affects all of them
                found[name].setdefault(arm, []).append(execute(arm.of(plan), orders[name], num_requests))
        num_rounds += 1
        click.echo(f"round {num_rounds}, {time.perf_counter() - started:.0f} s")
    rows = [row for name in names for row in gains(plan, profile, name, orders[name], num_requests, found[name])]
    columns = ("arrivals", "setting", *(f"{lengths}, {how}" for how in ("predicted", "measured") for lengths in RATIOS))
    return [
        f"### Measured: {settings(plan)}",
        "",
        f"{SMALL.name} on two devices of this machine, the trace's lengths times 1/{1 / SCALE:.0f}, a latency bound of "
        f"{plan.constraint.latency_bound_s:g} s; {num_rounds} rounds of {num_requests} requests, settings by turns. "
        "Gains over the setting without a buffer, predicted and measured: the median of the rounds, the least and "
        "the most.",
        "",
        *table((*columns, "spread of decode batches"), rows),
    ]


def small_plan(cluster: ClusterSpec, inputs: Ints, outputs: Ints, profile: Profile) -> Plan:
    """Return a plan of WAA under a bound, so that a run of a few hundred requests has many batches."""
    workload = Workload(name="scaled", input=histogram_of(inputs), output=histogram_of(outputs))
    problem = Problem(SMALL, None, cluster, workload, profile, Constraint(latency_bound_s=1e-6))
    try:
        return Scheduler(problem).best(["waa"])
    except InfeasibleError as error:
        assert error.nearest_bound_s is not None
        bound_s = round(BOUND_FACTOR * error.nearest_bound_s, 2)
    return Scheduler(replace(problem, constraint=Constraint(latency_bound_s=bound_s))).best(["waa"])


def gains(
    plan: Plan, profile: Profile, name: str, pairs: Pairs, num_requests: int, found: dict[Arm, list[Outcome]]
) -> Iterator[list[str]]:
    base = run(plan, profile, pairs, num_requests).measured
    for arm, outcomes in found.items():
        said = run(arm.of(plan), profile, pairs, num_requests).measured
        cells = [f"{_ratio(said, base, ratio) - 1:+.1%}" for ratio in RATIOS]
        for ratio in RATIOS:
            each = [_ratio(x.measured, y.measured, ratio) - 1 for x, y in zip(outcomes, found[Arm()], strict=True)]
            cells.append(f"{np.median(each):+.1%} ({min(each):+.1%} to {max(each):+.1%})")
        spread = np.mean([outcome.spread_of_batches for outcome in outcomes])
        yield [name, str(arm), *cells, f"{spread:.1%}"]
        click.echo("  ".join([name, str(arm), *cells]))


RATIOS: dict[str, Callable[[Measured], float]] = {
    "throughput": lambda outcome: outcome.throughput_rps,
    "latency": lambda outcome: outcome.latency_s,
}


def _ratio(found: Measured, base: Measured, figure: str) -> float:
    return RATIOS[figure](found) / RATIOS[figure](base)


def execute(plan: Plan, pairs: Pairs, num_requests: int) -> Outcome:
    log: list[StepRecord] = []
    engine = build_engine(plan, log.append)
    assert isinstance(engine, Engine)
    try:
        tokens = np.random.default_rng(0).integers(0, plan.model.vocab_size, int(max(pairs[0])))
        for i, (length, output) in enumerate(zip(*(column.tolist() for column in pairs), strict=True)):
            prompt = tuple(tokens[:length].tolist())
            engine.submit(Generation(i, prompt, plan.workload.output.lengths[-1], output_length=output))
        while not engine.pool.is_idle or not log:
            engine.step()
    finally:
        engine.close()
    return Outcome.of(plan, log, num_requests)


def settings(plan: Plan) -> str:
    variables = [f"{variable.name} {getattr(plan.policy, variable.name)}" for variable in plan.policy.variables]
    lanes = dict.fromkeys(stage.lane for stage in plan.stages)
    shape = " > ".join(str([stage.tp for stage in plan.stages if stage.lane == lane]) for lane in lanes)
    return ", ".join([*variables, shape])


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(r) + " |" for r in rows),
        "",
    ]


@click.command()
@click.option("--trace", "path", required=True, metavar="FILE", help="Trace, as for xgpt plan --workload.")
@click.option("--requests", "num_requests", default=2000, show_default=True, help="Number of measured requests.")
@click.option("--measured", "is_measured", is_flag=True, help="Run a scaled-down trace on this machine instead.")
@click.option("--seconds", default=400.0, show_default=True, help="Duration of measuring, in whole rounds.")
def main(path: str, num_requests: int, is_measured: bool, seconds: float) -> None:
    """Simulate, or measure, each setting under each order of arrival."""
    trace = load_trace(path)
    if trace is None:
        raise click.UsageError(f"--trace: {path} is no trace")
    correlation = np.corrcoef(trace.input, trace.output)[0, 1]
    neighbours = np.corrcoef(trace.input[:-1], trace.input[1:])[0, 1]
    command = f"python -m benchmarks.correlated --trace {Path(path).name} --requests {num_requests}"
    command += " --measured" * is_measured
    lines = [
        f"`{command}`, {datetime.date.today()}. As recorded, inputs and outputs have a correlation of "
        f"{correlation:+.2f}, and the inputs of neighbours one of {neighbours:+.2f}. In the order `paired`, inputs and "
        f"outputs are made to correlate, by {CORRELATION:+.2f}.",
        "",
        *(measured(trace, min(num_requests, 400), seconds) if is_measured else predicted(trace, num_requests)),
    ]
    write_atomic(RESULTS.with_suffix(".md"), "\n".join(lines))
    write_atomic(RESULTS.with_suffix(".json"), json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
