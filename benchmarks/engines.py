"""Compare this engine with others on the same requests, weights and machine.

    python -m benchmarks.engines [--model opt-125m] [--workload mixed …] [--engine own --engine vllm …] [--rounds 3]
                                 [--requests 64] [--budget 128 --budget 256 …] [--python vllm=PATH] [--longest-first]
                                 [--append]

Requests have uniformly drawn inputs of 32 to 256 tokens and outputs of 16 to 128 (`mixed`), or all have 128 and 512
(`long-output`), or 1,024 and 32 (`long-input`). Decoding is greedy with exactly these lengths. Weights are random, and
all requests wait at the start. Engines run in float32, and in fewer bits if their names say so. Each engine has its own
environment, created at the first use (`--python` names an existing one), and stays loaded. Runs are interleaved, and
the other engines are paused meanwhile. If an engine does not start, the table states why. `--append` adds the runs to
those of earlier calls with the same requests.

`--budget` is the largest number of tokens in a step of any engine. If several are given, every engine first runs once
with each budget, and keeps the budget of its fastest run. Before each run, a timed matrix product shows the state of
the machine's clock. xgpt's engine admits first the request that may generate most tokens. With `--longest-first`, all
engines get the requests in this order. The benchmark prints the processor, its instructions and the chosen layouts of
weights. Shares refer to the least possible time (`benchmarks.lib.floors`) at rates that were measured before the runs.
Writes results/engines.MODEL.WORKLOAD.json.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from benchmarks.lib.floors import Rates, floor_s, measured_rates
from benchmarks.lib.peer_engines import BUDGETED, ENGINES, Engine, EngineEnded, end, environment, start
from xgpt.checkpoints.files import read_spec
from xgpt.core.io import cache_dir, write_atomic
from xgpt.core.machine import num_cores
from xgpt.core.schema import RunDType
from xgpt.diagnosis import instructions
from xprofiler.others import gflops

NUM_REQUESTS = 64
WORKLOADS = {
    "mixed": ((32, 256), (16, 128)),
    "long-output": ((128, 128), (512, 512)),
    "long-input": ((1024, 1024), (32, 32)),
}
"""Smallest and largest number of tokens of inputs, and of outputs."""


MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "opt-125m": ("OPTConfig", {}),
    "qwen2.5-0.5b": (
        "Qwen2Config",
        {
            "num_hidden_layers": 24,
            "hidden_size": 896,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-0.6b": (
        "Qwen3Config",
        {
            "num_hidden_layers": 28,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.2-1b": (
        "LlamaConfig",
        {
            "num_hidden_layers": 16,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 8192,
            "vocab_size": 128256,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
}
"""Name of transformers' configuration, and what differs from its defaults."""


DEFAULT_BUDGET = 256
"""Largest number of tokens in a step, the default of OpenVINO GenAI."""


class Run(NamedTuple):
    """One run of one engine, with the machine's state before it: the rate of a matrix product, and the load of the
    system."""

    engine: str
    seconds: float
    gflops: float
    load: float
    stolen: float


class Load(NamedTuple):
    workload: Path
    path: Path
    document: dict[str, Any]


PRECISIONS: tuple[RunDType, ...] = ("float32", "bfloat16", "int8")
"""Data types of xgpt's matrix products, whose rates can be measured."""


@click.command()
@click.option("--model", type=click.Choice(list(MODELS)), default="opt-125m", show_default=True)
@click.option(
    "--workload", "kinds", type=click.Choice(list(WORKLOADS)), multiple=True, default=("mixed",), show_default=True
)
@click.option(
    "--engine",
    "engines",
    type=click.Choice(list(ENGINES)),
    multiple=True,
    help="Engine to measure; may be repeated. [default: all]",
)
@click.option("--rounds", default=3, show_default=True)
@click.option("--requests", "num_requests", default=NUM_REQUESTS, show_default=True)
@click.option("--python", "pythons", multiple=True, metavar="ENGINE=PATH", help="Existing environment of an engine.")
@click.option("--budget", "budgets", type=int, multiple=True, default=(DEFAULT_BUDGET,), show_default=True)
@click.option("--longest-first", is_flag=True, help="Sort the requests by their outputs, for every engine.")
@click.option("--append", is_flag=True, help="Keep the runs of earlier calls with the same requests.")
@click.option("--seed", default=0, show_default=True)
def main(
    model: str,
    kinds: tuple[str, ...],
    engines: tuple[str, ...],
    rounds: int,
    num_requests: int,
    pythons: tuple[str, ...],
    budgets: tuple[int, ...],
    longest_first: bool,
    append: bool,
    seed: int,
) -> None:
    """Run every engine in turn, `rounds` times."""
    names = engines or tuple(ENGINES)
    given = dict(item.split("=", 1) for item in pythons)
    commands = {name: given.get(name) or environment(name) for name in names}
    checkpoint = make_checkpoint(model, seed)
    vocab_size = MODELS[model][1].get("vocab_size", 50272)
    rates = measured_rates([dtype for dtype in PRECISIONS if dtype in {ENGINES[name].precision for name in names}])
    loads = []
    for kind in kinds:
        about = {
            "model": model,
            "workload": kind,
            "requests": num_requests,
            "longest_first": longest_first,
            "seed": seed,
            "processor": processor(),
        }
        workload = make_workload(kind, num_requests, vocab_size, seed, longest_first)
        path = Path(f"results/engines.{model}.{kind}.json")
        loads.append(Load(workload, path, begun(path, about) if append else empty(about)))
        loads[-1].document["floors"] |= floors(checkpoint, workload, rates)
    click.echo(processor())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # engines run in separate sessions, so they are ended here
    run_all(commands, checkpoint, budgets, loads, rounds)
    for load in loads:
        click.echo(f"\n{load.document['workload']}\n\n{table(load.document)}")


def begun(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    if path.exists():
        document: dict[str, Any] = json.loads(path.read_text())
        if all(document.get(key) == value for key, value in about.items()):
            return document
    return empty(about)


def empty(about: dict[str, Any]) -> dict[str, Any]:
    parts: dict[str, Any] = {"floors": {}, "budgets": {}, "notes": {}, "failed": {}, "runs": []}
    return about | {"date": datetime.date.today().isoformat()} | parts


def floors(checkpoint: Path, workload: Path, rates: dict[RunDType, Rates]) -> dict[str, dict[str, float]]:
    spec, requests = read_spec(checkpoint), json.loads(workload.read_text())
    lengths = [(len(request["prompt"]), request["num_output"]) for request in requests]
    return {dtype: {"seconds": floor_s(spec, lengths, dtype, rate), **rate._asdict()} for dtype, rate in rates.items()}


def run_all(
    commands: dict[str, str], checkpoint: Path, budgets: tuple[int, ...], loads: list[Load], rounds: int
) -> None:
    running: dict[str, Engine] = {}
    try:
        for name, python in commands.items():
            try:
                budget = fastest_budget(python, name, checkpoint, loads, budgets)
                running[name] = start(python, name, checkpoint, budget)
                for load in loads:
                    load.document["budgets"][name] = budget
                    load.document["notes"][name] = running[name].notes
                    load.document["failed"].pop(name, None)
            except EngineEnded as reason:
                click.echo(f"{name} does not run: {reason}")
                for load in loads:
                    load.document["failed"][name] = str(reason)
        for _ in range(rounds):
            for load in loads:
                for name, engine in list(running.items()):
                    try:
                        run = measure(name, engine, load.workload)
                    except EngineEnded as reason:
                        click.echo(f"{name} has ended: {reason}")
                        load.document["failed"][name] = str(reason)
                        end(running.pop(name))
                        continue
                    load.document["runs"].append(run._asdict())
                    write_atomic(load.path, json.dumps(load.document, indent=1) + "\n")
                    click.echo("  ".join(f"{value:.3g}" if isinstance(value, float) else value for value in run))
    finally:
        for engine in running.values():
            end(engine)


def make_checkpoint(model: str, seed: int) -> Path:
    """Save random weights as transformers does, and a tokenizer, which some engines need although no run uses it."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models

    directory = cache_dir() / "engines" / f"{model}.{seed}"
    if not (directory / "config.json").exists():
        torch.manual_seed(seed)
        kind, changes = MODELS[model]
        config = getattr(transformers, kind)(**changes)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
        words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(config.vocab_size)}, unk_token="<0>"))
        named = {"unk_token": "<0>", "bos_token": "<2>", "eos_token": "<2>"}
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(directory)
        tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
        tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"  # older versions know this name, too
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return directory


def make_workload(kind: str, num_requests: int, vocab_size: object, seed: int, longest_first: bool = False) -> Path:
    assert isinstance(vocab_size, int)
    rng = np.random.default_rng(seed)
    inputs, outputs = (rng.integers(least, most + 1, num_requests) for least, most in WORKLOADS[kind])
    requests = [
        {"prompt": rng.integers(10, vocab_size, length).tolist(), "num_output": int(num_output)}
        for length, num_output in zip(inputs, outputs, strict=True)
    ]
    if longest_first:
        requests.sort(key=lambda request: -request["num_output"])
    path = cache_dir() / "engines" / f"{kind}.{num_requests}.{vocab_size}.{seed}.{longest_first}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(requests))
    return path


def processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().split("\n") if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {num_cores()} cores: {instructions().value}"


def fastest_budget(python: str, name: str, checkpoint: Path, loads: list[Load], budgets: tuple[int, ...]) -> int:
    if len(budgets) == 1 or ENGINES[name].script not in BUDGETED:
        return budgets[0]
    seconds = {}
    for budget in budgets:
        engine = start(python, name, checkpoint, budget)
        try:
            seconds[budget] = sum(measure(name, engine, load.workload).seconds for load in loads)
        finally:
            end(engine)
    click.echo(f"{name}, seconds by tokens a step: " + ", ".join(f"{budget} {s:.1f}" for budget, s in seconds.items()))
    return min(seconds, key=seconds.__getitem__)


def measure(name: str, engine: Engine, workload: Path) -> Run:
    rate, load = gflops(), os.getloadavg()[0]
    with stolen_time() as stolen:
        seconds = engine.seconds(workload)
    return Run(name, seconds, rate, load, stolen[0])


@contextmanager
def stolen_time() -> Iterator[list[float]]:
    """Yield a list, to which the share of processor time that the hypervisor gave to other machines is appended at the
    end of the block, or 0 if it is not counted.
    """
    stolen: list[float] = []
    before, start = _stolen_s(), time.perf_counter()
    yield stolen
    stolen.append((_stolen_s() - before) / (time.perf_counter() - start) / (os.cpu_count() or 1))


def _stolen_s() -> float:
    path = Path("/proc/stat")
    return int(path.read_text().split("\n")[0].split()[8]) / os.sysconf("SC_CLK_TCK") if path.exists() else 0.0


def table(document: dict[str, Any]) -> str:
    runs = [Run(**run) for run in document["runs"]]
    medians = {
        name: statistics.median(run.seconds for run in runs if run.engine == name)
        for name in dict.fromkeys(run.engine for run in runs)
    }
    lines = [
        "| engine | seconds (median) | runs | GFLOP/s before each | own / it | floor, s | share |",
        f"|{'---|' * 7}",
    ]
    for name, median in medians.items():
        own_runs = [run for run in runs if run.engine == name]
        ratio = f"{medians['own'] / median:.2f}" if "own" in medians else "-"
        floor = document["floors"].get(ENGINES[name].precision)
        least = "- | -" if floor is None else f"{floor['seconds']:.1f} | {floor['seconds'] / median:.0%}"
        seconds, states = (
            " ".join(f"{value:.1f}" for value in values)
            for values in zip(*[(run.seconds, run.gflops) for run in own_runs], strict=True)
        )
        lines.append(f"| {name} | {median:.1f} | {seconds} | {states} | {ratio} | {least} |")
    lines += [f"{name} does not run: {reason}" for name, reason in document["failed"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
