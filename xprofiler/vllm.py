"""Step times of vLLM, measured through its offline interface.

vLLM is seen from outside: what can be measured are whole steps, from the scheduling of one to that of the next, as
they follow each other in its engine core. They are taken apart thus:

    one prompt of n tokens, decode of n requests over little context   -> head(n), as what the latter takes more
    b prompts of 32 tokens, whose attention is nothing                 -> tokens(32 b) + head(b)
    longer prompts, longer contexts                                    -> attention, as what they take more

so `head` counts each request after the first of a step, with all the loop's work for it, and `overhead` is nothing.
Times are means over passes, as in `measure`: what a run pays on average.
Decodes over long contexts take K/V that was never computed, from vLLM's connector made for that.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xgpt.errors import InputError, MachineError
from xgpt.io import read_step_log
from xgpt.schema import ClusterSpec, Curve, DType, LayerTimes, ModelSpec, Profile, Surface
from xgpt.schema.step_log import StepRecord
from xprofiler.passes import in_passes
from xrunner.vllm.command import block_size_of, computing_cores, variables
from xrunner.vllm.offline import DONE
from xrunner.vllm.process import last_error, package_path, preload, python, started, version_of

SHORT = 32
"""Tokens of a prompt, or of a context, whose attention is counted as nothing."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (SHORT, 128, 512, 1024, 2048)
PROMPTS = (SHORT, 128, 256, 512, 1024, 2048)
ENCODE_BATCHES = (1, 4)
HEAD_BATCHES = (8, 32, 128)
"""Requests for which the head is told from the tokens."""
MAX_STEP_TOKENS = 2048
MAX_CACHED_TOKENS = 8192
NUM_DECODES = 4
"""Decode iterations of a point in a pass."""

Progress = Callable[[int, int, str], None]


class Point(NamedTuple):
    """A step to measure: so many requests, each of `length` tokens in the prompt or, decoding, in the context."""

    kind: str
    batch: int
    length: int

    @property
    def group(self) -> list[tuple[int, int, bool]]:
        """As `xrunner.vllm.offline` takes it: [prompt tokens, output tokens, K/V at hand]."""
        if self.kind == "decode":
            return [(self.length - NUM_DECODES, NUM_DECODES + 1, True)] * self.batch
        return [(self.length, 2, False)] * self.batch

    @property
    def prompt_tokens(self) -> int:
        """Of its prompts together."""
        return 0 if self.kind == "decode" else self.batch * self.length


def points(max_context: int) -> list[Point]:
    """What is measured in each pass."""
    contexts = [n for n in CONTEXTS if n <= max_context]
    prompts = [n for n in PROMPTS if n < max_context]
    decode = [Point("decode", b, n) for b in BATCHES for n in contexts if b * n <= MAX_CACHED_TOKENS]
    sizes = {(b, n) for b in ENCODE_BATCHES for n in prompts if b * n <= MAX_STEP_TOKENS}
    sizes |= {(b, SHORT) for b in BATCHES if b * SHORT <= MAX_STEP_TOKENS}
    sizes |= {(1, n) for n in HEAD_BATCHES}
    return decode + [Point("encode", b, n) for b, n in sorted(sizes)]


def profile(
    spec: ModelSpec,
    cluster: ClusterSpec,
    dtype: DType,
    *,
    checkpoint: Path | None,
    progress: Progress | None = None,
) -> Profile:
    """Measure vLLM with this model on one device of this machine.

    Raises:
        InputError: there is no checkpoint, or the model has an encoder.
        MachineError: there is no vLLM here, or it does not run.
    """
    if checkpoint is None:
        raise InputError("model", spec.name, "vLLM takes a model from a directory in Hugging Face layout")
    if spec.is_encoder_decoder:
        raise InputError("model", spec.name, "vLLM's plans are for decoder-only models")
    jobs = in_passes(points(spec.max_context), lambda point: point.prompt_tokens)
    log, vllm_version = _run(spec, cluster, dtype, checkpoint, [job.group for job in jobs], progress)
    times = _times(log, jobs)
    return fit(spec, cluster, dtype, times, {"vllm": vllm_version})


def _run(
    spec: ModelSpec,
    cluster: ClusterSpec,
    dtype: DType,
    checkpoint: Path,
    groups: list[list[tuple[int, int, bool]]],
    progress: Progress | None,
) -> tuple[list[StepRecord], str]:
    """The log of vLLM's steps for these groups, and vLLM's version."""
    vllm_python = python()
    block_size = block_size_of(cluster)
    num_blocks = 2 + max(sum(-(-(n + out) // block_size) for n, out, _ in group) for group in groups)
    with tempfile.TemporaryDirectory() as directory, package_path() as packages:
        vllm_version = version_of(vllm_python, packages)
        log, job = Path(directory) / "steps.jsonl", Path(directory) / "job.json"
        engine = {
            "model": str(checkpoint),
            "dtype": dtype,
            "skip_tokenizer_init": True,
            "enforce_eager": cluster.device.type == "cpu",
            "enable_prefix_caching": False,
            "async_scheduling": False,
            "max_model_len": spec.max_context,
            "max_num_seqs": max(BATCHES),
            "max_num_batched_tokens": MAX_STEP_TOKENS,
            "block_size": block_size,
            "num_gpu_blocks_override": num_blocks,
            "kv_cache_memory_bytes": num_blocks * block_size * spec.kv_bytes_per_token(dtype),
            "scheduler_cls": "xrunner.vllm.logged.LoggedScheduler",
            "additional_config": {"xgpt": {"step_log": str(log)}},
            "kv_transfer_config": {
                "kv_connector": "DecodeBenchConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"startup_fill": True},
            },
        }
        job.write_text(json.dumps({"engine": engine, "groups": groups}), encoding="utf-8")
        needed = variables(cluster, [0]) | preload(vllm_python)
        lines, num_done = [], 0
        with started([vllm_python, "-m", "xrunner.vllm.offline", str(job)], packages, needed) as process:
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    lines.append(line)
                    if line.strip() == DONE:
                        num_done += 1
                        if progress is not None:
                            progress(num_done, len(groups), "profiling vLLM")
        if num_done < len(groups):
            raise MachineError(f"vLLM ended before its profile was complete: {last_error(lines)}")
        return read_step_log(log), vllm_version


def _times(log: list[StepRecord], jobs: Sequence[Point]) -> dict[Point, list[float]]:
    """Seconds of every measured step of each point but in the first pass; the log holds `jobs` in this order."""
    job_of = [index for index, job in enumerate(jobs) for _ in range(job.batch)]
    first_pass = len(set(jobs))
    times: dict[Point, list[float]] = {job: [] for job in jobs}
    for record, following in pairwise(log):
        index, next_index = (job_of[next(iter(_requests(step)))] for step in (record, following))
        job = jobs[index]
        # The last step of a group is followed by waiting for the next, and so tells nothing.
        if index == next_index >= first_pass and bool(record.decode) == (job.kind == "decode"):
            times[job].append((following.start_ns - record.start_ns) / 1e9)
    return times


def _requests(step: StepRecord) -> Iterator[int]:
    yield from (id_ for id_, _, _ in step.encode)
    yield from step.decode


def fit(
    spec: ModelSpec, cluster: ClusterSpec, dtype: DType, times: dict[Point, list[float]], versions: dict[str, str]
) -> Profile:
    """The tables of a profile from the seconds of whole steps.

    Raises:
        MachineError: a point was not measured.
    """
    missing = [point for point, seconds in times.items() if not seconds]
    if missing:
        raise MachineError(f"vLLM's log holds no step of {missing[0].batch} x {missing[0].length} {missing[0].kind}")
    step = {point: statistics.mean(seconds) for point, seconds in times.items()}

    head = _Line({1: 0.0} | {n: _more(step[_decode(n)], step[Point("encode", 1, n)]) for n in HEAD_BATCHES})
    tokens = {n: _more(step[_decode(n)], head(n)) for n in BATCHES if n < SHORT}
    tokens |= {b * SHORT: _more(step[p], head(b)) for p in step for _, b, n in [p] if p.kind == "encode" and n == SHORT}
    rest = _Line(tokens)

    def surface(kind: str, batches: tuple[int, ...], lengths: tuple[int, ...]) -> Surface:
        """Attention of a layer; where it is too much to measure, it grows with the batch."""
        lengths = tuple(n for n in lengths if Point(kind, 1, n) in step)
        rows: list[list[float]] = []
        for i, batch in enumerate(batches):
            row = []
            for j, length in enumerate(lengths):
                point = Point(kind, batch, length)
                if point in step:
                    size = batch if kind == "decode" else batch * length
                    row.append(_more(step[point], rest(size) + head(batch)) / spec.num_layers)
                else:
                    row.append(rows[-1][j] * batch / batches[i - 1])
            rows.append(row)
        return Surface(batches=batches, lengths=lengths, seconds=tuple(map(tuple, rows)))

    layer = LayerTimes(
        rest=rest.scaled(1 / spec.num_layers),
        encode_attention=surface("encode", ENCODE_BATCHES, PROMPTS),
        decode_attention=surface("decode", BATCHES, CONTEXTS),
    )
    spread = [value / step[point] for point, seconds in times.items() for value in seconds]
    return Profile(
        source="measured",
        model=spec.name,
        dtype=dtype,
        device=cluster.device.name,
        num_threads=computing_cores(cluster) if cluster.device.type == "cpu" else None,
        layers=(layer,),
        embedding=Curve(points=(1, MAX_STEP_TOKENS), seconds=(0.0, 0.0)),
        head=head.curve,
        overhead=Curve(points=(1, max(BATCHES)), seconds=(0.0, 0.0)),
        spread=max(0.0, float(np.quantile(spread, 0.9)) - 1),
        provenance={"engine": "vllm", "embedding": "in rest", "overhead": "in rest and head"},
        environment=versions,
    )


class _Line:
    """Linear between points."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self._points = sorted(seconds)
        self._seconds = [seconds[n] for n in self._points]

    def __call__(self, n: int) -> float:
        return float(np.interp(n, self._points, self._seconds))

    @property
    def curve(self) -> Curve:
        return self.scaled(1.0)

    def scaled(self, factor: float) -> Curve:
        return Curve(points=tuple(self._points), seconds=tuple(factor * value for value in self._seconds))


def _decode(batch: int) -> Point:
    return Point("decode", batch, SHORT)


def _more(seconds: float, than: float) -> float:
    return max(seconds - than, 0.0)
