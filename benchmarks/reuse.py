"""Reuse of prompts: what it costs, whether any block is lost, what is predicted of it and what is measured.

    python -m benchmarks.reuse overhead
    python -m benchmarks.reuse soak [--requests 20000]
    python -m benchmarks.reuse curve TRACE.jsonl...
    python -m benchmarks.reuse served [--quick]

`served` plans a scaled agent trace for this machine, once counting on reuse and once not, runs both plans and one of
them without reuse, and compares predictions with measurements. It measures a profile first where none is given.
"""

from __future__ import annotations

import datetime
import os
import platform
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

import click
import numpy as np

from tools.structured import BLOCK, shared_prompts, write
from xgpt.io import load_json
from xgpt.policies import BlockTable, LaneSettings, OneLane, Pool, Request, Step
from xgpt.reuse import ReuseCurve
from xgpt.schema import ANYONE, Plan, Profile
from xgpt.schema.step_log import StepRecord
from xgpt.workload import TraceLengths, read_lengths
from xrunner.engine import Engine
from xrunner.executor import OneAtATime
from xrunner.generation import Generation
from xrunner.prefixes import Prefixes
from xsimulator.reuse import exact_share

VOCABULARY = 50_000
MEMORY_GIB = 2.9
"""Of the machine, so that memory has to be divided."""
ROWS = """| plan | reuse | closed form, req/s | simulated | measured | error | at the pace \
| TTFT simulated | measured | error | at the pace | found simulated | measured |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""
PAGE = """# Reuse of prompts

Written by `{command}` on {date}: {machine}, xgpt {version}, OPT-125M (random weights), chunked, of whose memory
{memory} GiB are taken for the machine's, so that it has to be divided. {count} requests of an agent's tools: twelve
prompts of 400 tokens in the mean, drawn with probabilities in proportion to n^-0.8, a question of 60 and an answer of
40 behind them; all at hand. TTFT counts from admission. At the pace: with every step as much longer than its
prediction as the run's steps were.

{rows}

{gain}
"""


@click.group()
def main() -> None:
    """Reuse of prompts."""


@main.command()
@click.option("--requests", default=300, show_default=True)
def overhead(requests: int) -> None:
    """Microseconds to hash a prompt and to find, share, name and release its blocks."""
    click.echo("| blocks of a prompt | hashed, us | rule, us | us a block |\n|---|---|---|---|")
    base = None
    for count in (1, 8, 64, 512):
        hashed, ruled = min((_overhead(count, requests) for _ in range(3)), key=sum)
        base = base if base is not None else hashed + ruled
        each = (hashed + ruled - base) / max(1, count - 1)
        click.echo(f"| {count} | {1e6 * hashed:.1f} | {1e6 * ruled:.1f} | {1e6 * each:.2f} |")


def _overhead(count: int, requests: int) -> tuple[float, float]:
    """Return seconds a request for the keys, and for what sharing adds to the rule."""
    prompt, prefixes = tuple(range(count * BLOCK)), Prefixes()
    start = time.perf_counter()
    for _ in range(requests):
        chain = prefixes.extend((), prompt, BLOCK, ANYONE)
    hashed = (time.perf_counter() - start) / requests
    seconds = []
    for keys in ((), chain):
        pool = Pool(4 * count + 8, BLOCK)
        lane = OneLane(LaneSettings(mix=True, max_batch=1), pool)
        start = time.perf_counter()
        for id_ in range(requests):
            lane.submit(Request(id_, len(prompt), 1, chain=keys))
            step = lane.next_step()
            assert step is not None
            lane.settle(step, [id_])
        seconds.append((time.perf_counter() - start) / requests)
    return hashed, seconds[1] - seconds[0]


@main.command()
@click.option("--requests", default=20_000, show_default=True)
def soak(requests: int) -> None:
    """Run requests that share, grow, are preempted and cancelled through the engine, and count its blocks."""
    rng = np.random.default_rng(0)
    for kv in ("reserve", "quantile"):
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
        blocks = pool.blocks
        assert blocks.num_used == 0 == pool.reserved_blocks, "a block is lost"
        table = blocks.share([])
        for _ in range(blocks.count):  # every block can be handed out again, each once
            blocks.grow(table)
        assert sorted(table.blocks) == list(range(blocks.count))
        seconds = time.perf_counter() - started
        click.echo(f"{kv}: {submitted} requests in {seconds:.0f} s, {pool.num_preemptions} preemptions, no block lost")


class _Echo(OneAtATime):
    """Answers every request with token 1."""

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
def curve(traces: tuple[Path, ...]) -> None:
    """The share of prompt tokens that caches of eight sizes find, predicted in one pass and replayed block by block."""
    for path in traces:
        trace = read_lengths(path)
        assert trace.prefixes is not None, f"{path} does not say what requests have in common"
        size = trace.prefixes.block_size
        start = time.perf_counter()
        found = ReuseCurve(trace, size)
        seconds = time.perf_counter() - start
        longest = int((trace.input + trace.output).max())
        sizes = np.geomspace(1.2 * longest, max(float(found.sizes(8)[-1]), 3.0 * longest), 8)
        click.echo(f"\n{path.name}: {len(trace.input)} requests, reusable at most {found.most:.1%}, {seconds:.2f} s")
        click.echo("| cache, tokens | predicted | replayed | difference, points |\n|---|---|---|---|")
        for tokens in sizes:
            predicted, replayed = found.share(tokens), exact_share(trace, int(tokens) // size, size)
            click.echo(f"| {tokens:.0f} | {predicted:.1%} | {replayed:.1%} | {100 * (predicted - replayed):+.2f} |")


@main.command()
@click.option("--quick", is_flag=True, help="A few requests, to see that it runs.")
@click.option("--requests", default=300, show_default=True)
@click.option("--profile", type=click.Path(path_type=Path), help="The machine's profile of opt-125m, if it is at hand.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The page to write, as docs/results/reuse.md.")
def served(quick: bool, requests: int, profile: Path | None, output: Path | None) -> None:
    """Plans with and without reuse on this machine, predicted and measured."""
    import xgpt
    from xgpt.resolve import load_cluster

    count = 120 if quick else requests
    trace = shared_prompts(
        2 * count, np.random.default_rng(0), prompts=12, prompt_tokens=400, mean_input=60.0, mean_output=40.0
    )
    trace = _within(trace, 1800)
    cluster = load_cluster("local")
    device = cluster.device.model_copy(update={"memory_bytes": int(MEMORY_GIB * 2**30)})
    small = cluster.model_copy(update={"device": device})
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "agents.jsonl"
        path.write_text(write(trace))
        lengths = Path(directory) / "lengths.csv"
        pairs = zip(trace.input.tolist(), trace.output.tolist(), strict=True)
        lengths.write_text("input,output\n" + "".join(f"{i},{o}\n" for i, o in pairs))
        asked = {"model": "opt-125m", "cluster": small, "objective": "saturated", "policy": "chunked"}
        steps = xgpt.profile(model="opt-125m") if profile is None else load_json(profile, Profile, "profile")
        asked |= {"latency_bound_s": 60.0, "profile": steps}
        aware = xgpt.plan(**asked, workload=path)
        unaware = xgpt.plan(**asked, workload=lengths)
        rows, rates = [ROWS], []
        for name, plan, reuse in (
            ("counts on reuse", aware, True),
            ("ignores it", unaware, True),
            ("", unaware, False),
        ):
            num = (count - 60) // 2
            figures = xgpt.simulate(plan, workload=str(path if reuse else lengths), num_requests=num).figures
            rate, share, first_s, pace = _measured(plan, steps, trace, count, reuse=reuse)
            rates.append(rate)
            cells = [name, "on" if reuse else "off", f"{plan.estimate.throughput_rps:.2f}"]
            for predicted, measured, unit, factor in (
                (figures["throughput_rps"], rate, "", 1 / pace),
                (figures["ttft_s"], first_s, " s", pace),
            ):
                error, at_pace = (100 * (of * predicted / measured - 1) for of in (1.0, factor))
                cells += [f"{predicted:.2f}{unit}", f"{measured:.2f}{unit}", f"{error:+.1f}%", f"{at_pace:+.1f}%"]
            cells += [f"{figures.get('reused_share', 0.0):.1%}", f"{share:.1%}"]
            rows.append(f"| {' | '.join(cells)} |")
            click.echo(rows[-1])
    gain = (
        f"Counting on reuse serves {rates[0] / rates[1]:.2f} times what ignoring it does, and {rates[0] / rates[2]:.2f}"
    )
    page = PAGE.format(
        command=f"python -m benchmarks.reuse served --requests {count}",
        date=datetime.date.today().isoformat(),
        machine=f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        version=xgpt.__version__,
        memory=MEMORY_GIB,
        rows="\n".join(rows),
        gain=f"{gain} that ignores it does with reuse off.",
        count=count,
    )
    click.echo(page)
    if output is not None:
        output.write_text(page, encoding="utf-8")


def _within(trace: TraceLengths, most: int) -> TraceLengths:
    fits = np.flatnonzero(trace.input + trace.output <= most)
    assert trace.prefixes is not None and trace.timestamp_s is not None
    return TraceLengths(trace.input[fits], trace.output[fits], trace.timestamp_s[fits], trace.prefixes.take(fits))


def _measured(
    plan: Plan, profile: Profile, trace: TraceLengths, count: int, *, reuse: bool
) -> tuple[float, float, float, float]:
    """Return requests a second at saturation, the share found, the mean time to first token from admission, s, and the
    measured over the predicted time of the same steps."""
    from xgpt.app.engines import build_engine
    from xgpt.app.simulating import read_log, reused_share
    from xsimulator.executed import paces

    log: list[StepRecord] = []
    engine = build_engine(plan, log.append, reuse=reuse)
    try:
        for number in range(count):
            output = int(trace.output[number])
            prompt = _prompt(trace, number)
            engine.submit(Generation(number, prompt, max(output, 1), output_length=output, promised_output=None))
        while engine.step() is not None:
            pass
    finally:
        engine.close()
    found = read_log(plan, plan.workload, log, (count - 60) // 2, saturated=True)
    pace = paces(plan, profile, log)
    assert pace is not None
    return found.throughput_rps, reused_share(log), found.ttft_s, pace.ratio


def _prompt(trace: TraceLengths, number: int) -> tuple[int, ...]:
    """The tokens of a request: of each block those that its id draws."""
    assert trace.prefixes is not None
    ids = trace.prefixes.prompts[number]
    drawn = [np.random.default_rng(id_).integers(4, VOCABULARY, BLOCK) for id_ in ids]
    return tuple(np.concatenate(drawn)[: trace.input[number]].tolist())


if __name__ == "__main__":
    main()
