"""Measure the reuse of prompts: its cost, lost blocks, and predicted and measured cache hits.

    python -m benchmarks.reuse overhead
    python -m benchmarks.reuse soak [--requests 20000]
    python -m benchmarks.reuse curve TRACE.jsonl...
    python -m benchmarks.reuse served [--requests 60] [--latency-bound 18]
    python -m benchmarks.reuse gain
    python -m benchmarks.reuse page -o docs/results/reuse.md

Each command stores its part of the page in `--work DIR`, and `page` joins the parts. `served` plans a scaled agent
trace for this machine with and without reuse, runs both plans, runs one of them with reuse turned off, and compares
predictions with measurements. `gain` simulates such plans under several bounds and sizes of memory. Results that are
already in DIR (profile, a plan's run) are not computed again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from benchmarks.lib.exact_reuse import exact_share
from benchmarks.lib.made import page as made_page
from tools.structured import BLOCK, shared_prompts, write
from xgpt.core.io import load_json, write_atomic
from xgpt.core.policies import BlockTable, LaneSettings, OneLane, Pool, Request, Step
from xgpt.core.reuse_distances import ReuseCurve
from xgpt.core.schema import ANYONE, Plan, Profile
from xgpt.core.schema.step_log import StepRecord
from xgpt.core.traces import read_lengths
from xgpt.core.workload import TraceLengths
from xrunner.engine import Engine
from xrunner.executor import OneAtATime
from xrunner.generation import Generation
from xrunner.prefixes import Prefixes

VOCABULARY = 50_000
MEMORY_GIB = 2.9
"""Memory of the machine, so small that it must be divided between running requests and cached blocks."""
SIZES_GIB = (2.9, 4.0, 6.0)
BOUNDS_S = (60.0, 25.0, 18.0, 12.0)
REPEATS = 7
"""Number of measurements of an overhead. The shortest counts."""
PARTS = ("served-*", "gain", "curve", "overhead", "soak")
SERVED = """## Planned and measured, latency within {bound:g} s

`python -m benchmarks.reuse served --requests {count} --latency-bound {bound:g}` serves OPT-125M (random weights),
chunked, on {device}, with memory limited to {memory} GiB so that running requests and cached blocks compete for it.
Requests that use an agent's tools are always waiting. Each prompt has one of {prompts} common beginnings
({prompt_tokens} tokens on average; the n-th one has a probability in proportion to n^-0.8), and a question of
{mean_input:.0f} tokens. Each answer has {mean_output:.0f} tokens. {count} requests are measured, and the simulated
engine runs the same requests. TTFT and latency count from admission, and latency is that of a request at the
quantile's length. An error is the simulated figure relative to the measured one. The pace is the ratio of measured to
predicted step times. In "error at the pace", the simulation's step times are multiplied by the pace.

| plan | reuse | token budget | largest batch | req/s: closed form | simulated | measured | error | {at_pace} | pace |
|---|---|---|---|---|---|---|---|---|---|
{rates}

| plan | reuse | TTFT simulated | measured | error | {at_pace} | share found in the cache, simulated | measured |
|---|---|---|---|---|---|---|---|
{firsts}

| plan | reuse | latency simulated | measured | error | {at_pace} |
|---|---|---|---|---|---|
{latencies}

{gain}
"""
CURVE = """`python -m benchmarks.reuse curve` predicts the share of prompt tokens that are found in the cache, in one
pass over the trace ("predicted"). It also replays the trace block by block on the engine's own blocks ("replayed").
`conversation_trace` and `synthetic_trace` are from Mooncake's FAST'25 release. Of its third trace,
`toolagent_trace`, only 93 rows were available (`toolagent_extract`)."""


@click.group()
@click.option("--work", default="results/reuse", show_default=True, type=click.Path(path_type=Path))
@click.pass_context
def main(context: click.Context, work: Path) -> None:
    """Measure the reuse of prompts."""
    work.mkdir(parents=True, exist_ok=True)
    context.obj = work


@main.command()
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path))
@click.pass_obj
def page(work: Path, output: Path) -> None:
    """Write the parts that the other commands stored as one page."""
    parts = [part.read_text(encoding="utf-8") for name in PARTS for part in sorted(work.glob(f"{name}.md"))]
    text = "`python -m benchmarks.reuse` writes this page. [Reuse of prompts](../guide/reuse.md) explains the terms."
    write_atomic(output, made_page("Reuse of prompts", text, "\n".join(parts)))


@contextmanager
def _part(work: Path, name: str) -> Iterator[list[str]]:
    lines: list[str] = []
    yield lines
    text = "\n".join(lines) + "\n"
    click.echo(text)
    write_atomic(work / f"{name}.md", text)


@main.command()
@click.option("--requests", default=300, show_default=True)
@click.pass_obj
def overhead(work: Path, requests: int) -> None:
    """Measure the microseconds to hash a prompt and to find, share, name and release its blocks, on one core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    counts = (1, 2, 4, 8, 16, 64, 512)
    least = [np.min([_overhead(count, requests) for _ in range(REPEATS)], axis=0) for count in counts]
    found = 1e6 * np.asarray([(hashed, shared - alone) for hashed, alone, shared in least])
    total = found.sum(axis=1)
    each, request = np.polyfit(counts, total, 1, w=1 / total)
    with _part(work, "overhead") as lines:
        lines += ["## Overhead", ""]
        lines.append(
            "`python -m benchmarks.reuse overhead` measures the CPU time of one pinned thread for each request. Each "
            f"figure is the lowest of {REPEATS} rounds of {requests} requests. A line fitted to the figures gives "
            f"{request:.1f} us for each request and {each:.2f} us for each block of {BLOCK} tokens."
        )
        lines += [
            "",
            "| blocks of a prompt | hashing, us | scheduling rule, us | together | by the fitted line |",
            "|---|---|---|---|---|",
        ]
        for count, (hashed, ruled) in zip(counts, found, strict=True):
            line = request + each * count
            lines.append(f"| {count} | {hashed:.1f} | {ruled:.1f} | {hashed + ruled:.1f} | {line:.1f} |")


def _overhead(count: int, requests: int) -> tuple[float, float, float]:
    """Return the seconds per request for the keys, and for the rule without and with sharing."""
    prompt, prefixes = tuple(range(count * BLOCK)), Prefixes()
    start = time.thread_time()
    for _ in range(requests):
        chain = prefixes.extend((), prompt, BLOCK, ANYONE)
    hashed = (time.thread_time() - start) / requests
    seconds = []
    for keys in ((), chain):
        pool = Pool(4 * count + 8, BLOCK)
        lane = OneLane(LaneSettings(mix=True, max_batch=1), pool)
        start = time.thread_time()
        for id_ in range(requests):
            lane.submit(Request(id_, len(prompt), 1, chain=keys))
            step = lane.next_step()
            assert step is not None
            lane.settle(step, [id_])
        seconds.append((time.thread_time() - start) / requests)
    return hashed, seconds[0], seconds[1]


@main.command()
@click.option("--requests", default=20_000, show_default=True)
@click.pass_obj
def soak(work: Path, requests: int) -> None:
    """Run requests that share, grow, are preempted and cancelled through the engine, and count its blocks."""
    rng = np.random.default_rng(0)
    with _part(work, "soak") as lines:
        lines += [
            "## No block lost",
            "",
            "`python -m benchmarks.reuse soak` submits requests that share blocks, and that grow, are preempted or are",
            "cancelled. Then it checks that every block can be allocated again, exactly once.",
            "",
        ]
        for kv in ("reserve", "quantile"):
            preempted, seconds = _soaked(kv, requests, rng)
            lines.append(f"- `{kv}`: {requests} requests in {seconds:.0f} s, {preempted} preemptions, no block lost")


def _soaked(kv: str, requests: int, rng: np.random.Generator) -> tuple[int, float]:
    """Return the number of preemptions, and the seconds."""
    pool = Pool(400, BLOCK, kv=kv)  # type: ignore[arg-type]
    engine = Engine(OneLane(LaneSettings(mix=True, token_budget=256, max_batch=32), pool), _Echo(), reuse=True)
    started, submitted = time.perf_counter(), 0
    while submitted < requests or not pool.is_idle:
        while submitted < requests and pool.num_waiting < 40:
            begin = (int(rng.zipf(1.5)) % 97,) * int(rng.integers(1, 400))
            prompt = (*begin, *rng.integers(0, 9, int(rng.integers(1, 60))).tolist())
            engine.submit(Generation(submitted, prompt, 200, output_length=int(rng.integers(1, 200))))
            submitted += 1
        if rng.random() < 0.02:
            engine.cancel(submitted - 1 - int(rng.integers(60)))
        engine.step()
    engine.step()
    blocks = pool.memory.decodes
    assert blocks.num_used == 0 == pool.reserved_blocks, "a block is lost"
    table = blocks.share([])
    for _ in range(blocks.count):  # every block can be allocated again, exactly once
        blocks.grow(table)
    assert sorted(table.blocks) == list(range(blocks.count))
    seconds = time.perf_counter() - started
    return pool.num_preemptions, seconds


class _Echo(OneAtATime):
    def __init__(self) -> None:
        super().__init__()
        self._prompts: dict[int, int] = {}

    def start(self, generation: Generation, table: BlockTable, moves_to: BlockTable | None = None) -> None:
        self._prompts[generation.id] = len(generation.prompt)

    def release(self, ids: Collection[int]) -> None:
        for id_ in ids:
            self._prompts.pop(id_, None)

    def execute(self, step: Step) -> dict[int, int]:
        ended = [c.id for c in step.encode if c.start + c.length == self._prompts[c.id]]
        return dict.fromkeys([*ended, *step.decode], 1)


@main.command()
@click.argument("traces", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.pass_obj
def curve(work: Path, traces: tuple[Path, ...]) -> None:
    """Compute the share of cached prompt tokens at eight cache sizes, predicted in one pass and replayed block by
    block."""
    with _part(work, "curve") as lines:
        lines += ["## Reused share by cache size", "", CURVE]
        for path in traces:
            trace = read_lengths(path)
            assert trace.prefixes is not None, f"{path} does not say what requests have in common"
            size = trace.prefixes.block_size
            start = time.perf_counter()
            found = ReuseCurve(trace, size)
            seconds = time.perf_counter() - start
            longest = int((trace.input + trace.output).max())
            sizes = np.geomspace(1.2 * longest, max(float(found.sizes(8)[-1]), 3.0 * longest), 8)
            about = f"{len(trace.input):,} requests, reusable at most {found.most:.1%}, {seconds:.2f} s"
            lines += ["", f"{path.name}: {about}.", "", "| cache, tokens | predicted | replayed | difference, points |"]
            lines.append("|---|---|---|---|")
            for tokens in sizes:
                predicted, replayed = found.share(tokens), exact_share(trace, int(tokens) // size, size)
                row = f"| {tokens:,.0f} | {predicted:.1%} | {replayed:.1%} | {100 * (predicted - replayed):+.2f} |"
                lines.append(row)


AGENTS = {"prompts": 12, "prompt_tokens": 400, "mean_input": 60.0, "mean_output": 40.0}
"""Arguments of `shared_prompts`."""
MOST_TOKENS = 1800
"""Largest number of tokens of a request. Longer requests are left out."""


class Shown(NamedTuple):
    """The figures of a run.

    Attributes:
        rate: requests a second at saturation.
        first_s: mean time from admission to the first token.
        latency_s: mean time from admission to the last token, at the length of the plan's quantile.
        found: share of prompt tokens that were cached.
        pace: measured time of the steps divided by their predicted time, or 1 in simulation.
    """

    rate: float
    first_s: float
    latency_s: float
    found: float
    pace: float = 1.0


@main.command()
@click.option("--requests", default=60, show_default=True, help="Requests that are measured after the batch is full.")
@click.option("--latency-bound", default=60.0, show_default=True, help="Seconds.")
@click.pass_obj
def served(work: Path, requests: int, latency_bound: float) -> None:
    """Predict and measure plans with and without reuse on this machine."""
    trace = _agents()
    steps, aware, unaware = _planned(work, trace, MEMORY_GIB, latency_bound)
    rates, firsts, latencies, measured = [], [], [], []
    for name, plan, reuse in (
        ("expects reuse", aware, True),
        ("made from lengths", unaware, True),
        ("made from lengths", unaware, False),
    ):
        which = f"{'aware' if plan is aware else 'unaware'}-{'on' if reuse else 'off'}"
        kept = work / f"run-{latency_bound:g}-{requests}-{which}.json"
        if not kept.exists():
            write_atomic(kept, json.dumps(_measured(plan, steps, trace, requests, reuse=reuse)))
        shown = Shown(*json.loads(kept.read_text()))
        simulated = _simulated(plan, steps, trace, requests, reuse=reuse)
        measured.append(shown)
        mode, policy = "on" if reuse else "off", plan.policy
        cells = [name, mode, f"{policy.token_budget}", f"{policy.max_batch}", f"{plan.estimate.throughput_rps:.2f}"]  # type: ignore[union-attr]
        cells += _compared(simulated.rate, shown.rate, 1 / shown.pace, "")
        rates.append(f"| {' | '.join([*cells, f'{shown.pace:.2f}'])} |")
        cells = [name, mode, *_compared(simulated.latency_s, shown.latency_s, shown.pace, " s")]
        latencies.append(f"| {' | '.join(cells)} |")
        cells = [name, mode, *_compared(simulated.first_s, shown.first_s, shown.pace, " s")]
        firsts.append(f"| {' | '.join([*cells, f'{simulated.found:.1%}', f'{shown.found:.1%}'])} |")
        click.echo(rates[-1] + "\n" + firsts[-1])
    even = [shown.rate * shown.pace for shown in measured]
    gained = (
        f"The plan that expects reuse serves {measured[0].rate / measured[1].rate:.2f} times as much as the plan made "
        f"only from lengths, and {measured[0].rate / measured[2].rate:.2f} times as much as the latter plan without "
        f"reuse. If all three runs had the same pace, these ratios would be {even[0] / even[1]:.2f} and "
        f"{even[0] / even[2]:.2f}."
    )
    with _part(work, f"served-{latency_bound:g}") as lines:
        tables = {"rates": rates, "firsts": firsts, "latencies": latencies}
        filled = {
            "gain": gained,
            "device": steps.device,
            "at_pace": "error at the pace",
            **{name: "\n".join(rows) for name, rows in tables.items()},
        }
        lines.append(SERVED.format(count=requests, memory=MEMORY_GIB, bound=latency_bound, **AGENTS, **filled))


@main.command()
@click.option("--requests", default=400, show_default=True)
@click.pass_obj
def gain(work: Path, requests: int) -> None:
    """Simulate the gain of plans that expect reuse, by memory and by bound."""
    trace = _agents()
    with _part(work, "gain") as lines:
        lines += ["## Gain by memory and bound", ""]
        lines.append(
            f'`python -m benchmarks.reuse gain` simulates both plans on {requests} requests. "Aware" is the plan that '
            'expects reuse, run with reuse. "Unaware" is the plan made only from lengths, run with reuse. "Unaware, '
            'off" is the same plan, run without reuse. The table has the largest batches of the aware and the unaware '
            "plan, and requests a second."
        )
        lines += [
            "",
            "| memory, GiB | bound, s | largest batches | aware, req/s | unaware, req/s | unaware, off, req/s | "
            "aware / unaware | aware / unaware, off |",
        ]
        lines.append("|---|---|---|---|---|---|---|---|")
        for memory in SIZES_GIB:
            for bound in BOUNDS_S:
                steps, aware, unaware = _planned(work, trace, memory, bound)
                arms = [(aware, True), (unaware, True), (unaware, False)]
                rates = [_simulated(plan, steps, trace, requests, reuse=reuse).rate for plan, reuse in arms]
                batches = f"{aware.policy.max_batch}, {unaware.policy.max_batch}"  # type: ignore[union-attr]
                cells = [f"{memory:g}", f"{bound:g}", batches, *(f"{rate:.2f}" for rate in rates)]
                lines.append(f"| {' | '.join([*cells, *(f'{rates[0] / rate:.2f}' for rate in rates[1:])])} |")


def _compared(predicted: float, measured: float, at_pace: float, unit: str) -> list[str]:
    errors = (f"{100 * (pace * predicted / measured - 1):+.1f}%" for pace in (1.0, at_pace))
    return [f"{predicted:.2f}{unit}", f"{measured:.2f}{unit}", *errors]


def _agents() -> TraceLengths:
    trace = shared_prompts(2000, np.random.default_rng(0), **AGENTS)  # type: ignore[arg-type]
    return trace.take(np.flatnonzero(trace.input + trace.output <= MOST_TOKENS))


def _planned(work: Path, trace: TraceLengths, memory_gib: float, bound_s: float) -> tuple[Profile, Plan, Plan]:
    """Return the profile, the plan that expects reuse, and the plan from lengths only."""
    import xgpt
    from xgpt.resolve import load_cluster

    cluster = load_cluster("local")
    device = cluster.device.model_copy(update={"memory_bytes": int(memory_gib * 2**30)})
    agents, lengths, times = work / "agents.jsonl", work / "lengths.csv", work / "profile.json"
    write_atomic(agents, write(trace))
    pairs = zip(trace.input.tolist(), trace.output.tolist(), strict=True)
    write_atomic(lengths, "input,output\n" + "".join(f"{i},{o}\n" for i, o in pairs))
    if not times.exists():
        write_atomic(times, xgpt.profile(model="opt-125m").model_dump_json())
    steps = load_json(times, Profile, "profile")
    asked = {
        "model": "opt-125m",
        "cluster": cluster.model_copy(update={"device": device}),
        "objective": "saturated",
        "policy": "chunked",
        "latency_bound_s": bound_s,
        "profile": steps,
    }
    aware, unaware = (xgpt.plan(**asked, workload=path) for path in (agents, lengths))  # type: ignore[arg-type]
    return steps, aware, unaware


def _simulated(plan: Plan, profile: Profile, trace: TraceLengths, count: int, *, reuse: bool) -> Shown:
    from xsimulator.run import requests_to_send, run_requests

    sent = trace.take(np.arange(requests_to_send(plan, count, saturated=True)))
    sent = sent._replace(timestamp_s=None, prefixes=sent.prefixes if reuse else None)
    return _read(plan, run_requests(plan, profile, sent, plan.workload.output.lengths[-1]), count)


def _measured(plan: Plan, profile: Profile, trace: TraceLengths, count: int, *, reuse: bool) -> Shown:
    from xgpt.serving.engine_process import build_engine
    from xsimulator.executed import paces
    from xsimulator.run import requests_to_send

    log: list[StepRecord] = []
    engine = build_engine(plan, log.append, reuse=reuse)
    longest = plan.workload.output.lengths[-1]
    try:
        for number in range(requests_to_send(plan, count, saturated=True)):
            output = int(trace.output[number])
            engine.submit(Generation(number, _prompt(trace, number), longest, output_length=output))
        while engine.step() is not None:
            pass
    finally:
        engine.close()
    pace = paces(plan, profile, log)
    assert pace is not None
    return _read(plan, log, count)._replace(pace=pace.ratio)


def _read(plan: Plan, log: list[StepRecord], count: int) -> Shown:
    from xsimulator.run import read_log, reused_share

    found = read_log(plan, plan.workload, log, count, saturated=True)
    return Shown(found.throughput_rps, found.ttft_s, found.latency_s, reused_share(log))


def _prompt(trace: TraceLengths, number: int) -> tuple[int, ...]:
    """Return the tokens of a request. Each block's id is the seed of its tokens."""
    assert trace.prefixes is not None
    ids = trace.prefixes.prompts[number]
    drawn = [np.random.default_rng(id_).integers(4, VOCABULARY, BLOCK) for id_ in ids]
    return tuple(np.concatenate(drawn)[: trace.input[number]].tolist())


if __name__ == "__main__":
    main()
