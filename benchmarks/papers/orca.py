"""ORCA's Figures 9 to 11: GPT-3 175B on two machines of eight A100 40 GB, and FasterTransformer as it ran there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.papers.claims import Claim, judged
from benchmarks.papers.settings import problem, workload_of
from xgpt.schema import Constant, Workload
from xgpt.workload import histogram, sample
from xscheduler.problem import Problem
from xscheduler.schedule import Scheduler
from xsimulator.forecast import Performance
from xsimulator.lengths import Lengths
from xsimulator.queueing import LoadCurves
from xsimulator.stages import lane
from xsimulator.step_cost import LaneCost
from xsimulator.step_counts import StepCounts

MODEL, CLUSTER = "gpt3-175b", "a100-40g-x16"
BOUND_S = 0.19
"""Median latency a token: "a double of the normalized execution time" of one request in their engine."""
LARGEST_BATCH = 8
"""Of FasterTransformer there: it sets the whole context's K/V aside for each request."""
SAMPLES = 4000


def lane_cost(of: Problem) -> LaneCost:
    """Two stages of eight devices."""
    half = of.model.num_layers // 2
    return LaneCost(of.model, of.profile, lane([8, 8], [half, half], cluster=of.cluster))


def through(cost: LaneCost, step: StepCounts) -> float:
    """Seconds of a step through both stages, as nothing else is under way."""
    return sum(cost.step(step)) + sum(cost.hops(step.num_tokens))


def seconds_a_token(cost: LaneCost, prompt: int = 128, tokens: int = 32) -> float:
    """Of one request alone: what ORCA's bound is twice of."""
    encode = through(cost, StepCounts.of([(0, prompt, 1)], []))
    return (encode + (tokens - 1) * through(cost, StepCounts.of([], [prompt + tokens // 2]))) / tokens


class FasterTransformer:
    """Batches of at most eight, one at a time on both stages, as ORCA sec. 6.2 describes the system it ran.

    A batch encodes as if all its prompts were as short as its shortest; what is left of the others goes through one
    token an iteration, and no request is answered before all are.
    """

    def __init__(self, of: Problem) -> None:
        cost, workload = lane_cost(of), of.workload
        self.last = workload.output.lengths[-1]
        rng = np.random.default_rng(0)
        self.sizes = np.arange(1, LARGEST_BATCH + 1)
        encode, whole = [], []
        for size in self.sizes.tolist():
            inputs, outputs = sample(workload, SAMPLES * size, rng)
            inputs, outputs = inputs.reshape(SAMPLES, size), outputs.reshape(SAMPLES, size)
            shortest = inputs.min(axis=1)
            steps = float(np.mean((inputs + outputs).max(axis=1) - shortest)) - 1
            prompt = round(float(shortest.mean()))
            encode.append(through(cost, StepCounts.of([(0, prompt, 1)] * size, [])))
            context = round(prompt + steps / 2)
            whole.append(encode[-1] + steps * through(cost, StepCounts.of([], [context] * size)))
        self._encode, self._whole = np.asarray(encode), np.asarray(whole)

    def evaluate(self, kind: str, *, batch: np.ndarray) -> Performance:
        """At saturation. # [n]"""
        encode, whole = (np.interp(batch, self.sizes, column) for column in (self._encode, self._whole))
        tpot = (whole - encode) / max(self.last - 1, 1)
        return Performance(
            throughput=batch / whole,
            latency=whole,
            ttft=encode,
            tpot=tpot,
            itl_p99=tpot,
            encode_batch=batch,
            encode_tokens=batch,
            decode_batch=batch,
            peak_requests=batch,
            peak_tokens=batch,
            cycle=whole,
            bubble=np.full_like(whole, 0.5),
            filling=np.zeros_like(whole),
        )


def _space_queue(of: Problem, kind: str) -> LoadCurves:
    """Orca or static with any batch that fits, a micro-batch for each stage."""
    scheduler = Scheduler(of)
    space = scheduler.space(kind, scheduler.uniform_placement(kind, 8, 2, 1))
    name = {"orca": "max_batch", "static": "batch"}[kind]
    batches = np.unique(np.geomspace(1, int(space.capacity), 24).astype(int))

    def evaluate(kind: str, **columns: np.ndarray) -> Performance:
        return space.evaluate(columns).performance

    return LoadCurves(evaluate, space.lengths, kind, **{name: batches})


def _max_rate(queue: LoadCurves, kind: str, lengths: Lengths, bound_s: float) -> float:
    """The highest Poisson rate at which the median request's whole time, a token, keeps the bound."""
    outputs = lengths.outputs
    low, high = np.zeros(len(queue.saturation)), queue.saturation.copy()
    for _ in range(25):
        rate = (low + high) / 2
        loaded = queue.at(rate, 0.5)
        whole = loaded.ttft[:, None] + loaded.tpot[:, None] * (outputs - 1)
        if kind == "static":  # no request of a batch is answered before its longest member
            whole = np.repeat(whole[:, -1:], len(outputs), axis=1)
        order = np.argsort(whole / outputs, axis=1)
        share = np.cumsum(lengths.output_probabilities[order], axis=1)
        middle = np.minimum((share < 0.5).sum(axis=1), len(outputs) - 1)
        index = np.arange(len(rate))
        normalised = (whole / outputs)[index, order[index, middle]]
        keeps = normalised <= bound_s
        low, high = np.where(keeps, rate, low), np.where(keeps, high, rate)
    return float(low.max())


def _rates(workload: Workload, bound_s: float) -> tuple[float, float, float]:
    """Requests a second of ORCA, of static batches at their best, and of FasterTransformer as it was run."""
    of = problem(MODEL, CLUSTER, workload)
    lengths = Lengths(workload)
    ft = FasterTransformer(of)
    queue = LoadCurves(ft.evaluate, lengths, "static", batch=ft.sizes)
    return (
        _max_rate(_space_queue(of, "orca"), "orca", lengths, bound_s),
        _max_rate(_space_queue(of, "static"), "static", lengths, bound_s),
        _max_rate(queue, "static", lengths, bound_s),
    )


def _over(first: float, second: float) -> str:
    return f"{first / second:.1f}x" if second else "no rate keeps it"


def figures_9_to_11() -> Iterator[Claim]:
    workload = workload_of("orca", MODEL)
    one = seconds_a_token(lane_cost(problem(MODEL, CLUSTER, workload)))
    orca, static, ft = _rates(workload, BOUND_S)
    what = "requests a second at 190 ms median normalised latency"
    yield Claim(
        "ORCA Fig. 10",
        what + ", static batches at their best",
        "ORCA 6.81, FT 0.185: 36.9x",
        f"ORCA {orca:.2f}, static {static:.2f}: {_over(orca, static)}",
        "reported",
        f"the bound is twice what one request takes a token in their engine, 95 ms; here it takes {1e3 * one:.0f} ms, "
        "and 190 ms leaves room for large static batches, which FT as run there (batches of 8, not pipelined, the "
        "prompts' tails one token an iteration) could not form",
    )
    for bound_s, where in ((BOUND_S, what), (2 * one, f"at twice one request's time a token, {2e3 * one:.0f} ms here")):
        if bound_s != BOUND_S:
            orca, static, ft = _rates(workload, bound_s)
        ratio = orca / ft if ft else np.inf
        yield judged(
            "ORCA Fig. 10",
            f"{where}, FT as ORCA ran it",
            "ORCA 6.81, FT 0.185: 36.9x",
            f"ORCA {orca:.2f}, FT {ft:.3f}: {_over(orca, ft)} (static at its best {static:.2f})",
            ratio > 10,
            "one set of efficiencies makes both systems' steps as fast; what remains is batching",
        )
    alike = Workload(name="alike", input=histogram(Constant(value=272)), output=histogram(Constant(value=64)))
    orca, static, ft = _rates(alike, 2 * one)
    yield judged(
        "ORCA Fig. 11",
        "all requests alike (272 and 64 tokens), at the same bound, FT with batches of 8",
        "ORCA above FT",
        f"ORCA {orca:.2f}, FT {ft:.2f}: {_over(orca, ft)} (static at its best {static:.2f})",
        orca > ft,
    )
    yield Claim(
        "ORCA Fig. 9",
        "engines alone, 175B: ORCA over FT",
        "up to 47%",
        "1.0x",
        "reported",
        "the paper lays it to control messages along with the data; here the loop costs all policies alike",
    )
