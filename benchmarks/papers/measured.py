"""Rows that are measured on this machine, and ExeGPT's Table 5, which other commands make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from benchmarks import loading, monotonicity
from benchmarks.papers.claims import Found, Table, at_least, judged, within
from benchmarks.papers.tcb import LEAST, where
from benchmarks.tcb.__main__ import scaled
from xgpt import bench, plan
from xgpt.core.schema import Batching, BenchReport, Plan, StaticSettings
from xgpt.resolve import load_model

WIDTH, BATCH, NUM_REQUESTS, ROUNDS = 256, 192, 400, 3
"""Of the model in TCB's shape; requests of a batch, and of a measurement; how often each layout is measured."""
SMALLER = (32, 8, 2)
"""Requests of smaller padded batches."""
LAYOUTS: tuple[Batching, ...] = ("padded", "rows", "slots", "flat")
GB_A_GPU = {"39B": 39 * 2 / 16, "101B": 101 * 2 / 32, "175B": 175 * 2 / 32, "341B": 341 * 2 / 48}
FROM_MEMORY_S = {"39B": 0.9, "101B": 1.3, "175B": 2.1, "341B": 3.5}
"""Source: ExeGPT Table 4."""


def table_4() -> Iterator[Found]:
    """Deploying (from disk) and going over to another placement (from memory), with the planner's prediction."""
    rows = list(loading.run())
    rates = [GB_A_GPU[size] / seconds for size, seconds in FROM_MEMORY_S.items()]
    memory = [row for row in rows if row.source == "memory"]
    ours = [row.weight_bytes / 1e9 / row.measured_s for row in memory]
    yield judged(
        "ExeGPT Table 4",
        "weights set up from memory, GB a second and device (measured)",
        f"{min(rates):.1f} to {max(rates):.1f}",
        f"{min(ours):.2f} to {max(ours):.2f}",
        "the paper's",
        min(ours) >= min(rates),
        "the device: a core of a CPU converts types and lays every matrix out for its products; it holds where weights "
        "are copied as they are over PCIe, at 4 GB/s and more",
    )
    slower = [row for row in rows if row.source == "disk"]
    pairs = list(zip(slower, memory, strict=True))
    as_stored = [disk.measured_s / in_memory.measured_s for disk, in_memory in pairs if disk.dtype == "float32"]
    least, most = min(as_stored), max(as_stored)
    yield judged(
        "ExeGPT Table 4",
        "from disk over from memory (measured)",
        "2.3 to 5.7x",
        f"{min(d.measured_s / m.measured_s for d, m in pairs):.1f} to "
        f"{max(d.measured_s / m.measured_s for d, m in pairs):.1f}x",
        "slower from disk",
        all(disk.measured_s > in_memory.measured_s for disk, in_memory in pairs),
        "how long a core takes to convert weights: quantising them to eight bits takes longer than the disk; it holds "
        f"in float32, where it is {least:.1f} to {most:.1f}x",
    )
    ratios = [row.measured_s / row.predicted_s for row in memory]
    yield within(
        "ExeGPT 7.7",
        "re-deploying from memory: measured over the planner's prediction, median",
        1.0,
        float(np.median(ratios)),
        0.5,
        "x",
        "whether the machine's pace is that of its profile, as it was here; on one that others used at the same time "
        "it was 0.4 to 1.9 times (devices.md)",
    )
    cells = [
        (
            row.model,
            row.dtype,
            row.placement,
            f"{row.weight_bytes / 1e9:.2f}",
            row.source,
            f"{row.predicted_s:.2f}",
            f"{row.measured_s:.2f}",
        )
        for row in rows
    ]
    columns = ("model", "type", "placement", "GB on the fullest device", "from", "predicted s", "measured s")
    note = "`python -m benchmarks.loading` makes these rows; [several devices](devices.md) says on what a machine."
    yield Table("ExeGPT Table 4: loading", columns, tuple(cells), note)


def table_5() -> Iterator[Found]:
    throughput, latency = monotonicity.count_all().share(1)
    why = "measured times are noisier than predicted ones"
    yield at_least("ExeGPT Table 5", "points monotone in throughput at 5%", 97.0, float(throughput), "%", why)
    yield at_least("ExeGPT Table 5", "points monotone in latency at 5%", 96.0, float(latency), "%", why)


def served_plan(batch: int = BATCH) -> Plan:
    """A plan of whole batches for a small model of TCB's shape and its workload, on this machine."""
    spec = scaled(load_model("tcb-seq2seq")[0], WIDTH)
    found = plan(
        model=spec, cluster="local", workload="tcb", policy="static", latency_bound_s=None, objective="saturated"
    )
    assert isinstance(found.policy, StaticSettings)
    policy = found.policy.model_copy(update={"batch": batch})
    estimate = found.estimate.model_copy(update={"encode_batch": batch, "decode_batch": batch})  # what bench fills
    return found.model_copy(update={"policy": policy, "estimate": estimate})


def tcb_served() -> Iterator[Found]:
    """TCB's comparison through `xgpt bench --batching`: whole batches behind the endpoint, first come first served."""
    cases: list[tuple[Batching, int]] = [(layout, BATCH) for layout in LAYOUTS]
    cases += [("padded", batch) for batch in SMALLER]
    seen: dict[tuple[Batching, int], list[float]] = {case: [] for case in cases}
    for _ in range(ROUNDS):
        for layout, batch in cases:  # interleaved: the machine's speed changes
            count = max(48, 4 * batch, NUM_REQUESTS * batch // BATCH)
            report = bench(served_plan(batch), num_requests=count, batching=layout).report
            assert isinstance(report, BenchReport) and not report.num_failed
            seen[layout, batch].append(report.figure("throughput_rps").measured)
    yield from of_layouts(seen)


def of_layouts(seen: Mapping[tuple[Batching, int], Sequence[float]]) -> Iterator[Found]:
    """Return the rows of what each layout served with batches of a size, requests a second, in each round."""
    middle = {case: float(np.median(values)) for case, values in seen.items()}
    rps = {layout: middle[layout, BATCH] for layout in LAYOUTS}
    over = {float(batch): rps["rows"] / middle["padded", batch] for batch in (BATCH, *SMALLER)}
    why = (
        f"how many requests TNB's batch has: here as many as TCB's, {BATCH}, so that fuller rows are all that is left; "
        "the paper gives TNB 64 rows and TCB 64 rows of 400 tokens, some 1,240 requests. It holds at "
        f"{where(LEAST * 3.33, over)} requests a batch of TNB"
    )
    yield within(
        "TCB Fig. 11", "rows over padded, served here (measured)", 3.33, rps["rows"] / rps["padded"], 0.15, "x", why
    )
    yield judged(
        "TCB 4.2.2",
        "slots over rows, served here (measured)",
        "above",
        f"{rps['slots'] / rps['rows']:.2f}x",
        "above 1",
        rps["slots"] > rps["rows"],
        "how much leaving early saves, which rests on the spread of answers: with all alike it is nothing",
    )
    cells = [
        (layout, str(batch), *(f"{value:.1f}" for value in values), f"{middle[layout, batch]:.1f}")
        for (layout, batch), values in seen.items()
    ]
    rounds = tuple(f"round {number + 1}" for number in range(ROUNDS))
    note = f"Requests a second, width {WIDTH}: `xgpt bench PLAN --batching LAYOUT`."
    yield Table("TCB's layouts behind the endpoint", ("layout", "batch at most", *rounds, "median"), tuple(cells), note)
