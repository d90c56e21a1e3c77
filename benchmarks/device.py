"""Check a new device, such as a GPU: whether tokens are right, how fast it is, and whether it is faster than other
engines.

    python -m benchmarks.device [--part equality] [--part served] [--part roofline] [--part engines] [--small]

equality: logits and greedy tokens of the serving worker (on a GPU: Triton, captured decodes, steps scheduled ahead) are
compared with the reference backend and with transformers. served: Llama 3.1 8B is profiled, planned and served as by a
user, under three policies at saturation and at two arrival rates. Errors are raw. roofline: benchmarks.roofline on the
same model. engines: the requests of benchmarks.engines on this model, in turns with transformers' continuous batching
in the same process. All engines have the same random weights, on the GPU if there is one. Nothing is downloaded.
`--small` uses small models everywhere, to test the command itself. Writes results/device.json after each part, and the
step logs of served plans to results/steps-*.jsonl.gz.
"""

from __future__ import annotations

import gc
import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
import numpy as np
import torch
from torch import Tensor

from benchmarks import engines, roofline
from xgpt import api
from xgpt.benchmark import Load, bench_plan
from xgpt.checkpoints.files import read_spec
from xgpt.core.io import dump_json, sha256, write_atomic
from xgpt.core.policies import LaneSettings, OneLane, Pool
from xgpt.core.schema import SERVED, DType, ModelSpec, RunDType
from xgpt.core.schema.policy import PolicyChoice
from xgpt.core.workload import ArrivalProcess
from xgpt.problems import resolve
from xgpt.reporting.plan_text import settings_text
from xgpt.requests import plan_request
from xrunner.attention.reference import ReferenceAttention
from xrunner.build import BACKENDS, default_backend, warm_up, whole_worker
from xrunner.engine import Engine
from xrunner.generation import Generation
from xrunner.kv_cache import KvCache
from xrunner.models import Model
from xrunner.parallel import Part
from xrunner.weights import DTYPES, SeededWeights, load_model, weights_of
from xrunner.worker import Worker
from xscheduler.objectives.best_plans import plan_each

LLAMA = (
    "LlamaConfig",
    {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
)
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
}
NUM_BLOCKS, BLOCK_SIZE = 2048, 16
TOKEN_BUDGET = 2048
ROUNDS = 3
PARTS = ("equality", "served", "roofline", "engines")
SERVED_POLICIES: tuple[PolicyChoice, ...] = ("chunked", "orca", "rra")
SERVED_RATES = (0.6, 0.85)
"""Arrival rates, as shares of the chunked plan's saturated throughput."""
SERVED_S, SERVED_BOUND_S = 12.0, 20.0
"""Seconds for which requests arrive in each load, and the latency bound of the plans."""
EQUAL_REQUESTS, EQUAL_OUTPUT = 16, 32

Requests = list[tuple[tuple[int, ...], int]]
"""Prompts, each with its number of output tokens."""


class Twins(NamedTuple):
    spec: ModelSpec
    own: Model
    other: Any


@click.command()
@click.option(
    "--part", "parts", type=click.Choice(PARTS), multiple=True, help="Part to run; may be repeated.  [default: all]"
)
@click.option("--small", is_flag=True, help="Use small models and few seconds.")
@click.option("--seconds", default=90.0, show_default=True, help="Duration of the roofline.")
def main(parts: tuple[str, ...], small: bool, seconds: float) -> None:
    """Run each part in turn."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    document: dict[str, Any] = {"device": device, "torch": torch.__version__, "small": small}
    if device == "cuda":
        document["device"] = torch.cuda.get_device_name()
    runs: dict[str, Callable[[], Any]] = {
        "equality": lambda: equality(device, small),
        "served": lambda: served_pace(small),
        "roofline": lambda: near_limits(device, small, seconds),
        "engines": lambda: ahead(device, small),
    }
    for part in parts or tuple(runs):
        document[part] = runs[part]()
        write_atomic(Path("results/device.json"), json.dumps(document, indent=1) + "\n")
        gc.collect()


def equality(device: str, small: bool) -> list[dict[str, Any]]:
    models = {"opt-125m": engines.MODELS["opt-125m"], "qwen2.5-0.5b": engines.MODELS["qwen2.5-0.5b"]}
    if small:
        models = {"llama, small": (LLAMA[0], LLAMA[1] | SMALL)}
    dtypes: tuple[DType, ...] = ("float32",) if device == "cpu" else ("float32", "float16", "bfloat16")
    apart = "largest difference from the reference's logits: prompts, decodes"
    click.echo(f"| model | dtype | {apart} | share of tokens equal to the reference's | share equal to transformers' |")
    click.echo(f"|{'---|' * 5}")
    rows = []
    for name, config in models.items():
        for dtype in dtypes:
            rows.append({"model": name, "dtype": dtype, **compare(twins(*config, dtype, device), dtype, device)})
            row = rows[-1]
            apart = ", ".join(f"{value:.1e}" for value in row["logits_apart"])
            click.echo(f"| {name} | {dtype} | {apart} | {row['equal']:.4f} | {row['equal_to_transformers']:.4f} |")
    return rows


def compare(pair: Twins, dtype: DType, device: str) -> dict[str, Any]:
    requests = equal_requests(pair.spec)
    kind, place = DTYPES[dtype], torch.device(device)
    pair.own.prepack()
    served = whole_worker(pair.own, backend(place, kind), NUM_BLOCKS, BLOCK_SIZE, kind, place)
    cache = KvCache(pair.spec, NUM_BLOCKS, BLOCK_SIZE, kind, place)
    plain = Worker(pair.own, cache, ReferenceAttention())
    logits = [first_logits(worker, requests) for worker in (served, plain)]
    apart = [float((a - b).abs().max()) for a, b in zip(*logits, strict=True)]
    tokens, reference = generate(served, requests), generate(plain, requests)
    with torch.no_grad():
        other = [transformers_tokens(pair.other, prompt, count) for prompt, count in requests]
    return {
        "logits_apart": apart,
        "equal": equal_share(tokens, reference),
        "equal_to_transformers": equal_share(tokens, other),
        "ahead": getattr(served, "num_hits", None),
    }


def served_pace(small: bool) -> list[dict[str, Any]]:
    asked: dict[str, Any] = {"model": "opt-125m" if small else "llama-3.1-8b", "workload": "summarization"}
    started = time.perf_counter()
    seen: set[str] = set()

    def progress(done: int, total: int, what: str) -> None:
        if (stage := what.partition(": ")[0]) not in seen:
            seen.add(stage)
            click.echo(f"{time.perf_counter() - started:.0f} s: {what}")

    profile = api.profile(model=asked["model"], progress=progress)
    served = profile.provenance.get(SERVED, "timed one by one")
    click.echo(f"profile in {time.perf_counter() - started:.0f} s: {served}, spread {100 * profile.spread:.1f}%")
    write_atomic(Path("results/profile.json"), dump_json(profile))
    problem = resolve(plan_request(**asked, latency_bound_s=SERVED_BOUND_S, objective="saturated"))
    plans = {policy: plan_each(problem, policy)[policy] for policy in SERVED_POLICIES}
    loads = [(policy, 0.0) for policy in plans] + [(SERVED_POLICIES[0], share) for share in SERVED_RATES]
    click.echo("| policy | load | requests | pace | figures: predicted, measured, error |\n|" + "---|" * 5)
    rows = []
    for number, (policy, share) in enumerate(loads):
        plan = plans[policy]
        rate = plan.estimate.throughput_rps * (share or 1.0)
        load = Load(max(24, round(SERVED_S * rate)), arrivals=ArrivalProcess.at(rate) if share else None)
        report, log = bench_plan(plan, load, np.random.default_rng(0), profile=profile)
        with gzip.open(f"results/steps-{number}.jsonl.gz", "wb") as file:
            file.writelines(msgspec.json.encode(record) + b"\n" for record in log)
        write_atomic(Path(f"results/plan-{policy}.json"), dump_json(plan))
        rows.append({"plan": sha256(plan), "report": report.model_dump(mode="json")})
        figures = ", ".join(
            f"{each.metric} {each.predicted:.3f} {each.measured:.3f} {100 * each.error:+.1f}%"
            for each in report.figures
        )
        pace = "-" if report.pace is None else f"{report.pace:.3f}"
        settings = f"{policy} {settings_text(plan)}"
        click.echo(f"| {settings} | {share or 'saturated'} | {report.num_requests} | {pace} | {figures} |")
    return rows


def near_limits(device: str, small: bool, seconds: float) -> dict[str, Any]:
    from xgpt.resolve import load_model

    spec, _ = load_model("opt-125m" if small else "llama-3.1-8b")
    dtype: RunDType = "float32" if device == "cpu" else "bfloat16"
    document = roofline.measure(spec, device, dtype, 2 if small else seconds, 64 if small else 1024)
    click.echo("\n" + roofline.tables(document) + "\n")
    return document


def ahead(device: str, small: bool) -> dict[str, Any]:
    dtype: RunDType = "float32" if device == "cpu" else "bfloat16"
    pair = twins(LLAMA[0], LLAMA[1] | (SMALL if small else {}), dtype, device)
    path = engines.make_workload("mixed", 8 if small else engines.NUM_REQUESTS, pair.spec.vocab_size, 0)
    requests = [(tuple(request["prompt"]), request["num_output"]) for request in json.loads(path.read_text())]
    kind, place = DTYPES[dtype], torch.device(device)
    pair.own.prepack()
    worker = whole_worker(pair.own, backend(place, kind), NUM_BLOCKS, BLOCK_SIZE, kind, place)
    warm_up(worker)
    runs: dict[str, Callable[[], object]] = {
        "own": lambda: generate(worker, requests),
        "transformers": lambda: transformers_batch(pair.other, requests),
    }
    for run in runs.values():
        run()  # compiles and allocates
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    num_tokens = sum(count for _, count in requests)
    click.echo("| engine | seconds (median) | output tokens/s | times own's seconds |\n|---|---|---|---|")
    for name, median in medians.items():
        click.echo(f"| {name} | {median:.2f} | {num_tokens / median:.0f} | {median / medians['own']:.2f} |")
    return {"requests": len(requests), "output_tokens": num_tokens, "seconds": seconds}


def twins(kind: str, changes: dict[str, Any], dtype: DType, device: str) -> Twins:
    import transformers

    config = getattr(transformers, kind)(**changes)
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        spec = read_spec(Path(directory))
    model = load_model(spec, dtype, SeededWeights(0), device)
    with torch.device(device):
        other = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation="sdpa")
    other.eval()
    other.generation_config.eos_token_id = None
    tensors = other.state_dict()
    for weight in weights_of(model, Part.whole(spec)):
        tensors[weight.name].copy_(weight.out.t() if weight.transposed else weight.out)
    return Twins(spec, model, other)


def backend(device: torch.device, dtype: torch.dtype) -> Any:
    return BACKENDS[default_backend(device, dtype)]()


def equal_requests(spec: ModelSpec) -> Requests:
    rng = np.random.default_rng(0)
    return [
        (tuple(rng.integers(10, spec.vocab_size, int(length)).tolist()), EQUAL_OUTPUT)
        for length in rng.integers(5, 200, EQUAL_REQUESTS)
    ]


def generate(worker: Worker, requests: Requests) -> list[list[int]]:
    engine = Engine(OneLane(LaneSettings(mix=True, token_budget=TOKEN_BUDGET), Pool(NUM_BLOCKS, BLOCK_SIZE)), worker)
    for id_, (prompt, count) in enumerate(requests):
        engine.submit(Generation(id_, prompt, count))
    tokens: list[list[int]] = [[] for _ in requests]
    while (settled := engine.step()) is not None:
        for token in settled:
            tokens[token.id].append(token.token)
    return tokens


def first_logits(worker: Worker, requests: Requests) -> tuple[Tensor, Tensor]:
    """Return the logits of a step of whole prompts, and of the following decode step. # each [requests, vocab]"""
    found: list[Tensor] = []
    sample = worker.sample

    def keep(logits: Tensor) -> Tensor:
        found.append(logits.float().cpu())
        return sample(logits)

    worker.sample = keep  # type: ignore[method-assign]
    try:
        generate(worker, [(prompt, 2) for prompt, _ in requests[:8]])
    finally:
        worker.sample = sample  # type: ignore[method-assign]
    prompts, decodes = found[:2]
    return prompts, decodes


def equal_share(tokens: list[list[int]], others: list[list[int]]) -> float:
    """Return the share of equal tokens. All tokens after the first difference count as different."""
    pairs = list(zip(tokens, others, strict=True))
    equal = sum(next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0])) for pair in pairs)
    return equal / sum(len(mine) for mine, _ in pairs)


def transformers_tokens(model: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return out[0, len(prompt) :].tolist()


def transformers_batch(model: Any, requests: Requests) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(max_batch_tokens=TOKEN_BUDGET, allow_block_sharing=False)
    finished = num_tokens = 0
    with model.continuous_batching_context_manager(greedy, continuous_batching_config=batching) as manager:
        for prompt, count in requests:
            manager.add_request(list(prompt), max_new_tokens=count)
        while finished < len(requests):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                assert result.error is None, result.error
                num_tokens += len(result.generated_tokens)
                finished += 1
    assert num_tokens == sum(count for _, count in requests)


if __name__ == "__main__":
    main()
