"""Every block of README and docs: commands run in an empty directory, data is read by xgpt's own readers.

`NOT_RUN` lists the commands that are not run here, with the reason. The blocks of `docs/examples.md` and
`docs/reference/python.md` are generated from code that `tests/unit/test_api.py` runs; `docs/guide/walk.md` is
`test_walk.py`'s.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.test_calibrate import vllm
from tests.documented import PAGES, ROOT, Block, anchors, blocks, links
from tests.fakes import eventually
from xgpt.resolve import load_classes, load_workload
from xrunner.server.access.keys import ApiKeys
from xscheduler.fleet.day_load import read_day

ELSEWHERE = {"docs/examples.md", "docs/reference/python.md", "docs/guide/walk.md", "docs/gallery/index.md"}
BLOCKS = [block for page in PAGES if page not in ELSEWHERE for block in blocks(page)]

NOT_RUN = {
    r"make (demo|test|lint)": "minutes: the demo, and the tests themselves",
    r"pip |docker |kubectl |xgpt export fleet.json .* && kubectl": "needs a package index, images or a cluster",
    r"export RAY_|ray start|xgpt serve plan.json --ray": "needs Ray: tests/numerics/test_on_ray.py",
    r"xgpt serve .*--nnodes": "needs two machines: tests/unit/xgpt/test_several_machines.py",
    r"export XGPT_VLLM_PYTHON|xgpt \w+ .*(--engine vllm -o|vllm\.json)": "needs vLLM: tests/vllm",
    r".*--import-from aiconfigurator": "needs the tables: tests/unit/xprofiler/test_imported.py",
    r"xgpt (check|tune|watch) ": "needs a running engine: tests/unit/xgpt/test_tuning.py and test_watching.py",
    r"xgpt ui$": "runs until it is stopped: tests/unit/xgpt/exploring",
    r"eval |xgpt completion fish >": "changes the shell: tests/cli/test_help.py",
    r"(ANTHROPIC|OPENAI)_BASE_URL=": "variables of others' clients: tests/clients",
    r"xgpt \w+ \[OPTIONS\]": "the form of a command",
}
"""Commands that are not run, by the pattern at their beginning, and why."""

NO_CODE = {
    "docs/architecture.md": "drawings of the data's way",
    "docs/results/memory.md": "a formula",
    "X-Class: interactive\n": "a header: tests/load/test_fuzz.py",
}
"""Blocks that are neither commands nor data, by page or by text."""

GPU_PLAN = (
    "xgpt plan --model meta-llama/Llama-3.1-8B --config config.json --cluster h200x1 --workload azure-conv "
    "--latency-bound 8 --engine vllm"
)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SAMPLES = {
    "profile.json": "xgpt profile --model opt-125m -o profile.json",
    "fleet.json": "xgpt fleet --trace day.csv --latency-bound 15 --ttft 2 --model llama-3.1-8b --cluster h100x8",
    "current.json": f"{GPU_PLAN.replace('h200x1', 'h100x1')} --policy chunked --objective saturated -o current.json",
}
"""Commands that make the files which a block reads without having made them."""


def _reason(command: str) -> str | None:
    return next((reason for pattern, reason in NOT_RUN.items() if re.match(pattern, command)), None)


def _is_data(block: Block) -> bool:
    return (
        block.language == "text"
        or _reader(block) is not None
        or any(key in (block.page, block.text) for key in NO_CODE)
    )


def _reader(block: Block) -> Callable[[Path], object] | None:
    """Return what reads a block of data."""
    if block.text.startswith("name: weekday"):
        return read_day
    if "\nsessions:\n" in block.text:
        return lambda path: load_workload(str(path)).sessions
    if "\nclasses:\n" in block.text:
        return lambda path: (load_workload(str(path)), load_classes(str(path)))
    if block.text.startswith("# name"):
        return ApiKeys.read
    return None


def _workload(path: Path, times_s: float) -> None:
    """Write a trace of 1,500 short requests over so many seconds."""
    draw = random.Random(0)
    times = sorted(draw.uniform(0, times_s) for _ in range(1500))
    rows = [f"{draw.randint(8, 60)},{draw.randint(4, 16)},{now_s:.3f}" for now_s in times]
    path.write_text("\n".join(["input,output,timestamp_s", *rows]) + "\n")


@dataclass
class Directory:
    """An empty directory in which commands run, with a cache that all of them share."""

    path: Path
    environment: dict[str, str]
    port: str

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        for name in re.findall(r"[\w-]+\.(?:json|csv|yaml)\b", command):
            if not re.search(rf"-o {name}|--engine-output {name}|--timeline {name}", command):
                self.provide(name, command)
        words = ["bash", "-ec", self.written(command)]
        return subprocess.run(words, cwd=self.path, env=self.environment, capture_output=True, text=True, check=False)

    def written(self, command: str) -> str:
        """Return a command as it runs here: on a free port, with few requests."""
        command = re.sub(r"(127\.0\.0\.1|localhost):8000", f"127.0.0.1:{self.port}", command)
        command = command.replace("--port 8000", "")
        command = re.sub(r"^(xgpt serve \S+)(?!.*--dry-run)", rf"\1 --port {self.port}", command)
        command = command.replace("'vllm serve ...'", "'vllm serve llama'")
        command = re.sub(r"--requests \d+(?!.*--timeline)", "", command)
        return re.sub(r"(xgpt bench \S+)", r"\1 --requests 20", command)

    def provide(self, name: str, command: str) -> None:
        """Make a file that a command reads, unless an earlier command has made it."""
        path = self.path / name
        if path.exists():
            return
        if name == "plan.json":
            local = re.match(r"xgpt (serve|bench)", command) or "http" in command or "--rule" in command
            made = self.run("xgpt plan --latency-bound 9.8" if local else GPU_PLAN)
            assert made.returncode == 0, made.stderr
        elif name in SAMPLES:
            made = self.run(SAMPLES[name])
            assert made.returncode == 0, made.stderr
        elif name.endswith(".csv"):
            _workload(path, 7200.0)
        elif name == "day.yaml":
            path.write_text(next(block.text for block in BLOCKS if block.text.startswith("name: weekday")))
            _workload(self.path / "day-code.csv", 7200.0)
        elif "calibrate" in command:
            clients = 4 * (1 + len(list(self.path.glob("*.json"))))
            path.write_text(json.dumps(vllm(clients, clients / 4.0, 0.1, 0.02)))

    @contextlib.contextmanager
    def started(self, command: str, line: str) -> Iterator[None]:
        """Run a command that ends only by a signal, from its line on standard error that says it runs."""
        self.provide(command.split()[2], command)
        errors = self.path / "stderr"
        with errors.open("w") as file:
            process = subprocess.Popen(
                ["bash", "-ec", f"exec {self.written(command)}"], cwd=self.path, env=self.environment, stderr=file
            )
        try:
            assert eventually(lambda: line in errors.read_text(), 120), errors.read_text()
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, errors.read_text()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def directory(tmp_path: Path, cache: Path) -> Directory:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    environment = os.environ | {
        "PATH": path,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}",
        "XDG_CACHE_HOME": str(cache),
    }
    return Directory(tmp_path, environment, port)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        if not link.startswith("https://"):
            target = (ROOT / page).parent / path if path else ROOT / page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_lists_name_only_what_is_there() -> None:
    commands = [command for block in BLOCKS if not _is_data(block) for command in block.commands]
    assert not [pattern for pattern in NOT_RUN if not any(re.match(pattern, command) for command in commands)]
    assert not [key for key in NO_CODE if not any(key in (block.page, block.text) for block in BLOCKS)]


@pytest.mark.parametrize("block", [block for block in BLOCKS if _reader(block)], ids=str)
def test_data_is_read(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _workload(tmp_path / "day-code.csv", 7200.0)
    path = tmp_path / "data.yaml"
    path.write_text(block.text)
    read = _reader(block)
    assert read is not None and read(path)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "block",
    [block for block in BLOCKS if not _is_data(block) and not all(_reason(each) for each in block.commands)],
    ids=str,
)
def test_commands_run(block: Block, directory: Directory) -> None:
    """Each exits with 0, and writes no traceback."""
    (directory.path / "config.json").write_text(json.dumps(LLAMA))
    (directory.path / "keys").write_text("alice sk-6f1d0c7a91b24e\n")
    (directory.path / "keys").chmod(0o600)
    commands = [command for command in block.commands if not _reason(command)]
    with contextlib.ExitStack() as running:
        if any(re.search(r"bench http|--scrape|--lengths http", each) for each in commands):
            running.enter_context(directory.started("xgpt serve plan.json", "listening on"))
            body = json.dumps({"model": "opt-125m", "prompt": [2, 100], "max_tokens": 4, "n": 8})
            assert directory.run(f"curl -sf 127.0.0.1:8000/v1/completions -d '{body}'").returncode == 0
        for command in commands:
            if re.match(r"xgpt serve (?!.*--dry-run)", command):
                running.enter_context(directory.started(command, "listening on"))
            elif "--scrape" in command:
                with directory.started(command, "http"):
                    pass
            else:
                ran = directory.run(command)
                assert ran.returncode == 0 and "Traceback" not in ran.stderr, (command, ran.stdout, ran.stderr)


@pytest.mark.long
@pytest.mark.parametrize(
    "command", sorted({each for block in BLOCKS for each in block.commands if each.startswith("python -m benchmarks.")})
)
def test_benchmarks_accept_the_options(command: str) -> None:
    words = command.split()
    ran = subprocess.run([sys.executable, *words[1:3], "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    options = [word.strip("[]") for word in words[3:] if word.strip("[]-").islower()]
    assert not [option for option in options if option not in ran.stdout]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_gallery_says_what_its_commands_find() -> None:
    from tools import make_gallery

    page = (ROOT / "docs/gallery/index.md").read_text(encoding="utf-8")
    words = " ".join(page.split())
    with ThreadPoolExecutor(2) as pool:
        for entry in make_gallery.ENTRIES:
            plans = dict(zip(entry.commands, pool.map(make_gallery.run, entry.commands.values()), strict=True))
            found = {label: plan for label, plan in plans.items() if plan is not None}
            assert " ".join(entry.says(found).split()) in words
            assert all(f"\n    {command}\n" in page for command in entry.commands.values())


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_readme_says_what_its_comparison_finds(directory: Directory) -> None:
    block = next(block for block in BLOCKS if block.page == "README.md" and "xgpt compare" in block.text)
    shown = next(block for block in BLOCKS if block.page == "README.md" and block.language == "text")
    ran = directory.run(block.commands[0])
    assert ran.returncode == 0, ran.stderr
    assert shown.text in ran.stdout
