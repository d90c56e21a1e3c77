"""Predicted against published measurements: time to first token and time per output token of served dense models.

    python -m benchmarks.fidelity [--rows N] [--json results/fidelity.json]

The rows are `systems/silicon_sample.csv` in the wheel of aiconfigurator-core 0.12 (`pip install xgpt[import]` and
`pip install --no-deps aiconfigurator-core==0.12.0`), measured by others; the profiles are imported from the same wheel.
Each row is a closed loop of clients, each of which sends its next request when its last one has ended. The
predicted loop runs through the scheduling rule, as chunked does with vLLM's default budget, on a simulated clock. What
the rows do not say is assumed, the same for all: ten requests a client, lengths uniform from 80% to 100% of what is
stated (as InferenceMAX draws them), all clients starting at once. Disaggregated rows are two lanes, as in waa.

Fitted, once: four figures of the serving loop (configs/engines) and `FIRST_TOKEN_S`, on half of the rows of
Llama-3.1-70B with vLLM. All other rows verify.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from xgpt.errors import InputError
from xgpt.policies import OneLane, Pool, Request, lane_settings
from xgpt.resolve import load_cluster, load_engine, load_model
from xgpt.schema import ChunkedSettings, Profile
from xprofiler import imported
from xsimulator.clock import step_counts
from xsimulator.placement import whole
from xsimulator.step_cost import LaneCost, StepCounts

TOKEN_BUDGET = 8192
BLOCK_SIZE = 16
REQUESTS_A_CLIENT = 10
SHORTEST = 0.8
FIRST_TOKEN_S = 0.012
"""Between client and engine, at the first token: tokenizer, HTTP, the first answer."""
USABLE_MEMORY = 0.9

MODELS = {
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
}
CLUSTERS = {"h100_sxm": "h100x8", "h200_sxm": "h200x8", "b200_sxm": "b200x8"}
DTYPES = {"": "bfloat16", "bfloat16": "bfloat16", "fp8": "float8", "fp8_block": "float8"}

PEER = "AIConfigurator 0.12 on 21 such rows: TPOT 6.3%, TTFT 53.6% (mean)"


@dataclass(frozen=True)
class Row:
    """One measured configuration, and what is predicted for it."""

    id: str
    model: str
    system: str
    backend: str
    dtype: str
    mode: str
    tp: int
    clients: int
    input_length: int
    output_length: int
    ttft_s: float
    tpot_s: float
    predicted_ttft_s: float
    predicted_tpot_s: float
    impossible: bool
    """The row's own figures mean more prompt tokens a second than the profile's fastest step takes."""

    @property
    def fitted(self) -> bool:
        return self.model == "llama-3.1-70b" and self.backend == "vllm"

    def errors(self) -> tuple[float, float]:
        """Relative, of TTFT and TPOT."""
        return self.predicted_ttft_s / self.ttft_s - 1, self.predicted_tpot_s / self.tpot_s - 1


@cache
def profile_of(model: str, cluster: str, dtype: Any, framework: str) -> Profile:
    spec, _ = load_model(model)
    return imported.profile(spec, load_cluster(cluster), dtype, load_engine(framework))


@cache
def cost_of(model: str, cluster: str, dtype: str, framework: str, tp: int) -> LaneCost:
    spec, _ = load_model(model)
    return LaneCost(spec, profile_of(model, cluster, dtype, framework), whole(spec, tp))


def kv_blocks(model: str, cluster: str, dtype: Any, tp: int) -> int:
    """Return the K/V blocks for which the weights leave a group of devices room.

    Raises:
        InputError: the weights do not fit.
    """
    spec, _ = load_model(model)
    memory = USABLE_MEMORY * tp * load_cluster(cluster).device.memory_bytes - spec.weight_bytes(dtype)
    if memory <= 0:
        raise InputError("tp", tp, "the weights do not fit in 90% of the memory")
    return int(memory / (BLOCK_SIZE * spec.kv_bytes_per_token(dtype)))


def closed_loop(cost: LaneCost, clients: int, inputs: Any, outputs: Any, kv_blocks: int) -> tuple[float, float]:
    """Return mean seconds to the first token, and between tokens, of requests sent by `clients` clients.

    Steps that only decode the same requests are taken at once, at their mean context.
    """
    settings = ChunkedSettings(token_budget=TOKEN_BUDGET, max_batch=clients)
    pool = Pool(kv_blocks, BLOCK_SIZE)
    schedule = OneLane(lane_settings(settings, 0.0, 0.0), pool)
    sent_s, first_s, last_s = {}, {}, {}
    now_s, num_sent = 0.0, 0

    def send() -> None:
        nonlocal num_sent
        if num_sent < len(inputs):
            schedule.submit(Request(num_sent, int(inputs[num_sent]), int(outputs[num_sent])))
            sent_s[num_sent] = now_s
            num_sent += 1

    for _ in range(clients):
        send()
    while (step := schedule.next_step()) is not None:
        running = pool.running
        counts = step_counts(schedule, step, has_encoder=False)
        repeats = 1
        if not step.encode:
            repeats = min(running[id_].max_output - running[id_].generated for id_ in step.decode)
            counts = counts._replace(context=counts.context + counts.decodes * (repeats - 1) / 2)
            for id_ in step.decode:
                running[id_].generated += repeats - 1
        now_s += repeats * sum(cost.step(counts))
        for id_ in schedule.encoded(step):
            first_s.setdefault(id_, now_s)
        finished = [id_ for id_ in schedule.sampled(step) if running[id_].generated + 1 == running[id_].max_output]
        schedule.settle(step, finished)
        for id_ in finished:
            last_s[id_] = now_s
            send()
    ttft = [first_s[i] - sent_s[i] for i in sent_s]
    tpot = [(last_s[i] - first_s[i]) / (outputs[i] - 1) for i in sent_s]
    return float(np.mean(ttft)) + FIRST_TOKEN_S, float(np.mean(tpot))


def predict(raw: dict[str, str]) -> Row:
    """Predict one row of the file.

    Raises:
        InputError: why it cannot be predicted.
    """

    def integer(name: str) -> int:
        return int(float(raw[name]))

    dtype = DTYPES.get(raw["gemm_quant_mode"])
    if dtype is None:
        raise InputError("dtype", raw["gemm_quant_mode"], "not a dtype of ours")
    if raw["system"] not in CLUSTERS:
        raise InputError("system", raw["system"], "not among our clusters")
    model, cluster, framework = MODELS[raw["model_path"]], CLUSTERS[raw["system"]], raw["backend"]
    isl, osl = integer("isl"), integer("osl")
    if raw["mode"] == "agg":
        clients, tp = integer("batch_size"), integer("tp_size")
        cost = cost_of(model, cluster, dtype, framework, tp)
        prompt = StepCounts.of([(0, isl, 1)], [])
        fastest = sum(cost.step(prompt)) / isl
        rng = np.random.default_rng(0)
        num = REQUESTS_A_CLIENT * clients
        inputs, outputs = (rng.integers(round(SHORTEST * n), n + 1, num) for n in (isl, osl))
        ttft_s, tpot_s = closed_loop(cost, clients, inputs, outputs, kv_blocks(model, cluster, dtype, tp))
    else:
        clients, tp = integer("decode_batch_size"), integer("decode_tp_size")
        encode = cost_of(model, cluster, dtype, framework, integer("prefill_tp_size"))
        decode = cost_of(model, cluster, dtype, framework, tp)
        batch = integer("prefill_batch_size")
        prompts = StepCounts.of([(0, isl, 1)] * batch, [])
        tokens = StepCounts.of([], [isl + osl // 2] * clients)
        ttft_s, tpot_s, fastest = FIRST_TOKEN_S + sum(encode.step(prompts)), sum(decode.step(tokens)), 0.0
    measured = float(raw["silicon_ttft_ms"]) / 1e3, float(raw["silicon_tpot_ms"]) / 1e3
    tokens_per_s = clients * isl / (measured[0] + (osl - 1) * measured[1])
    return Row(
        id=raw["id"],
        model=model,
        system=raw["system"],
        backend=framework,
        dtype=dtype,
        mode=raw["mode"],
        tp=tp,
        clients=clients,
        input_length=isl,
        output_length=osl,
        ttft_s=measured[0],
        tpot_s=measured[1],
        predicted_ttft_s=ttft_s,
        predicted_tpot_s=tpot_s,
        impossible=tokens_per_s * fastest > 1,
    )


def summary(rows: list[Row]) -> dict[str, float]:
    """Errors in percent, median and mean of their sizes."""
    ttft, tpot = 100 * np.abs(np.asarray([row.errors() for row in rows])).T
    return {
        "rows": len(rows),
        "tpot_median": float(np.median(tpot)),
        "tpot_mean": float(np.mean(tpot)),
        "ttft_median": float(np.median(ttft)),
        "ttft_mean": float(np.mean(ttft)),
    }


def groups(rows: list[Row]) -> dict[str, list[Row]]:
    """What the table has a line for."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[f"{row.model} {row.dtype} {row.system} {row.backend} {row.mode}"].append(row)
    found = dict(sorted(found.items()))
    found["the model and framework fitted to"] = [row for row in rows if row.fitted]
    found["all others"] = [row for row in rows if not row.fitted]
    found["all others that are possible"] = [row for row in rows if not row.fitted and not row.impossible]
    found["all"] = rows
    return {name: group for name, group in found.items() if group}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help="only every so many rows that this many remain")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        path = imported.wheel_folder() / "silicon_sample.csv"
    except InputError as error:
        raise SystemExit(f"{error} (it holds the measurements)") from None
    with path.open(encoding="utf-8") as file:
        dense = [raw for raw in csv.DictReader(file) if raw["model_path"] in MODELS]
    if options.rows:
        dense = dense[:: max(1, len(dense) // options.rows)]
    rows, skipped = [], Counter[str]()
    for raw in dense:
        try:
            rows.append(predict(raw))
        except InputError as error:
            skipped[str(error)] += 1
    print(f"{len(dense)} rows of dense models: {len(rows)} predicted, {skipped.total()} skipped")
    for why, count in skipped.most_common():
        print(f"  {count:4d} skipped: {why}")
    impossible = sum(row.impossible for row in rows)
    print(
        f"{impossible} rows mean more prompt tokens a second than their profile's fastest step takes: not one load loop"
    )
    figures = {name: summary(group) for name, group in groups(rows).items()}
    print(f"{'error, %':66} {'rows':>5} {'TPOT median':>12} {'mean':>6} {'TTFT median':>12} {'mean':>7}")
    for name, f in figures.items():
        print(
            f"{name:66} {f['rows']:5.0f} {f['tpot_median']:12.1f} {f['tpot_mean']:6.1f}"
            f" {f['ttft_median']:12.1f} {f['ttft_mean']:7.1f}"
        )
    print(f"compare: {PEER}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "first_token_s": FIRST_TOKEN_S,
            "skipped": dict(skipped),
            "impossible": impossible,
            "summary": figures,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
