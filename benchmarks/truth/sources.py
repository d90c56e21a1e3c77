"""Yield rows with measured and predicted figures from each source of measurements.

Predictions run the scheduling rule on a simulated clock, with the defaults of the row's engine and the settings that
the source names. Where a source states nothing, one assumption holds for all its rows. The source's function states it.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from benchmarks.truth.loads import Served, Stored, all_at_once, closed_loop, cluster_of, needs, open_loop
from xgpt.core.errors import XgptError
from xgpt.core.reuse_distances import ReuseCurve
from xgpt.core.schema import DType
from xgpt.core.trace_blocks import TracePrefixes
from xgpt.core.workload import TraceLengths
from xprofiler.ranges import Cell, family_of, level_of

Ints = npt.NDArray[np.int64]
Figures = dict[str, float]
"""Seconds, or tokens a second, by quantity."""


def cell_of(served: Served, load: str, running: float) -> Cell:
    device, family = cluster_of(served.cluster).device.name, family_of(served.model_spec)
    profile = "imported" if served.imported else "analytic"
    return Cell(load, served.spec.framework, family, device, profile, level_of(running))


class Setting(NamedTuple):
    """What was served in a closed loop, and how: format of the weights, mean lengths, clients, division."""

    model: str
    form: str
    prompt: int
    output: int
    clients: int
    tp: int
    ep: int


@dataclass(frozen=True)
class Row:
    """One measured configuration.

    Attributes:
        source, group: the source and the group of rows with which the row is reported.
        is_fitted: whether predictions were fitted to rows of this kind. Other rows verify predictions.
        why_not: the reason why nothing is predicted for this row.
        cell: the cell of the prediction. None means that the row is not the load of an engine.
        document: what published the row, or the campaign of one model that measured it.
    """

    source: str
    group: str
    is_fitted: bool
    measured: Figures
    predicted: Figures = field(default_factory=dict)
    note: str = ""
    why_not: str = ""
    cell: Cell | None = None
    document: str = ""
    setting: Setting | None = None

    @property
    def kind(self) -> tuple[str, str, str]:
        if self.cell is None:
            return self.source, "", ""
        load = self.cell.load if self.cell.profile == "imported" else f"{self.cell.load}, datasheet"
        return load, self.cell.engine, self.cell.family

    def errors(self) -> Figures:
        """Return the relative errors by quantity."""
        return {name: self.predicted[name] / self.measured[name] - 1 for name in self.predicted}


@dataclass(frozen=True)
class Source:
    """Rows of one kind.

    Attributes:
        path: returns the path of the file, or None if it does not exist.
        peers: errors that others published for these or similar rows.
    """

    name: str
    path: Callable[[Path | None], Path | None]
    rows: Callable[[Path], Iterator[Row]]
    peers: str = ""


MEASURED = ("silicon_tpot_ms", "silicon_ttft_ms")
SAME = ("backend", "system", "mode", "isl", "osl", "batch_size", "tp_size")


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file. AIConfigurator's wheel has many measurements two or three times, from several exports
    of one database, of which some round. Rows with equal figures and numbers of clients count once, and so do rows of a
    setting whose figures agree to three digits.
    """
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or MEASURED[0] not in rows[0]:
        return rows
    exact, rounded = dict[object, dict[str, str]](), dict[object, dict[str, str]]()
    for raw in rows:
        exact.setdefault(tuple(raw[name] for name in (*MEASURED, "mode", "batch_size")), raw)
    for raw in exact.values():
        rounded.setdefault(_rounded(raw), raw)
    return list(rounded.values())


def _rounded(raw: dict[str, str]) -> tuple[str, ...]:
    return *(f"{float(raw[name] or 'nan'):.3g}" for name in MEASURED), *(raw[name] for name in SAME)


def predicted(predict: Callable[[], Figures]) -> tuple[Figures, str]:
    try:
        return predict(), ""
    except XgptError as error:
        return {}, str(error)


# vLLM under open arrivals -------------------------------------------------------------------------------------------

OPEN_FITTED = ("llama-3.1-8b", "qwen3-14b", "codellama-34b")
OPEN_CLUSTERS = {"H100": "h100x8", "A100": "a100x16"}
BLOCK = 16
OPEN_SECONDS = 600
NUM_PROMPTS = 100
"""Number of distinct prompts in an experiment."""


def open_rows(path: Path) -> Iterator[Row]:
    """Yield rows of vLLM 0.15.1 with Poisson arrivals, ten minutes at each rate of an experiment, one rate after the
    other.

    About a hundred prompts were repeated with prefix caching. The source does not state their order, so they are
    assumed to come in turn. The reuse curve at the engine's K/V memory gives the cached tokens of a request.
    """
    raws = read(path)
    for raw in raws:
        earlier = [row for row in raws[: raws.index(raw)] if row["experiment"] == raw["experiment"]]
        before = sum(int(OPEN_SECONDS * float(row["rate_per_s"])) for row in earlier)
        numbers = {name: float(raw[name]) for name in ("rate_per_s", "input_tokens", "output_tokens")}
        lengths = int(numbers["input_tokens"]), int(numbers["output_tokens"])
        served = Served(
            raw["model"],
            OPEN_CLUSTERS[raw["device"]],
            "bfloat16",
            int(raw["tp"]),
            "vllm-0.15",
            int(raw["max_num_seqs"]),
            int(raw["max_num_batched_tokens"]),
        )

        def predict(
            served: Served = served,
            numbers: Figures = numbers,
            lengths: tuple[int, int] = lengths,
            before: int = before,
        ) -> Figures:
            count = int(OPEN_SECONDS * numbers["rate_per_s"])
            cached = repeated(before + count, lengths, served.kv.blocks)[before:].tolist()
            times = open_loop(served, numbers["rate_per_s"], lengths, cached, seed=0)
            first, whole = times.ttft_s, times.whole_s
            return {
                "e2e mean": float(np.mean(whole)),
                "e2e p99": float(np.quantile(whole, 0.99)),
                "TTFT mean": float(np.mean(first)),
                "TTFT p99": float(np.quantile(first, 0.99)),
            }

        names = {"e2e": "e2e", "TTFT": "ttft"}
        measured = {
            f"{name} {row}": float(raw[f"{column}_{row}_ms"]) / 1e3
            for name, column in names.items()
            for row in ("mean", "p99")
        }
        found, why_not = predicted(predict)
        is_fitted = raw["model"] in OPEN_FITTED
        group = f"{raw['model']} {raw['device']}"
        note = f"{raw['experiment']} {raw['rate_per_s']}/s"
        cell = cell_of(served, "open loop", numbers["rate_per_s"] * measured["e2e mean"])
        yield Row("vLLM, open loop", group, is_fitted, measured, found, note, why_not, cell, f"open loop, {group}")


def repeated(count: int, lengths: tuple[int, int], kv_blocks: int) -> Ints:
    """Return the cached tokens of each of `count` requests, if their prompts come in turn. # [count]"""
    whole = lengths[0] // BLOCK
    left = -(-sum(lengths) // BLOCK) - whole
    prompts = [tuple(range(n * (whole + 1), (n + 1) * (whole + 1))) for n in range(NUM_PROMPTS)]
    num_own = NUM_PROMPTS * (whole + 1)
    of_request = tuple(prompts[n % NUM_PROMPTS][: -(-lengths[0] // BLOCK)] for n in range(count))
    outputs = tuple(tuple(range(num_own + n * left, num_own + (n + 1) * left)) for n in range(count))
    sizes = (np.full(count, length) for length in lengths)
    return ReuseCurve(TraceLengths(*sizes, None, TracePrefixes(BLOCK, of_request, outputs)), BLOCK).cached(
        kv_blocks * BLOCK
    )


# TensorRT-LLM offline -----------------------------------------------------------------------------------------------

OFFLINE_CLUSTERS = {"h100": "h100x8", "h200": "h200x8"}
MOST_OFFLINE = 3000
"""Largest number of simulated requests, enough for a steady state. The source may have used more."""


def offline_rows(path: Path, *, is_imported: bool = True) -> Iterator[Row]:
    """Yield rows of TensorRT-LLM 1.0's maximum throughput. All lengths are equal, and all requests wait from the start.

    Experts are divided among all devices. The commands of these rows also divide requests, not heads, among devices
    (enable_attention_dp), which is not predicted.
    """
    for raw in [raw for raw in read(path) if is_imported or not raw.get("ep")]:
        lengths, has_experts = (int(raw["input_tokens"]), int(raw["output_tokens"])), bool(raw.get("ep"))
        served = Served(
            raw["model"],
            OFFLINE_CLUSTERS[raw["device"]],
            cast(DType, raw["dtype"] if has_experts else "float8"),
            int(raw["tp"]),
            "tensorrt-llm-1.0",
            max_batch=2048,
            token_budget=8192,
            imported=is_imported,
            changes=(("cuts_prompts", True),),
            ep=count_of(raw.get("ep") or ""),
            skew=skew_of(raw["model"]) if has_experts else 0.0,
        )

        def predict(served: Served = served, lengths: tuple[int, int] = lengths) -> Figures:
            needs(served, sum(lengths))
            inside = min(served.max_batch, served.kv.blocks // served.kv.of(sum(lengths)))
            count = min(MOST_OFFLINE, max(4 * inside, 200))
            inputs, outputs = ([length] * count for length in lengths)
            return {"throughput": all_at_once(served, inputs, outputs)}

        found, why_not = predicted(predict)
        kind = "prompt-heavy" if lengths[0] >= 2 * lengths[1] else "others"
        measured = {"throughput": float(raw["output_tokens_per_s"])}
        note = f"{raw['model']} {raw['device']} TP {raw['tp']} {lengths[0]}/{lengths[1]}"
        is_fitted, cell = is_imported and not has_experts, cell_of(served, "offline", MOST_OFFLINE)
        document = "TensorRT-LLM's performance overview"
        yield Row("TensorRT-LLM, offline", kind, is_fitted, measured, found, note, why_not, cell, document)


SKEW, DEEPSEEK_SKEW = 1.2, 1.01
"""Exponents of the power laws that AIConfigurator assumes for the routing of real prompts (`sdk/models`)."""


def skew_of(model: str) -> float:
    return DEEPSEEK_SKEW if model.startswith("deepseek") else SKEW


# Served models, as published with AIConfigurator's tables -----------------------------------------------------------

MODELS = {
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
}
CLUSTERS = {
    "h100_sxm": "h100x8",
    "h200_sxm": "h200x8",
    "b200_sxm": "b200x8",
    "b300_sxm": "b300x8",
    "gb200": "gb200x4",
    "gb300": "gb300x4",
}
DTYPES: dict[str, tuple[DType, Stored | None]] = {
    "": ("bfloat16", None),
    "bfloat16": ("bfloat16", None),
    "fp8": ("float8", None),
    "fp8_block": ("bfloat16", "fp8_block"),
    "nvfp4": ("bfloat16", "nvfp4"),
}
"""For each type of products in a row: the dtype of everything else, K/V included, and the weights' format if it
differs."""
INFERENCEX = "meta-llama/Llama-3.1-70B"
"""The name in the rows that InferenceX measured on 2025-10-29 with nvidia/Llama-3.3-70B-Instruct-FP8."""
SCALED = {INFERENCEX, "nvidia/Llama-3.1-8B-Instruct-FP8"}
"""Models that ran with NVIDIA's checkpoints, which contain a scale for the activations of each matrix."""
ENGINES = {"vllm": "vllm-0.10", "trtllm": "tensorrt-llm-1.0", "sglang": "sglang-0.5"}
ALIGNED = "aic-auto-gap-analysis"
"""Text in a row's source which means that AIConfigurator's makers measured the row to evaluate their predictions."""
BUDGETS = {"vllm": 8192, "trtllm": 16384, "sglang": 8192}
BATCH_WAIT = (("batch_wait_steps", 20), ("batch_wait_tokens", round(0.9 * BUDGETS["trtllm"])))
"""InferenceX's values of batch_wait_timeout_iters and batch_wait_max_tokens_ratio (TensorRT-LLM's pull request 7416),
for 1,024 input and output tokens on fewer than eight devices."""
REQUESTS_A_CLIENT = 10
SHORTEST = 0.8
SPARE_TOKENS = 1500
"""Number by which AIConfigurator's token budget exceeds one whole prompt and one decode for each client."""
MIXED_FROM = (0, 5, 6)
"""First version of SGLang that AIConfigurator starts with --enable-mixed-chunk (pull request 258, from the week in
which the template for this version was added)."""


def _engine(raw: dict[str, str]) -> tuple[str, tuple[tuple[str, object], ...]]:
    name = ENGINES[raw["backend"]]
    if raw["model_path"] == INFERENCEX and raw["backend"] == "vllm":
        return name, (("schedules_ahead", True),)
    return name, of_backend(raw)


def of_backend(raw: dict[str, str]) -> tuple[tuple[str, object], ...]:
    if raw["backend"] == "sglang":
        return (("mixes", True),) if is_aligned(raw) and _version(raw["backend_version"]) >= MIXED_FROM else ()
    if raw["backend"] != "trtllm":
        return ()
    if is_aligned(raw):
        return (("memory_share", 0.8),)
    waits = (count_of(raw["isl"]), count_of(raw["osl"])) == (1024, 1024) and count_of(raw["tp_size"]) < 8
    return ("cuts_prompts", True), *(BATCH_WAIT if waits else ())


def is_aligned(raw: dict[str, str]) -> bool:
    return ALIGNED in raw["silicon_data_source"]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3] if part.isdecimal())


def budget_of(raw: dict[str, str]) -> int:
    if not is_aligned(raw):
        return BUDGETS[raw["backend"]]
    prompt = count_of(raw["isl"]) + SPARE_TOKENS
    if raw["backend"] == "sglang":  # counts prompt tokens only, which are limited by the default, too
        return min(prompt, BUDGETS["sglang"])
    return count_of(raw["batch_size"]) + prompt


def lengths_of(raw: dict[str, str]) -> tuple[list[int], list[int]]:
    """Return the input and output lengths of a row's requests.

    InferenceX draws lengths uniformly from 80% to 100% of the stated length. In AIConfigurator's evaluation all are
    equal.
    """
    num, stated = REQUESTS_A_CLIENT * count_of(raw["batch_size"]), (count_of(raw["isl"]), count_of(raw["osl"]))
    if is_aligned(raw):
        return [stated[0]] * num, [stated[1]] * num
    rng = np.random.default_rng(0)
    inputs, outputs = (rng.integers(round(SHORTEST * n), n + 1, num).tolist() for n in stated)
    return inputs, outputs


def count_of(text: str) -> int:
    return int(float(text or 1))


def of_clients(row: Row, served: Served, raw: dict[str, str], load: str = "closed loop") -> Row:
    """Return the row with predictions. Its rates follow from its times by Little's law, as clients always wait."""
    inputs, outputs = lengths_of(raw)
    clients, decodes = count_of(raw["batch_size"]), float(np.mean(outputs)) - 1

    def with_rate(figures: Figures) -> Figures:
        return {"throughput": clients / (figures["TTFT"] + decodes * figures["TPOT"]), **figures}

    def predict() -> Figures:
        needs(served, count_of(raw["isl"]) + count_of(raw["osl"]))
        times, _ = closed_loop(served, clients, inputs, outputs)
        return with_rate({"TPOT": float(np.mean(times.tpot_s)), "TTFT": float(np.mean(times.ttft_s))})

    found, why_not = predicted(predict)
    cell, campaign = cell_of(served, load, clients), "AIConfigurator" if is_aligned(raw) else "InferenceX"
    form = " ".join(row.group.split()[1:-2])
    setting = Setting(served.model, form, count_of(raw["isl"]), count_of(raw["osl"]), clients, served.tp, served.ep)
    return replace(
        row,
        measured=with_rate(row.measured),
        predicted=found,
        why_not=why_not,
        cell=cell,
        document=f"{campaign}, {served.model}",
        setting=setting,
    )


def silicon_rows(path: Path) -> Iterator[Row]:
    """Yield rows of clients in a closed loop. All start at the same time, and each sends ten requests."""
    raws = [raw for raw in read(path) if raw["model_path"] in MODELS and raw["mode"] == "agg"]
    for raw in raws:
        clients, tp = count_of(raw["batch_size"]), count_of(raw["tp_size"])
        measured = {"TPOT": float(raw["silicon_tpot_ms"]) / 1e3, "TTFT": float(raw["silicon_ttft_ms"]) / 1e3}
        model, backend = MODELS[raw["model_path"]], raw["backend"]
        group = f"{model} {raw['gemm_quant_mode'] or 'bfloat16'} {raw['system']} {backend}"
        of_inferencex = raw["model_path"] == INFERENCEX
        is_fitted = of_inferencex and backend == "vllm" and raw["system"] in ("h100_sxm", "h200_sxm")
        (dtype, stored), cluster = DTYPES.get(raw["gemm_quant_mode"], (None, None)), CLUSTERS[raw["system"]]
        if dtype == "float8" and raw["model_path"] not in SCALED:
            stored = "fp8_unscaled"
        row = Row("silicon", group, is_fitted, measured, note=raw["id"])
        if dtype is None:
            yield replace(row, why_not=f"{raw['gemm_quant_mode']} is no type that is planned for")
            continue
        engine, changes = _engine(raw)
        kv_dtype: DType | None = "float8" if stored == "nvfp4" else None  # as NVIDIA's checkpoints ask for
        served = Served(
            model,
            cluster,
            dtype,
            tp,
            engine,
            clients,
            budget_of(raw),
            changes=changes,
            stored=stored,
            kv_dtype=kv_dtype,
        )
        yield of_clients(row, served, raw)
