"""Serve plans of a small model on several devices of this machine. Their placements are fixed here, not planned."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from xgpt.core.io import dump_json
from xgpt.core.machine import detect
from xgpt.core.processes import end_with_parent
from xgpt.core.schema import (
    Constraint,
    Estimate,
    Histogram,
    ModelSpec,
    OrcaSettings,
    Plan,
    PolicySettings,
    ProfileRef,
    SearchCertificate,
    Stage,
    WaaSettings,
    Workload,
)

SPEC = ModelSpec(
    name="small",
    family="opt",
    num_layers=4,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    ffn_size=1024,
    vocab_size=2048,
    max_context=512,
    tie_embeddings=False,  # a tied head would repeat the last token for ever
)
BLOCKS = 512
TCP_LISTEN = "0A"
"""State of a socket in /proc/net/tcp."""


def one_lane(degrees: Sequence[int], layers: int = SPEC.num_layers) -> tuple[Stage, ...]:
    return _lane("both", degrees, layers, 0)


def two_lanes(encode: Sequence[int], decode: Sequence[int], layers: int = SPEC.num_layers) -> tuple[Stage, ...]:
    return _lane("encode", encode, layers, 0) + _lane("decode", decode, layers, sum(encode))


def _lane(lane: str, degrees: Sequence[int], layers: int, first: int) -> tuple[Stage, ...]:
    stages, count = [], len(degrees)
    for i, degree in enumerate(degrees):
        stages.append(
            Stage.model_validate(
                {
                    "lane": lane,
                    "devices": tuple(range(first, first + degree)),
                    "decode_layers": (layers * i // count, layers * (i + 1) // count),
                    "tp": degree,
                    "kv_blocks": BLOCKS,
                }
            )
        )
        first += degree
    return tuple(stages)


def plan(stages: tuple[Stage, ...], *, replicas: int = 1, max_batch: int = 16, model: ModelSpec = SPEC) -> Plan:
    """Return a plan that can be served, without meaningful predictions."""
    length = Histogram(lengths=(32,), probabilities=(1.0,))
    lanes = [stage for stage in stages if stage.lane != "encode"]
    policy: PolicySettings = OrcaSettings(max_batch=max_batch, microbatches=len(stages))
    if len(lanes) < len(stages):
        policy = WaaSettings(encode_batch=4, max_decode_batch=max_batch, decode_microbatches=len(lanes))
    estimate = {name: 0.0 for name, field_ in Estimate.model_fields.items() if field_.is_required()}
    needed = {"memory_bytes": (0,), "encode_tokens": 128.0, "decode_batch": 8.0}
    return Plan(
        model=model,
        dtype="float32",
        cluster=detect(1).model_copy(update={"devices_per_node": replicas * sum(stage.tp for stage in stages)}),
        workload=Workload(name="none", input=length, output=length),
        constraint=Constraint(),
        policy=policy,
        replicas=replicas,
        stages=stages,
        estimate=Estimate.model_validate(estimate | needed),
        search=SearchCertificate(method="exhaustive", evaluations=0, space_size=0, seconds=0.0, gap=None, bound="none"),
        profile=ProfileRef(source="measured", sha256="0" * 64, num_threads=1),
    )


PLANS = {
    "TP 2": lambda: plan(one_lane([2])),
    "PP 2": lambda: plan(one_lane([1, 1])),
    "WAA 1+1": lambda: plan(two_lanes([1], [1])),
}
"""The plans with which two devices run the model."""


def parser(description: str, num_requests: int) -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--requests", type=int, default=num_requests)
    arguments.add_argument("--plan", choices=PLANS, help="only this one")
    arguments.add_argument("--json", type=Path)
    return arguments


def report(measure: Callable[[str, Plan], Any], only: str | None, path: Path | None) -> None:
    """Measure each plan, or only one. Print each row (a dataclass) when it is measured, and write all rows so far."""
    rows = []
    for name in [only] if only else PLANS:
        rows.append(measure(name, PLANS[name]()))
        print(rows[-1], flush=True)
        if path:
            path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


@dataclass
class Served:
    """A running `xgpt serve`.

    Attributes:
        lines: its lines on standard error.
        pids: process ids of the workers that were started last, in the order of their numbers.
    """

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)

    @property
    def pids(self) -> list[int]:
        return self.starts[-1]

    @property
    def starts(self) -> list[list[int]]:
        """The workers' process ids, once for each time when all workers were ready."""
        found = []
        for line in list(self.lines):
            if '"workers are ready"' in line:
                found.append(list(json.loads(line)["pids"].values()))
        return found

    @property
    def engine(self) -> int | None:
        for entry in _session(self.process.pid):
            with contextlib.suppress(OSError):
                if b"xgpt.serving.engine_process" in (entry / "cmdline").read_bytes():
                    return int(entry.name)
        return None

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if "listening on " in line:
                self.url = line.rpartition("listening on ")[2].strip()
                self.ready.set()
        self.ready.set()


@contextmanager
def served(what: Plan, directory: Path, *options: str) -> Iterator[Served]:
    """Serve a plan as users do, until SIGTERM at the end of the block."""
    path = directory / "plan.json"
    path.write_text(dump_json(what))
    with started("serve", str(path), "--port", "0", "--no-replan", *options) as running:
        yield running


@contextmanager
def started(*words: str) -> Iterator[Served]:
    """Run an `xgpt serve` of these words until SIGTERM at the end of the block."""
    command = [sys.executable, "-m", "xgpt", *words]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=end_with_parent,  # it has its own session, so it would outlive this process
    )
    running = Served(process)
    reader = threading.Thread(target=running._read, daemon=True)
    reader.start()
    try:
        if not running.ready.wait(180) or not running.url:
            raise RuntimeError("the server did not start: " + " / ".join(running.lines[-3:]))
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
            reader.join()
            assert process.stderr is not None
            process.stderr.close()


def listening(session: int) -> dict[str, tuple[str, int]]:
    ports = set()
    for process in _session(session):
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    ports.add(os.readlink(descriptor).removeprefix("socket:[").rstrip("]"))
    return {inode: where for inode, where in _listening_here().items() if inode in ports}


def left_over(session: int, sockets: Collection[str]) -> list[str]:
    processes = [f"process {process.name}" for process in _session(session)]
    return processes + [f"socket {inode}" for inode in _listening_here().keys() & set(sockets)]


def _session(session: int) -> list[Path]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                    found.append(entry)
    return found


def _listening_here() -> dict[str, tuple[str, int]]:
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()]
    return {fields[9]: _address(fields[1]) for fields in lines if len(fields) > 9 and fields[3] == TCP_LISTEN}


def _address(written: str) -> tuple[str, int]:
    """Return address and port from the format of /proc/net: hexadecimal words in the machine's byte order."""
    words, _, port = written.partition(":")
    packed = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed), int(port, 16)
