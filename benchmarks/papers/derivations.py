"""Where ExeGPT's formulas of a steady state are off, and how far; docs/results/formulas.md derives what is right."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.papers.claims import Found, Table, judged
from benchmarks.papers.settings import problem, workload_of
from xgpt.core.schema import Histogram, TruncatedNormal, WaaSettings, Workload
from xgpt.core.workload import histogram
from xscheduler.placement import Placement
from xscheduler.schedule import Scheduler
from xsimulator.costs.step_cost import LaneCost, StepCounts
from xsimulator.forecast import FORECASTS, TwoLaneModel
from xsimulator.lengths import Lengths, phases, steady_decode_batch
from xsimulator.run import simulate

PAPERS = ((32, 13, 80, 13), (32, 13, 80, 7), (128, 68, 320, 16), (192, 93, 480, 64))
"""Mean, standard deviation and maximum of its tasks' outputs, and N_D as in its Table 6 or near it."""
TASKS = ("summarization", "translation", "code-generation", "chat-short", "chat-long", "azure-conv", "azure-code")
"""ExeGPT's five, and two traces."""
CAPS = ((4, 16), (10, 20), (10, 40), (20, 40), (20, 80), (40, 80))
"""WAA's encode batch, and the most requests inside."""
SIMULATED = 1500


def short_of(lengths: Lengths, iterations: int) -> float:
    """Return the share by which the paper's B_D = B_E / E[1/c] is below B_E E[c]."""
    stays = phases(lengths.outputs - 1, iterations)
    papers = 1 / float(lengths.output_probabilities @ (1 / np.maximum(stays, 1)))
    return 1 - papers / steady_decode_batch(lengths, 1.0, iterations)


def corrections() -> Iterator[Found]:
    yield from decode_batch_of_rra()
    yield from cap_of_waa()


def decode_batch_of_rra() -> Iterator[Found]:
    rows = []
    for mean, sd, longest, iterations in PAPERS:
        decodes = histogram(TruncatedNormal(mean=mean, sd=sd, max=longest))
        outputs = Histogram(lengths=tuple(n + 1 for n in decodes.lengths), probabilities=decodes.probabilities)
        below = short_of(Lengths(Workload(name="paper", input=outputs, output=outputs)), iterations)
        rows.append((f"{mean}, sd {sd}, at most {longest}", str(iterations), f"{100 * below:.0f}%"))
    on_settings = [float(row[2][:-1]) for row in rows]
    yield judged(
        "ExeGPT 6",
        "RRA's steady decode batch, the paper's formula below the exact one, on its tasks",
        "0 (stated as exact)",
        f"{min(on_settings):.0f} to {max(on_settings):.0f}%",
        "0%",
        False,
        "over which requests 1/c is averaged: over those that arrive it is too high; over those that are in decode, "
        "which stay longer, it is exact (formulas.md)",
    )
    for name, tasks in (("its five tasks", TASKS[:5]), ("the Azure traces", TASKS[5:])):
        share, task, iterations = max(
            (short_of(Lengths(workload_of(task, "llama-3.1-8b")), iterations), task, iterations)
            for task in tasks
            for iterations in range(1, 65)
        )
        yield judged(
            "ExeGPT 6",
            f"the same, over {name} and N_D from 1 to 64, at most",
            "0",
            f"{100 * share:.0f}% ({task}, N_D {iterations})",
            "0%",
            False,
            "as above; it grows with the spread of the phases that requests stay",
        )
    yield Table("RRA's steady decode batch", ("output tokens", "N_D", "paper's below the exact"), tuple(rows))


def cap_of_waa() -> Iterator[Found]:
    subject = problem("opt-13b", "a40x4", workload_of("summarization", "opt-13b"))
    scheduler = Scheduler(subject)
    placement = next(
        space.placement
        for space in scheduler.candidates.spaces("waa")
        if space.placement.replicas == 1
        and [[stage.tp for stage in layout.lane] for layout in space.placement.layouts] == [[2], [1, 1]]
        and space.placement.fixed["decode_microbatches"] == 2
    )
    encode, decode = (LaneCost(subject.model, subject.profile, layout.lane) for layout in placement.layouts)
    model = TwoLaneModel(encode, decode, Lengths(subject.workload))
    rows, off_without, off_with = [], [], []
    for batch, cap in CAPS:
        settings = {"encode_batch": batch, "max_decode_batch": cap}
        with_s = FORECASTS["waa"].evaluate(model, **settings, decode_microbatches=2).at(0)["throughput"]
        without = min(batch / _encode_s(model, batch), _decoding_rps(model, cap))
        measured = _simulated(scheduler, placement, settings)
        off_without.append(without / measured - 1)
        off_with.append(with_s / measured - 1)
        cells = (f"{without:.2f}", f"{with_s:.2f}", f"{measured:.2f}", f"{100 * off_without[-1]:+.0f}%")
        rows.append((str(batch), str(cap), *cells, f"{100 * off_with[-1]:+.1f}%"))
    yield judged(
        "ExeGPT 6",
        "WAA under a cap on requests: throughput where those in encode and transfer are not counted, too high by",
        "0 (B_D is the cap)",
        f"up to {100 * max(off_without):.0f}%; counted, within {100 * max(map(abs, off_with)):.0f}% of the simulation",
        "0%",
        False,
        "which requests the decode lane's memory holds: it holds where K/V is set aside only when a request begins to "
        "decode, not when it is encoded (formulas.md)",
    )
    columns = ("B_E", "cap", "without", "closed form", "simulated", "without, off", "closed form, off")
    yield Table(
        "WAA under a cap on requests",
        columns,
        tuple(rows),
        "OPT-13B on 4 A40, summarization, encode on two devices, decode on two stages: requests a second.",
    )


def _encode_s(model: TwoLaneModel, batch: int) -> float:
    prompt = round(model.lengths.mean_input)
    return max(model.encode.step(StepCounts.of([(0, prompt, 1)] * batch, [])))


def _decoding_rps(model: TwoLaneModel, cap: int) -> float:
    """What the decode lane serves with `cap` requests in decode, in two micro-batches."""
    context = round(model.lengths.mean_input + model.lengths.mean_decodes / 2)
    stages = model.decode.step(StepCounts.of([], [context] * max(1, cap // 2)))
    iteration_s = max(2 * max(stages), sum(stages) + sum(model.decode.hops(cap / 2)))
    return cap / (model.mean_decodes * iteration_s)


def _simulated(scheduler: Scheduler, placement: Placement, settings: dict[str, int]) -> float:
    subject = scheduler.problem
    fields = {name: value for name, value in placement.fixed.items() if name in WaaSettings.model_fields}
    plan = scheduler.score(WaaSettings(**settings, **fields), placement)
    measured, _ = simulate(plan, subject.profile, subject.workload, SIMULATED, np.random.default_rng(0))
    return measured.throughput_rps
