"""Compare the waiting of turns, and of prompts that share prefixes, with published measurements. Nothing is fitted.

python -m benchmarks.session_waits published
python -m benchmarks.session_waits own MODEL PROFILE STATS.json --blocks N
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import click
import numpy as np

from benchmarks.lib.results import record
from xgpt.comparing.launched import read_current
from xgpt.comparing.scoring import engine_name, score_current
from xgpt.core.schema import ChunkedSettings, Histogram, Plan, Profile, Workload
from xgpt.core.turns import FIRST, Ints, TraceSessions
from xgpt.core.workload import TraceLengths
from xgpt.problems import resolve
from xgpt.requests import plan_request
from xgpt.resolve import load_cluster, load_engine
from xsimulator.run import run_requests
from xsimulator.sessions import TurnTimes, logged_turns

PROMPTS = Workload(
    name="some prompts",  # plans of deployments need lengths; simulations have their own
    input=Histogram(lengths=(1000,), probabilities=(1.0,)),
    output=Histogram(lengths=(100,), probabilities=(1.0,)),
)


def deployed(model: str, cluster: str, command: str, tokens: int | None = None) -> tuple[Plan, Profile]:
    """Return a replica as `xgpt compare --current` reads it, with the K/V memory that its source states, if any."""
    current = read_current(command, load_cluster(cluster))
    given = {"model": model, "cluster": cluster, "workload": PROMPTS, "engine": load_engine(engine_name(current))}
    problem = resolve(plan_request(objective="saturated", latency_bound_s=None, **given))
    plan = score_current(problem, current)
    assert isinstance(plan.policy, ChunkedSettings)
    plan = plan.but(policy=plan.policy.but(max_batch=current.max_num_seqs))
    if tokens is not None:
        plan = plan.but(stages=tuple(stage.but(kv_blocks=tokens // plan.block_size) for stage in plan.stages))
    return plan, problem.profile


def run(plan: Plan, profile: Profile, trace: TraceLengths) -> TurnTimes:
    return logged_turns(plan, trace, run_requests(plan, profile, trace, int(trace.output.max())))


class Row(NamedTuple):
    source: str
    route: str
    load: str
    figure: str
    measured: float
    simulated: float

    @property
    def ratio(self) -> float:
        return self.simulated / self.measured


STAGES = (
    *((15, 50), (3, 20), (10, 20), (15, 20), (20, 38), (22, 34), (25, 30), (30, 25), (35, 21), (40, 38), (43, 36)),
    *((46, 33), (49, 30), (52, 29), (55, 27), (57, 26), (60, 25)),
)
"""Requests a second at all eight replicas, and for how many seconds. The first fills the cache. The
next stage begins when all have ended.
"""
GROUPS, EACH, SYSTEM, QUESTION, ANSWER, REPLICAS = 150, 5, 6000, 1200, 1000, 8
APART_S = 1000.0
ROUTES = ("at random", "by prefix")
Times = tuple[float, ...]


class Ladder(NamedTuple):
    """TTFT by stage, the last ones if some are missing, in seconds.

    Attributes:
        quantile: None means that times are means.
        random: with routing at random, or in turn.
        prefix: with routing by what replicas have.
    """

    source: str
    engine: str
    quantile: float | None
    random: Times
    prefix: Times


LADDERS = (
    Ladder(
        "llm-d-kv-cache, benchmarking/73-capacity",
        "vLLM",
        None,
        random=(
            *(0.622, 0.826, 1.278, 25.073, 28.185, 30.689, 32.212, 34.043, 54.196),
            *(53.247, 53.572, 56.130, 56.035, 54.844, 56.803, 57.426),
        ),
        prefix=(
            *(0.291, 0.335, 0.249, 0.363, 0.300, 0.303, 0.296, 0.275, 0.269),
            *(0.281, 0.293, 0.311, 0.288, 0.308, 0.319, 0.283),
        ),
    ),
    Ladder(
        "llm-d, guides/optimized-baseline, vLLM; the same memory is assumed",
        "vLLM",
        0.9,
        random=(2.4, 46.1, 0.9, 4.9, 46.2, 37.9, 61.9, 66.8, 139.9, 143.8, 158.5, 153.3, 154.1),
        prefix=(4.2, 1.4, 0.2, 0.2, 0.2, 0.3, 0.2, 0.2, 2.1, 1.3, 0.2, 19.9, 0.9),
    ),
    Ladder(
        "llm-d, guides/optimized-baseline, SGLang",
        "SGLang",
        0.9,
        random=(
            *(0.867, 1.656, 1.396, 33.849, 35.845, 39.469, 43.176, 47.802, 119.486),
            *(151.379, 125.039, 126.431, 131.208, 129.790, 129.604, 172.690),
        ),
        prefix=(
            *(0.148, 0.161, 0.173, 0.244, 0.152, 0.157, 0.161, 0.156, 0.303),
            *(0.222, 0.236, 0.212, 0.217, 0.231, 0.413, 0.437),
        ),
    ),
)


def prompts(route: str, rng: np.random.Generator) -> tuple[TraceLengths, Ints]:
    """Return the requests that reach one replica, and the stage of each.

    All prompts are sent in a random order, again and again. Routed by prefix, the replica gets its share of the groups.
    """
    order, sent, rows = rng.permutation(GROUPS * EACH), 0, list[tuple[int, float, int]]()
    for stage, (rate, seconds) in enumerate(STAGES):
        count = rate * seconds
        at_s = stage * APART_S + np.sort(rng.uniform(0.0, seconds, count))
        for i, at in enumerate(at_s.tolist()):
            prompt = int(order[(sent + i) % len(order)])
            mine = prompt // EACH % REPLICAS == 0 if route == "by prefix" else rng.random() < 1 / REPLICAS
            rows += [(prompt, at, stage)] if mine else []
        sent += count
    last, first, like, common = dict[int, int](), dict[int, int](), list[int](), list[int]()
    for i, (prompt, _, _) in enumerate(rows):
        group = prompt // EACH
        like.append(last.get(prompt, first.get(group, FIRST)))
        common.append(SYSTEM + QUESTION if prompt in last else SYSTEM if group in first else 0)
        last[prompt], first[group] = i, first.get(group, i)
    count = len(rows)
    sessions = TraceSessions(
        np.arange(count), np.full(count, FIRST), np.zeros(count), np.asarray(like), np.asarray(common)
    )
    times, stages = np.asarray([at for _, at, _ in rows]), np.asarray([stage for _, _, stage in rows])
    inputs, outputs = np.full(count, SYSTEM + QUESTION), np.full(count, ANSWER)
    return TraceLengths(inputs, outputs, times, sessions=sessions), stages


def ladders() -> Iterator[Row]:
    """Qwen3-32B on 8 replicas of 2 H100."""
    engines = {
        "vLLM": deployed(
            "qwen3-32b", "h100x8", "docker run vllm/vllm-openai:v0.11.0 --model Qwen/Qwen3-32B -tp 2", 307_328
        ),
        "SGLang": deployed("qwen3-32b", "h100x8", "python -m sglang.launch_server --model-path Qwen/Qwen3-32B --tp 2"),
    }
    for route in ROUTES:
        trace, stages = prompts(route, np.random.default_rng(0))
        waits = {engine: run(*found, trace).ttft_s for engine, found in engines.items()}
        for each in LADDERS:
            measured = each.random if route == "at random" else each.prefix
            for back, real in enumerate(reversed(measured), 1):
                ttft = waits[each.engine][stages == len(STAGES) - back]
                simulated = float(ttft.mean() if each.quantile is None else np.quantile(ttft, each.quantile))
                figure = "mean TTFT, s" if each.quantile is None else f"p{100 * each.quantile:.0f} TTFT, s"
                yield Row(each.source, route, f"{STAGES[-back][0]} requests/s", figure, real, simulated)


CHATS = {"mean TTFT, s": 4.350, "mean TPOT, s": 0.04847}
"""vLLM's multi-turn benchmark of 10 clients with 24 conversations, on Qwen3-8B, RTX 4090, vLLM 0.10.1.1 with its
defaults, and without LMCache. Its default context would not fit, so a shorter one is assumed.
"""
CHAT = "gpustack, Evaluating LMCache Prefill Acceleration in vLLM: Qwen3-8B, RTX 4090"
SEEDS = 5


def chats(rng: np.random.Generator) -> TraceLengths:
    """Return that benchmark's conversations. A client's next one begins when its last one has ended."""
    shared, last, rows = 500, dict[int, int](), list[tuple[int, int, int, int, int, int]]()
    middle = np.log(4000) - 0.5  # of a lognormal distribution of mean 4,000 and sigma 1, at most 20,000
    for number in range(24):
        like, context = FIRST, shared + int(min(rng.lognormal(middle, 1.0), 20_000))
        for _ in range(int(rng.integers(12, 19)) // 2):
            common = shared if like == FIRST else context
            context += int(rng.integers(120, 161))
            output = int(rng.integers(80, 121))
            rows.append((context, output, number, last.get(number % 10, FIRST), like, common))
            context += output
            like = last[number % 10] = len(rows) - 1
    inputs, outputs, session, after, like_, common_ = (np.asarray(column) for column in zip(*rows, strict=True))
    sessions = TraceSessions(session, after, np.zeros(len(rows)), like_, common_)
    return TraceLengths(inputs, outputs, np.zeros(len(rows)), sessions=sessions)


def conversations() -> Iterator[Row]:
    command = "docker run vllm/vllm-openai:v0.10.1 --model Qwen/Qwen3-8B --max-model-len 24576"
    found = deployed("qwen3-8b", "rtx-4090x8", command)
    runs = [run(*found, chats(np.random.default_rng(seed))) for seed in range(SEEDS)]
    for name, values in (
        ("mean TTFT, s", [one.ttft_s for one in runs]),
        ("mean TPOT, s", [one.tpot_s for one in runs]),
    ):
        yield Row(CHAT, "-", "10 clients", name, CHATS[name], median(float(each.mean()) for each in values))


@click.group()
def main() -> None:
    pass


@main.command()
def published() -> None:
    groups = dict[tuple[str, str, str], list[Row]]()
    for row in (*conversations(), *ladders()):
        groups.setdefault((row.source, row.route, row.figure), []).append(row)
        click.echo(
            f"{row.source}, {row.route}, {row.load}, {row.figure}: {row.measured:.4g}, simulated {row.simulated:.4g}"
        )
    columns = "source | routed | figure | rows | measured | simulated | simulated / measured: median | least | most"
    table = [f"| {columns} |", "|---" * (columns.count("|") + 1) + "|"]
    for names, each in groups.items():
        cells = [*names, str(len(each))]
        for values in ([row.measured for row in each], [row.simulated for row in each]):
            cells.append(f"{min(values):.3g} to {max(values):.3g}" if len(each) > 1 else f"{values[0]:.3g}")
        ratios = [row.ratio for row in each]
        cells += [f"{value:.2f}" for value in (median(ratios), min(ratios), max(ratios))]
        table.append(f"| {' | '.join(cells)} |")
    rows = [row for each in groups.values() for row in each]
    waits = [row for row in rows if "TTFT" in row.figure]
    ratios = [row.ratio for row in waits]
    within = sum(0.5 <= each <= 2 for each in ratios)
    claim = (
        "{rows} published TTFT of {sources} sources, to which nothing was fitted: simulated over measured is {middle} "
    )
    claim += "in the median and between {low} and {high} in half of them; {within} are within a factor of 2."
    low, middle, high = (f"{value:.2f}" for value in np.quantile(ratios, (0.25, 0.5, 0.75)))
    counts = {"rows": len(waits), "sources": len({row.source for row in waits}), "within": within}
    record("sessions/waits", claim, table, low=low, middle=middle, high=high, **counts)


@main.command()
@click.argument("model")
@click.argument("profile", type=click.Path(path_type=Path))
@click.argument("stats", type=click.Path(path_type=Path))
@click.option("--blocks", type=int, required=True)
@click.option("--shared", type=int, default=200, help="Tokens that all conversations share.")
def own(model: str, profile: Path, stats: Path, blocks: int, shared: int) -> None:
    """Predict vLLM's multi-turn benchmark on this machine from vLLM's profile (`xgpt profile --engine vllm`).

    STATS is what the benchmark wrote with --stats-json-output. Its clients send their turns as they did: each follows
    the client's last answer.
    """
    rows = sorted(json.loads(stats.read_text()), key=lambda row: float(row["start_time_ms"]))
    inputs, outputs = (np.asarray([int(row[f"{name}_num_tokens"]) for row in rows]) for name in ("input", "output"))
    begun = np.asarray([row["start_time_ms"] for row in rows]) / 1e3
    ended = begun + np.asarray([row["latency_ms"] for row in rows]) / 1e3
    of_client, of_chat = dict[int, int](), dict[str, int]()
    after, like = np.full(len(rows), FIRST), np.full(len(rows), FIRST)
    for i, row in enumerate(rows):
        after[i], like[i] = of_client.get(row["client_id"], FIRST), of_chat.get(row["conversation_id"], FIRST)
        of_client[row["client_id"]] = of_chat[row["conversation_id"]] = i
    pause = np.where(after == FIRST, 0.0, begun - ended[after])
    common = np.where(like == FIRST, shared, np.minimum(inputs[like] + outputs[like], inputs))
    clients = np.asarray([int(row["client_id"]) for row in rows])
    sessions = TraceSessions(clients, after, np.maximum(pause, 0.0), like, common)
    trace = TraceLengths(inputs, outputs, begun - begun.min(), sessions=sessions)
    current = read_current(f"vllm serve {model} --block-size 32 --max-model-len 4096", load_cluster("local"))
    problem = resolve(
        plan_request(model=model, profile=str(profile), workload=PROMPTS, objective="saturated", latency_bound_s=None)
    )
    plan = score_current(problem, current)
    plan = plan.but(block_size=32, stages=tuple(stage.but(kv_blocks=blocks - 1) for stage in plan.stages))
    found = run(plan, problem.profile, trace)
    for name, measured, values in (
        ("TTFT", np.asarray([row["ttft_ms"] for row in rows]), found.ttft_s),
        ("TPOT", np.asarray([row["tpot_ms"] for row in rows]), found.tpot_s),
    ):
        for kind, of in (("mean", np.mean), ("median", np.median), ("p90", lambda each: np.quantile(each, 0.9))):
            click.echo(f"{kind} {name}, ms: measured {of(measured):.1f}, simulated {1e3 * of(values):.1f}")
    click.echo(f"share of prompt tokens found: simulated {found.reused_share:.3f}")
    click.echo(f"whole run, s: measured {ended.max() - begun.min():.1f}, simulated {found.end_s.max():.1f}")


if __name__ == "__main__":
    main()
