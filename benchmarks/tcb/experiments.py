"""Run TCB's experiments on a simulated V100: padded, length-sorted, concatenated, slotted and flattened batches.

The paper's workload has normally distributed prompts of 3 to 100 tokens (mean 20) and Poisson arrivals. Batches have 64
rows of 400 tokens. The model has three encoder and three decoder layers. The paper does not state the following. Here
answers have the prompts' distribution of lengths, independently of the prompts. Deadlines are one to three times a full
concatenated batch's time after the arrival. Rates are multiples of TNB's throughput at saturation.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from benchmarks.tcb.layouts import slotted_rows
from benchmarks.tcb.row_cost import RowCost
from benchmarks.tcb.systems import (
    LONGEST,
    MEAN,
    Demand,
    Machine,
    Outcome,
    PaddedCost,
    System,
    draw,
    form_flattened,
    form_slotted,
    form_tcb,
    form_tnb,
    form_ttb,
    serve,
    serve_iterations,
)
from xgpt.core.policies.admission import make_queue
from xgpt.core.policies.request import Request
from xgpt.core.policies.tcb import RowBatch, concatenated_rows, even_rows
from xgpt.core.schema import AdmissionOrder, DType, ModelSpec
from xgpt.resolve import load_cluster, load_model
from xprofiler.analytic import profile

ROWS, ROW_TOKENS = 64, 400
ORDERS: tuple[AdmissionOrder, ...] = ("das", "sjf", "edf", "fcfs")
SLACK = (1.0, 3.0)
"""Deadlines, as multiples of a full concatenated batch's time."""
SLOT_COUNTS = (1, 2, 4, 7, 10)
TYPICAL_STEPS = 35
"""Decode steps of the batches from which TTB's costs are learnt: the longest of a few hundred answers."""
Json = dict[str, object]


def scaled(spec: ModelSpec, width: int) -> ModelSpec:
    """Return the paper's model at another width, with everything else in proportion."""
    factor = width / spec.hidden_size
    return spec.model_copy(
        update={
            "hidden_size": width,
            "head_dim": width // spec.num_heads,
            "ffn_size": round(spec.ffn_size * factor),
            "vocab_size": round(spec.vocab_size * factor),
        }
    )


def v100(dtype: DType, step_s: float = 0.0) -> Machine:
    """Return the paper's device. `step_s`: seconds that are added to every step."""
    spec, _ = load_model("tcb-seq2seq")
    base = profile(spec, load_cluster("v100x1"), dtype)
    slower = base.overhead.model_copy(update={"seconds": tuple(step_s + seconds for seconds in base.overhead.seconds)})
    return Machine(RowCost(spec, base.model_copy(update={"overhead": slower})))


def full_rows(num_rows: int, row_tokens: int, variance: float) -> tuple[list[list[Request]], Demand]:
    demand = draw(1e6, 3 * num_rows * row_tokens / MEAN / 1e6, variance, (1.0, 1.0))
    queue = make_queue("fcfs")
    for one in demand.requests:
        queue.push(one)
    return even_rows([queue.fill_row(row_tokens) for _ in range(num_rows)], row_tokens), demand


class Bench:
    """A machine, with the time scale of deadlines and TTB's costs, which are measured beforehand."""

    def __init__(self, machine: Machine, variance: float) -> None:
        self.machine, self.variance = machine, variance
        rows, demand = full_rows(ROWS, ROW_TOKENS, variance)
        self.batch_s = self._run(concatenated_rows(rows), demand)
        """Seconds of a full concatenated batch."""
        self.costs = PaddedCost(machine, TYPICAL_STEPS, (1, 16, 64, 256, 1024), (3, 20, 40))
        demand = draw(4000 / self.batch_s, self.batch_s, variance, (100 * self.batch_s, 100 * self.batch_s))
        self.tnb_rps = self.outcome("TNB", "fcfs", demand).throughput_rps
        """TNB's throughput at saturation."""

    def _run(self, batch: RowBatch, demand: Demand) -> float:
        return self.machine.seconds(lambda: self.machine.run_rows(batch, demand.output_lengths))

    def demand(self, rate: float, seconds: float) -> Demand:
        return draw(rate, seconds, self.variance, (SLACK[0] * self.batch_s, SLACK[1] * self.batch_s))

    def outcome(
        self,
        name: str,
        order: AdmissionOrder,
        demand: Demand,
        rows: int = ROWS,
        row_tokens: int = ROW_TOKENS,
        largest: int | None = None,
    ) -> Outcome:
        """Serve with one of the systems. `largest`: largest batch of TTB. None means as many requests as TCB takes."""
        if name == "iteration":
            return serve_iterations(self.machine, order, round(rows * row_tokens / MEAN), row_tokens, demand)
        forms = {
            "TNB": form_tnb,
            "TTB": form_ttb(self.costs, largest),
            "TCB": form_tcb,
            "TCB slotted": form_slotted,
            "flattened": form_flattened,
        }
        return serve(forms[name], System(self.machine, demand.output_lengths, rows, row_tokens), order, demand)


SYSTEMS = ("TNB", "TTB", "TCB", "TCB slotted", "flattened", "iteration")


def slots(machine: Machine, *, end_anywhere: bool = False) -> list[Json]:
    """Compare the same requests in pure rows and in slots.

    Args:
        end_anywhere: whether answers end after every token with the same probability, with the mean and the maximum of
            prompts. Otherwise they have the distribution of prompts.
    """
    table: list[Json] = []
    for num_rows in (10, 32):
        rows, demand = full_rows(num_rows, ROW_TOKENS, 20)
        if end_anywhere:
            drawn = np.random.default_rng(1).geometric(1 / MEAN, len(demand.requests))
            outputs = {one.id: min(int(n), LONGEST) for one, n in zip(demand.requests, drawn, strict=True)}
            demand = replace(demand, output_lengths=outputs)
        for count in SLOT_COUNTS:
            batch, left_over = slotted_rows(rows, ROW_TOKENS, ROW_TOKENS // count)
            gone = {one.id for one in left_over}
            pure = concatenated_rows([[one for one in row if one.id not in gone] for row in rows])

            pure_s, kept_s, freed_s = (
                _seconds(machine, layout, demand, free_slots=free)
                for layout, free in ((pure, False), (batch, False), (batch, True))
            )
            row: Json = {
                "rows": num_rows,
                "slots a row": count,
                "requests": len(batch.places),
                "left over": len(left_over),
                "pure s": round(pure_s, 4),
                "slots kept": f"{pure_s / kept_s:.2f}x",
                "slots freed early": f"{pure_s / freed_s:.2f}x",
            }
            table.append(row)
    return table


def _seconds(machine: Machine, batch: RowBatch, demand: Demand, *, free_slots: bool) -> float:
    return machine.seconds(lambda: machine.run_rows(batch, demand.output_lengths, free_slots=free_slots))


class Case(NamedTuple):
    """A setting. `varied` names the variable that the table varies. The load is a multiple of TNB's throughput at
    saturation."""

    varied: str
    load: float = 3.0
    rows: int = 16
    variance: float = 20.0
    row_tokens: int = ROW_TOKENS


CASES = (
    *(Case("load", load=load, rows=ROWS) for load in (1.0, 1.5, 1.75, 2.0, 3.0)),
    *(Case("rows", rows=rows) for rows in (8, 16, 32, 64)),
    *(Case("variance", variance=variance) for variance in (20.0, 50.0, 100.0)),
    *(Case("row_tokens", row_tokens=row_tokens) for row_tokens in (100, 200, 300, 400)),
)


def orders(bench: Bench, seconds: float) -> list[Json]:
    table: list[Json] = []
    slack = (SLACK[0] * bench.batch_s, SLACK[1] * bench.batch_s)
    for case in CASES:
        demand = draw(case.load * bench.tnb_rps, seconds, case.variance, slack, seed=1)
        worth = {
            order: bench.outcome("TCB", order, demand, case.rows, case.row_tokens).utility_per_s for order in ORDERS
        }
        others = max(worth[order] for order in ORDERS if order != "das")
        row: Json = {"varied": case.varied, "value": getattr(case, case.varied)}
        row |= {order: round(value, 1) for order, value in worth.items()}
        row |= {"das over the best other": f"{worth['das'] / others:.2f}x"}
        table.append(row)
    return table


def overhead() -> list[Json]:
    """Measure DAS's computing time on this machine, at about the paper's rates and with a hundred thousand waiting
    requests."""
    table: list[Json] = []
    for dtype in ("float32", "float16"):
        bench = Bench(v100(dtype), 20)
        for rate in (100, 200, 400, 800, 1600):
            outcome = bench.outcome("TCB", "das", bench.demand(rate, 20 * bench.batch_s))
            table.append(
                {
                    "batches on": f"V100 {dtype}",
                    "requests/s": rate,
                    "scheduling ms a batch": round(1e3 * outcome.scheduling_s / outcome.batches, 2),
                    "share of batch time": f"{outcome.scheduling_s / outcome.running_s:.2%}",
                }
            )
    for order in ORDERS:
        demand = draw(1e5, 1.0, 100.0, (0.0, 1e3))
        queue = make_queue(order, ROW_TOKENS)
        start = time.perf_counter()
        for one in demand.requests:
            queue.push(one)
        pushed = time.perf_counter()
        num = sum(len(queue.fill_row(ROW_TOKENS)) for _ in range(ROWS))
        done = time.perf_counter()
        table.append(
            {
                "batches on": f"{order}: {num} of {len(demand.requests)} waiting chosen",
                "requests/s": "-",
                "scheduling ms a batch": round(1e3 * (done - pushed), 2),
                "share of batch time": f"arrival: {1e6 * (pushed - start) / len(demand.requests):.1f} us each",
            }
        )
    return table
