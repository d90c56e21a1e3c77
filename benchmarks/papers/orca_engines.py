"""ORCA's Figure 9 (OSDI '22): the engines of ORCA and FasterTransformer (FT) without schedulers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.papers.claims import Found, Table, judged, within
from benchmarks.papers.orca import MODEL, PAPER_TOKEN_MS, lane_cost, problem_of, through
from benchmarks.papers.settings import workload_of
from xgpt.core.schema import Precision
from xscheduler.problem import Problem
from xsimulator.costs.curves import Grid
from xsimulator.costs.step_cost import LaneCost, StepCounts
from xsimulator.memory import LaneMemory


class EngineTimes(NamedTuple):
    """Seconds of a batch of equal requests without pipelining, for three ways to compute attention.

    Attributes:
        batched: the attention of all requests as one batch, as in FT.
        fused: the thread blocks of all requests in one kernel, as in ORCA (sec. 5). This takes as long as the batch or
            a single request, whichever is longer.
        apart: a separate kernel for each request.
    """

    batched: float
    fused: float
    apart: float


def engine_times(subject: Problem, cost: LaneCost, tp: int, batch: int, prompt: int) -> EngineTimes:
    encode = through(cost, StepCounts.of([(0, prompt, 1)] * batch, []))
    context = prompt + NUM_TOKENS // 2
    batched = encode + (NUM_TOKENS - 1) * through(cost, StepCounts.of([], [context] * batch))
    decodes = Grid(subject.profile.layer(tp).decode_attention)
    together, single = float(decodes(batch, context)), float(decodes(1, context))
    more = (max(seconds - together, 0.0) for seconds in (single, batch * single))
    fused, apart = (batched + subject.model.num_layers * (NUM_TOKENS - 1) * seconds for seconds in more)
    return EngineTimes(batched, fused, apart)


NUM_TOKENS = 32
"""Number of output tokens in Figure 9."""
BLOCK = 16
"""Tokens of a K/V block."""
CONTROL_MS = (0.0, 5.0, 10.0, 20.0, 30.0, 45.0)
"""Assumed cost of FT's control messages and their synchronisation per iteration."""


def figure_9() -> Iterator[Found]:
    """Compare the engines without schedulers on batches of equal requests, with FT's control messages included."""
    workload = workload_of("orca", MODEL)
    for name, model, tp, first_missing in (("9a", "gpt3-13b", 1, 8), ("9b", "gpt3-101b", 8, 16)):
        subject = problem_of(model, workload)
        cost = lane_cost(subject, tp)
        times = [engine_times(subject, cost, tp, batch, 32) for batch in (1, 4, 8)]
        fused = min(one.batched / one.fused for one in times)
        apart = min(one.batched / one.apart for one in times)
        yield judged(
            f"ORCA Fig. {name}",
            f"engines alone, {model}, batches of 1 to 8: FT's time over ORCA's",
            "similar",
            f"{fused:.2f}x",
            "±20% of 1x",
            abs(fused - 1) <= 0.2,
            f"{apart:.2f}x without fused attention",
        ).with_own_goal()
        memory = LaneMemory(
            subject.model, subject.cluster, Precision.of(subject.profile.dtype, "gpu"), cost.stages, BLOCK
        )
        largest = int(memory.blocks_beside(NUM_TOKENS)[0] * BLOCK // subject.model.max_context)
        yield judged(
            f"ORCA Fig. {name}",
            f"smallest batch without memory in FT, {model}",
            f"{first_missing}, of powers of two",
            str(largest + 1),
            f"from {first_missing // 2 + 1} to {first_missing}",
            first_missing // 2 < largest + 1 <= first_missing,
        )
    subject = problem_of(MODEL, workload)
    rows = []
    for batch in (1, 4, 8, 32):
        for prompt in (32, 128):
            seconds = engine_times(subject, lane_cost(subject), 8, batch, prompt).batched
            ratios = [f"{1 + NUM_TOKENS * ms / 1e3 / seconds:.2f}" for ms in CONTROL_MS]
            rows.append((str(batch), str(prompt), f"{1e3 * seconds / NUM_TOKENS:.1f}", *ratios))
    yield Table(
        "ORCA Figure 9c: FT's time over ORCA's, by the cost of FT's control messages in an iteration",
        ("batch", "prompt", "ms an iteration", *(f"{ms:g} ms more" for ms in CONTROL_MS)),
        tuple(rows),
        "175B on two stages of eight devices, not pipelined, 32 tokens. The paper's ratio is up to 1.47. FT exchanges "
        "control "
        "messages between GPUs (NCCL) in every iteration, with a synchronisation of CPU and GPU in each process.",
    )
    iteration_ms = 1e3 * engine_times(subject, lane_cost(subject), 8, 1, 32).batched / NUM_TOKENS
    paper, tolerance = 1.47, 0.1
    edges = [paper * (1 - tolerance) - 1, paper * (1 + tolerance) - 1]
    here, there = (" to ".join(f"{edge * ms:.0f}" for edge in edges) for ms in (iteration_ms, PAPER_TOKEN_MS))
    yield within(
        "ORCA Fig. 9c",
        "engines alone, 175B: FT's time over ORCA's, most",
        paper,
        float(rows[0][3]),
        tolerance,
        "x",
        f"FT's control messages in an iteration of {iteration_ms:.0f} ms, here free; holds at {here} ms ({there} ms of "
        f"the paper's {PAPER_TOKEN_MS:.0f} ms)",
    )
