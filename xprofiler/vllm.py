"""Measure step times of vLLM through its offline interface.

Only whole steps of vLLM can be timed, from the moment when its engine core schedules one step to the moment when it
schedules the next. They are separated into parts as follows:

    one prompt of n tokens, decode of n requests over little context   -> head(n): how much longer the decode takes
    b prompts of 32 tokens, whose attention takes no time              -> tokens(32 b) + head(b)
    decodes over longer contexts                                       -> decode attention: how much longer they take
    a prompt in chunks                                                 -> attention of prompts: how much longer later
                                                                          chunks take

So `head` contains the time of all but the first of a step's requests, including that of vLLM's own loop. A served vLLM
also runs xgpt's scheduler, whose time is added (`with_scheduler`). Times are means over passes, as in `measure`. The
time per token should never rise with the number of tokens, so sizes that violate this are averaged. Steps that both
decode and encode a prompt chunk are also measured: `provenance` states by how much their time differs from that of
separate steps. For decodes over long contexts, a vLLM connector pretends that K/V exist.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InputError, MachineError
from xgpt.core.io import read_step_log
from xgpt.core.schema import ClusterSpec, Curve, DType, LayerTimes, ModelSpec, Profile, Surface
from xgpt.core.schema.step_log import StepRecord
from xprofiler.measurement_order import in_passes
from xrunner.vllm.command import block_size_of, computing_cores, variables
from xrunner.vllm.offline import DONE
from xrunner.vllm.process import last_error, package_path, preload, python, started, version_of

SHORT = 32
"""Number of tokens of a short prompt or context. Its attention is assumed to take no time."""
CONTEXTS = (SHORT, 128, 512, 1024, 2048)
HEAD_BATCHES = (8, 32, 128)
NUM_DECODES = 4
KV_SHARE = 0.25
"""Largest share of a GPU's memory that the K/V of a decode batch may take."""
REQUEST_S, BEGIN_S = 20e-6, 1.3e-3
"""Additional seconds of a served vLLM with xgpt's scheduler, compared with vLLM's offline interface: for each request
of a step, and for each prompt that begins in it (docs/results/gpu.md).
"""
NUM_PIECES, NUM_MIXED = 15, 6
BESIDE, BESIDE_CONTEXT = 8, 512
"""Number of requests that decode in the same steps as a prompt's chunks, and their context."""

Progress = Callable[[int, int, str], None]


class StepSizes(NamedTuple):
    """The sizes of the steps to measure.

    Attributes:
        piece: number of tokens in a prompt chunk, enough to keep the device busy.
        captured_tokens: largest number of tokens of a step that vLLM runs as a CUDA graph, or 0 without graphs. A
            slightly larger step takes much longer, so it is measured, too.
    """

    batches: tuple[int, ...]
    cached_tokens: int
    step_tokens: int
    piece: int
    captured_tokens: int = 0

    @classmethod
    def of(cls, spec: ModelSpec, cluster: ClusterSpec, dtype: DType) -> StepSizes:
        device = cluster.device
        if device.type == "cpu":
            return CPU_SIZES
        room = int(KV_SHARE * device.memory_bytes / spec.kv_bytes_per_token(dtype))
        return GPU_SIZES._replace(cached_tokens=max(CPU_SIZES.cached_tokens, min(GPU_SIZES.cached_tokens, room)))


CPU_SIZES = StepSizes((1, 2, 4, 8, 16, 32, 64, 128), 8192, 2048, 128)
GPU_SIZES = StepSizes((1, 2, 4, 8, 16, 32, 64, 128, 256, 512), 65536, 8192, 1024, 512)


class Probe(NamedTuple):
    """A step to measure. It has `batch` requests, each with a prompt (kind "encode") or a context ("decode") of
    `length` tokens.

    The kind "pieces" means several steps: a prompt of `length` tokens in chunks of `piece` tokens, with `batch`
    requests that decode in the same steps.
    """

    kind: str
    batch: int
    length: int
    piece: int = 0

    @property
    def group(self) -> tuple[int | None, list[tuple[int, int, bool]]]:
        """The input of `xrunner.vllm.offline` for this step: the limit of tokens per step (None for no limit), and each
        request as (prompt tokens, output tokens, whether K/V exist).
        """
        if self.kind == "decode":
            return None, [(self.length - NUM_DECODES - 1, NUM_DECODES + 1, True)] * self.batch
        if self.kind == "encode":
            return None, [(self.length, 2, False)] * self.batch
        steps = self.length // self.piece
        beside = [(BESIDE_CONTEXT - steps // 2, steps + 2, True)] * self.batch
        return self.piece + self.batch, [*beside, (self.length, 2, False)]

    @property
    def num_requests(self) -> int:
        return self.batch + (self.kind == "pieces")

    @property
    def step_tokens(self) -> int:
        return self.batch * self.length if self.kind == "encode" else 0

    def holds(self, step: StepRecord) -> bool:
        """Return whether this step of vLLM's log is one to time. Other steps only prepare those."""
        if self.kind == "pieces":
            return len(step.encode) == 1 and len(step.decode) == self.batch
        return bool(step.decode) == (self.kind == "decode")


def points(max_context: int, to_measure: StepSizes) -> list[Probe]:
    """Return the steps to measure in each pass. Chunks are smaller than `piece` if the context cannot contain two."""
    batches, cached_tokens, step_tokens, piece, captured_tokens = to_measure
    piece = min(piece, (max_context - 2) // 2)
    contexts = [n for n in CONTEXTS if n <= max_context]
    decode = [Probe("decode", b, n) for b in batches for n in contexts if b * n <= cached_tokens]
    sizes = {(b, SHORT) for b in batches if b * SHORT <= step_tokens}
    sizes |= {(1, n) for n in HEAD_BATCHES}
    sizes |= {(captured_tokens // SHORT + 1, SHORT)} if captured_tokens else set()
    num_pieces = min(NUM_PIECES, (max_context - 2) // piece)
    pieces = [Probe("pieces", 0, num_pieces * piece, piece)]
    if max_context > BESIDE_CONTEXT + NUM_PIECES:
        pieces.append(Probe("pieces", BESIDE, min(num_pieces, NUM_MIXED) * piece, piece))
    return decode + [Probe("encode", b, n) for b, n in sorted(sizes)] + pieces


def profile(
    spec: ModelSpec, cluster: ClusterSpec, dtype: DType, *, checkpoint: Path | None, progress: Progress | None = None
) -> Profile:
    if checkpoint is None:
        raise InputError("model", spec.name, "vLLM needs a model directory in Hugging Face layout: give one as `model`")
    if spec.is_encoder_decoder:
        raise InputError("model", spec.name, "xgpt plans for vLLM only with decoder-only models: use `engine=xgpt`")
    sizes = StepSizes.of(spec, cluster, dtype)
    jobs = in_passes(points(spec.max_context, sizes), lambda point: point.step_tokens)
    log, vllm_version, threads = _run(spec, cluster, dtype, checkpoint, sizes, [job.group for job in jobs], progress)
    fitted = fit(spec, cluster, dtype, sizes, _times(log, jobs), vllm_version)
    return with_scheduler(fitted if threads is None else fitted.but(num_threads=threads))


def threads_in(lines: Sequence[str]) -> int | None:
    """Return the number of threads that compute for the first device, as vLLM's output states it, or None if it does
    not. The user's environment may set another number than xgpt does.
    """
    found = next((match for line in lines if (match := re.search(r"local_rank=0, core ids=\[([\d, ]+)\]", line))), None)
    return None if found is None else len(found[1].split(","))


def with_scheduler(profile: Profile) -> Profile:
    """Add the time of xgpt's scheduler and its channel in a served vLLM to vLLM's profile.

    The offline interface does not include this time. Its part per prompt is in `encode_attention`, where each prompt
    counts once.
    """
    (layer,), most = profile.layers, profile.overhead.points[-1]
    attention, begin_s = layer.encode_attention, BEGIN_S / profile.model.num_layers
    rows = tuple(tuple(begin_s + value for value in row) for row in attention.seconds)
    return profile.but(
        layers=(layer.but(encode_attention=attention.but(seconds=rows)),),
        overhead=Curve(points=(1, most), seconds=(REQUEST_S, most * REQUEST_S)),
        provenance=profile.provenance | {"overhead": "of xgpt's scheduler; vLLM's own is in rest and head"},
    )


def _run(
    spec: ModelSpec,
    cluster: ClusterSpec,
    dtype: DType,
    checkpoint: Path,
    sizes: StepSizes,
    groups: list[tuple[int | None, list[tuple[int, int, bool]]]],
    progress: Progress | None,
) -> tuple[list[StepRecord], str, int | None]:
    vllm_python = python()
    block_size = block_size_of(cluster)
    num_blocks = 2 + max(sum(-(-(n + out) // block_size) for n, out, _ in group) for _, group in groups)
    longest = max(n + out for _, group in groups for n, out, _ in group)
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
            "max_model_len": longest,  # vLLM refuses a context that its K/V memory cannot hold
            "max_num_seqs": sizes.batches[-1],
            "max_num_batched_tokens": sizes.step_tokens,
            "block_size": block_size,
            "num_gpu_blocks_override": num_blocks,
            "kv_cache_memory_bytes": num_blocks * block_size * spec.kv_bytes_per_token(dtype),
            "scheduler_cls": "xrunner.vllm.logged.PiecesScheduler",
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
        return read_step_log(log), vllm_version, threads_in(lines)


def _times(log: list[StepRecord], jobs: Sequence[Probe]) -> dict[Probe, list[float]]:
    job_of = [index for index, job in enumerate(jobs) for _ in range(job.num_requests)]
    first_pass = len(set(jobs))
    times: dict[Probe, list[float]] = {job: [] for job in jobs}
    for record, following in pairwise(log):
        index, next_index = (job_of[_requests(step)[0]] for step in (record, following))
        job = jobs[index]
        # The last step of a group is followed by a wait for the next group, so its time is unknown.
        if index == next_index >= first_pass and job.holds(record):
            times[job].append((following.start_ns - record.start_ns) / 1e9)
    return times


def _requests(step: StepRecord) -> list[int]:
    return [*(id_ for id_, _, _ in step.encode), *step.decode]


def fit(
    spec: ModelSpec,
    cluster: ClusterSpec,
    dtype: DType,
    sizes: StepSizes,
    times: dict[Probe, list[float]],
    vllm_version: str,
) -> Profile:
    """Compute a profile, with the times of a step's parts, from the seconds of whole steps."""
    if (missing := next((point for point, seconds in times.items() if not seconds), None)) is not None:
        sought = f"{missing.kind} step of {missing.batch} requests with {missing.length} tokens"
        raise MachineError(f"vLLM's log has no {sought}; profile again")
    step = {point: statistics.mean(seconds) for point, seconds in times.items() if point.kind != "pieces"}

    head = _Line({1: 0.0} | {n: _more(step[_decode(n)], step[Probe("encode", 1, n)]) for n in HEAD_BATCHES})
    tokens = {n: _more(step[_decode(n)], head(n)) for n in sizes.batches if n < SHORT}
    prompts = [point for point in step if point.kind == "encode" and point.length == SHORT]
    larger = {p.batch * SHORT: (_more(step[p], head(p.batch)), sum(times[p])) for p in prompts}
    captured = {n: measured for n, measured in larger.items() if n <= sizes.captured_tokens}
    uncaptured = {n: measured for n, measured in larger.items() if n > sizes.captured_tokens}
    rest = _Line(tokens | _ever_cheaper(captured) | _ever_cheaper(uncaptured))
    layer = LayerTimes(
        rest=rest.scaled(1 / spec.num_layers),
        encode_attention=_encode_attention(spec, times, rest),
        decode_attention=_decode_attention(spec, sizes.batches, step, rest, head),
    )
    spread = [value / mean for point, mean in step.items() for value in times[point]]
    fitted = Profile(
        source="measured",
        model=spec.shape,
        dtype=dtype,
        device=cluster.device.name,
        devices_per_node=cluster.devices_per_node,
        engine="vllm",
        engine_version=vllm_version,
        num_threads=computing_cores(cluster) if cluster.device.type == "cpu" else None,
        layers=(layer,),
        embedding=Curve(points=(1, sizes.step_tokens), seconds=(0.0, 0.0)),
        head=head.scaled(),
        overhead=Curve(points=(1, sizes.batches[-1]), seconds=(0.0, 0.0)),
        spread=max(0.0, float(np.quantile(spread, 0.9)) - 1),
        provenance={"embedding": "in rest", "overhead": "in rest and head"},
    )
    if (mixed := _mixed_error(times, rest)) is None:
        return fitted
    difference = f"{100 * mixed[0]:+.1f}% (standard error {100 * mixed[1]:.1f}%) compared with separate steps"
    return fitted.but(provenance=fitted.provenance | {"mixed steps": difference})


def _decode_attention(
    spec: ModelSpec, batches: Sequence[int], step: dict[Probe, float], rest: _Line, head: _Line
) -> Surface:
    decodes = [point for point in step if point.kind == "decode"]
    each = {(p.batch, p.length): _more(step[p], rest(p.batch) + head(p.batch)) / spec.num_layers for p in decodes}
    return Surface.filled(each, batches, [n for n in CONTEXTS if (1, n) in each])


def _encode_attention(spec: ModelSpec, times: dict[Probe, list[float]], rest: _Line) -> Surface:
    """Return the seconds of a prompt's attention per layer. Several prompts take the sum of their times.

    A chunk of p tokens also attends to all earlier tokens. Attention to p earlier tokens takes twice as long as causal
    attention within the chunk. So if each earlier token adds c seconds to a chunk, the attention of a prompt of n
    tokens takes c n^2 / 2p seconds.
    """
    lengths = tuple(2**k for k in range(SHORT.bit_length() - 1, spec.max_context.bit_length()))
    lengths = tuple(sorted({*lengths, *(3 * n // 2 for n in lengths[:-1])}))
    share = 0.0
    for point in (p for p in times if p.kind == "pieces" and not p.batch):
        starts = np.arange(0, point.length, point.piece)
        slope, first = np.polyfit(starts, _by_start(times[point], len(starts)).mean(axis=0), 1)
        alone = first - slope * point.piece / 2  # time of a piece without any attention
        share = max(0.0, slope / alone) * rest(point.piece) / (2 * point.piece)
    seconds = tuple(share * (n * n - SHORT * SHORT) / spec.num_layers for n in lengths)
    return Surface(batches=(1,), lengths=lengths, seconds=(seconds,))


def _mixed_error(times: dict[Probe, list[float]], rest: _Line) -> tuple[float, float] | None:
    """Return the relative excess of the time of a mixed step (decodes and a prompt chunk) over that of two separate
    steps, and its standard error. Return None if mixed steps were not measured.
    """
    pieces = {bool(point.batch): point for point in times if point.kind == "pieces"}
    decode = Probe("decode", BESIDE, BESIDE_CONTEXT)
    if len(pieces) < 2 or decode not in times:
        return None
    alone, mixed = pieces[False], pieces[True]
    num_mixed = mixed.length // mixed.piece - 1  # in the first step of a point, no request decodes yet
    fixed = rest(mixed.piece) + rest(BESIDE) - rest(mixed.piece + BESIDE)  # time that both separate steps contain
    by_start = _by_start(times[alone], alone.length // alone.piece)[:, 1 : 1 + num_mixed]
    decodes = np.reshape(times[decode], (len(by_start), -1)).mean(axis=1)
    both = by_start.mean(axis=1) + decodes - fixed  # [passes]
    ratios = _by_start(times[mixed], num_mixed).mean(axis=1) / both
    return float(ratios.mean()) - 1, float(ratios.std(ddof=1) / np.sqrt(len(ratios)))


def _by_start(seconds: list[float], num_starts: int) -> npt.NDArray[np.float64]:
    """Arrange the seconds of chunks by pass and by the chunk's number. # [passes, starts]"""
    return np.reshape(seconds, (-1, num_starts))


def _ever_cheaper(sizes: dict[int, tuple[float, float]]) -> dict[int, float]:
    """Return the seconds of steps, by number of tokens, changed so that the time per token never rises with the number.
    Sizes that violate this are averaged, weighted by the total time of their measurements.
    """
    from scipy.optimize import isotonic_regression

    if not sizes:
        return {}
    tokens = np.asarray(sorted(sizes), float)
    seconds, weights = np.asarray([sizes[n] for n in sorted(sizes)]).T
    each = isotonic_regression(seconds / tokens, weights=weights, increasing=False).x
    return {n: float(s) for n, s in zip(sorted(sizes), each * tokens, strict=True)}


class _Line:
    def __init__(self, seconds: dict[int, float]) -> None:
        self._points = sorted(seconds)
        self._seconds = [seconds[n] for n in self._points]

    def __call__(self, n: int) -> float:
        return float(np.interp(n, self._points, self._seconds))

    def scaled(self, factor: float = 1.0) -> Curve:
        return Curve(points=tuple(self._points), seconds=tuple(factor * value for value in self._seconds))


def _decode(batch: int) -> Probe:
    return Probe("decode", batch, SHORT)


def _more(seconds: float, than: float) -> float:
    return max(seconds - than, 0.0)
