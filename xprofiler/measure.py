"""Step times measured on this machine, through the very layers and backends that xrunner runs.

Points are measured in several passes over all of them, once a pass, and each point's time is their mean: what a run
pays on average. The clock of a shared machine moves between two or three rates every second or so; a median of few
takes one of them for the whole, and which one it takes differs from point to point. Layers are run one after the
other, as in a step, so that weights and K/V come from memory and not from a cache that only a benchmark would have
warm.

The parts of a step run faster alone than in their places: together they take up to a tenth less than the whole. So
whole steps are measured, and the rest of the layer is what such a step takes beyond attention, embedding and head.
Source: ExeGPT sec. 3 (XProfiler).
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from xgpt.errors import InputError
from xgpt.machine import num_cores
from xgpt.policies import LaneSettings, OneLane, Pool
from xgpt.schema import ClusterSpec, Curve, DType, LayerTimes, ModelSpec, Profile, Surface
from xprofiler import NATIVE_VERSION
from xprofiler.passes import in_passes
from xrunner.ahead import AheadWorker
from xrunner.attention import Batch, make_batch
from xrunner.build import WorkerSettings, build_worker
from xrunner.engine import Engine
from xrunner.generation import Generation
from xrunner.graphs import CudaCapture
from xrunner.models import DecoderModel
from xrunner.packed import fastest
from xrunner.parallel import Part, build
from xrunner.worker import Worker

BLOCK_SIZE = 16
TOKENS = (1, 2, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048)
"""Close together where decode batches are: matrix kernels take rows by the dozen or so, and ten cost up to a tenth of a
step more than what eight and sixteen do would let one think."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = tuple(n - BLOCK_SIZE // 2 for n in (16, 64, 128, 256, 512, 1024, 2048))
"""Half a block short of whole blocks: kernels read whole ones, and that is what they read too much on average."""
PROMPTS = (8, 24, *CONTEXTS[1:])
ENCODE_BATCHES = (1, 4, 16)
STEP_PROMPT = 128
"""Length of the prompts in measured whole steps: attention is so small a part of these that its own measurement's error
does not end up in the rest of a layer."""
TYPICAL_STEP = [(100, 1)] * 8 + [(0, 128)]
"""Measured over and over: what it varies by is the profile's spread. (tokens before, tokens now) of each sequence."""
JOBS_A_STEP = 16
"""It is measured after each so many points."""
STEPS_A_STRETCH = 3
"""So many in succession, over seconds of profiling, meet as much of the machine's ups and downs as one request does."""
MAX_STEP_TOKENS = 2048
"""Prompt tokens in a measured attention call: larger ones cost proportionally."""
MAX_CACHED_TOKENS = 16384
"""K/V tokens of a measured decode batch: larger ones cost proportionally."""

NUM_BLOCKS = MAX_CACHED_TOKENS // BLOCK_SIZE + 2 * max(BATCHES)

Progress = Callable[[int, int, str], None]
Timer = Callable[[Callable[[], object]], float]
Measured = dict[tuple[str | int, ...], float]
"""Seconds by name and sizes."""


def profile(
    spec: ModelSpec,
    cluster: ClusterSpec,
    dtype: DType,
    *,
    checkpoint: Path | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure a model on the devices of this machine: one of them, or all of them at work together.

    Args:
        progress: told how many of how many points are done.

    Raises:
        InputError: the model has an encoder.
    """
    if spec.is_encoder_decoder:
        raise InputError(
            "model",
            spec.name,
            "an encoder-decoder cannot be measured yet; plan for a cluster with a datasheet, or take another model",
        )
    device = "cuda" if cluster.device.type == "gpu" else "cpu"
    progress = progress or (lambda done, total, what: None)
    if cluster.num_devices > 1:
        return _together(spec, cluster, dtype, checkpoint, device, progress)
    layouts = fastest_layouts(spec, dtype, (1,)) if device == "cpu" else {}
    worker = build_worker(
        WorkerSettings(
            spec=spec,
            dtype=dtype,
            checkpoint=checkpoint,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            device=device,
            layouts=layouts,
        )
    )
    with torch.inference_mode():
        bench = Bench(worker, progress)
        if device == "cpu":
            torch.set_num_threads(_fastest_num_threads(bench))
        measured = bench.measure()
    threads = torch.get_num_threads() if device == "cpu" else None
    return _profile(spec, cluster, dtype, threads, layouts, {1: measured})


def fastest_layouts(spec: ModelSpec, dtype: DType, degrees: Sequence[int]) -> dict[str, str]:
    """How the weights of a model are kept on this CPU, whole or shared by so many devices."""
    parts = [
        Part(spec, (0, spec.num_layers), (0, spec.num_encoder_layers), rank=rank, degree=degree)
        for degree in degrees
        for rank in range(degree)
    ]
    weights = [projection.weight for part in parts for projection in build(part).projections()]
    return fastest([(len(weight), weight.shape[1]) for weight in weights if weight is not None], dtype)


def _together(
    spec: ModelSpec, cluster: ClusterSpec, dtype: DType, checkpoint: Path | None, device: str, progress: Progress
) -> Profile:
    """Each tensor-parallel degree, hops and transfers, by a process for each device."""
    from xprofiler import ranks

    threads, layouts = 1, {}
    if device == "cpu":
        threads = max(1, num_cores() // cluster.num_devices)
        torch.set_num_threads(threads)
        layouts = fastest_layouts(spec, dtype, ranks.degrees(spec, cluster.num_devices))
    found = ranks.measure(
        spec,
        dtype,
        cluster.num_devices,
        checkpoint=checkpoint,
        device=device,
        threads=threads,
        layouts=layouts,
        progress=progress,
    )
    profile = _profile(spec, cluster, dtype, threads if device == "cpu" else None, layouts, found.by_degree)
    return profile.model_copy(update={"hop": found.hop, "kv_transfer": found.kv_transfer})


def _profile(
    spec: ModelSpec,
    cluster: ClusterSpec,
    dtype: DType,
    threads: int | None,
    layouts: dict[str, str],
    by_degree: dict[int, Measured],
) -> Profile:
    points = Points.of(spec)
    alone = by_degree[1]
    return Profile(
        source="measured",
        model=spec.shape,
        dtype=dtype,
        device=cluster.device.name,
        devices_per_node=cluster.devices_per_node,
        engine="native",
        engine_version=NATIVE_VERSION,
        num_threads=threads,
        layouts=layouts,
        layers=tuple(_layer(spec, points, degree, measured, alone) for degree, measured in by_degree.items()),
        embedding=_curve(alone, "embedding", TOKENS),
        head=_curve(alone, "head", BATCHES),
        overhead=_curve(alone, "overhead", BATCHES),
        spread=alone["spread", 0],
        environment=_environment(),
    )


def _layer(spec: ModelSpec, points: Points, degree: int, measured: Measured, alone: Measured) -> LayerTimes:
    """One layer at one degree. The embedding is the profile's, so what it costs more or less here is in the layers."""
    rest: Measured = {}
    for n, sequences in points.steps.items():
        before, length = sequences[0]
        attention = "decode attention" if before else "encode attention"
        beside = spec.num_layers * measured[attention, len(sequences), before + length]
        seconds = measured["step", n] - beside - measured["head", len(sequences)] - alone["embedding", n]
        rest["rest", n] = max(seconds, 0.0) / spec.num_layers
    return LayerTimes(
        tp_degree=degree,
        rest=_curve(rest, "rest", TOKENS),
        encode_attention=Surface.filled(
            {at: measured["encode attention", *at] for at in points.encode}, ENCODE_BATCHES, points.prompts
        ),
        decode_attention=Surface.filled(
            {at: measured["decode attention", *at] for at in points.decode}, BATCHES, points.contexts
        ),
        head=None if degree == 1 else _curve(measured, "head", BATCHES),
    )


def _curve(measured: Mapping[tuple[str | int, ...], float], name: str, points: Sequence[int]) -> Curve:
    return Curve(points=tuple(points), seconds=tuple(measured[name, n] for n in points))


@dataclass(frozen=True)
class Points:
    """Where a model is measured, as far as its context reaches.

    Attributes:
        encode, decode: (batch, length) of attention: the tables' and those of the steps.
        steps: whole steps by their tokens: short decodes as far as batches go, short prompts beyond. Sequences are
            (tokens before, tokens now).
    """

    prompts: list[int]
    contexts: list[int]
    encode: list[tuple[int, int]]
    decode: list[tuple[int, int]]
    steps: dict[int, list[tuple[int, int]]]

    @classmethod
    def of(cls, spec: ModelSpec) -> Points:
        prompts = [n for n in PROMPTS if n <= spec.max_context]
        contexts = [n for n in CONTEXTS if n <= spec.max_context]
        context = contexts[min(1, len(contexts) - 1)]
        prompt = 2 ** int(math.log2(min(STEP_PROMPT, spec.max_context)))
        steps = {}
        for n in TOKENS:
            steps[n] = [(context - 1, 1)] * n if n <= max(BATCHES) else [(0, prompt)] * (n // prompt)
        encode = {(b, n) for b in ENCODE_BATCHES for n in prompts if b * n <= MAX_STEP_TOKENS}
        encode |= {(n // prompt, prompt) for n in steps if n > max(BATCHES)}
        decode = {(b, n) for b in BATCHES for n in contexts if b * n <= MAX_CACHED_TOKENS}
        decode |= {(n, context) for n in steps if n <= max(BATCHES)}
        return cls(
            prompts,
            contexts,
            sorted(encode),
            sorted(decode),
            steps,
        )


def spread(steps: Sequence[float]) -> float:
    """By how much the 90th percentile of stretches of a step's times exceeds their mean, as a share of it.

    Of stretches, not of single steps: what one long stall adds to the mean can lie above nine tenths of single steps,
    and then nothing would be left for the machine's slow moments.

    Args:
        steps: seconds, in the order of measuring; one stretch or more.
    """
    whole = len(steps) // STEPS_A_STRETCH * STEPS_A_STRETCH
    stretches = np.mean(np.reshape(steps[:whole], (-1, STEPS_A_STRETCH)), axis=1)
    return max(0.0, float(np.quantile(stretches, 0.9) / np.mean(stretches)) - 1)


class Bench:
    """Measures the points of a profile on one worker, which may be one of several that compute together.

    Args:
        seconds: how long a call takes.
    """

    def __init__(self, worker: Worker, progress: Progress, seconds: Timer | None = None) -> None:
        assert isinstance(worker.model, DecoderModel)
        self.worker = worker
        self.model = worker.model
        self.progress = progress
        self.seconds = seconds or timed

    def measure(self) -> Measured:
        """The mean of each point, and the spread of a typical step; the first of each call is to warm up."""
        # Pages that were never written all read as one page of zeros, which the processor's cache then holds.
        for cache in self.worker.cache.layers:
            cache.fill_(0.1)
        points = Points.of(self.model.spec)
        jobs: dict[tuple[str | int, ...], Callable[[], float]] = {}
        for n, sequences in points.steps.items():
            jobs["step", n] = partial(self.step, sequences)
            jobs["embedding", n] = partial(self.embedding, sequences)
        batches = {*BATCHES, *(len(sequences) for sequences in points.steps.values())}
        for n in sorted(batches):
            jobs["head", n] = partial(self.head, n)
        for n in BATCHES:
            jobs["overhead", n] = partial(self.overhead, n)
        for b, n in points.encode:
            jobs["encode attention", b, n] = partial(self.attention, [(0, n)] * b)
        for b, n in points.decode:
            jobs["decode attention", b, n] = partial(self.attention, [(n - 1, 1)] * b)

        times: dict[tuple[str | int, ...], list[float]] = {key: [] for key in jobs}
        steps: list[float] = []
        calls = in_passes(jobs, _prompt_tokens)
        for done, key in enumerate(calls):
            self.progress(done, len(calls), f"profiling: {key[0]}")
            if done % JOBS_A_STEP == 0:
                steps.append(self.step(TYPICAL_STEP))
            times[key].append(jobs[key]())
        return {key: statistics.mean(values[1:]) for key, values in times.items()} | {("spread", 0): spread(steps[1:])}

    # Points, each in seconds ---------------------------------------------------------------------------------

    def attention(self, sequences: list[tuple[int, int]]) -> float:
        """One layer's attention; sequences are (tokens before, tokens now)."""
        spec, caches = self.model.spec, self.worker.cache.layers
        batch = self.batch(sequences)
        num_tokens = len(batch.token_ids)

        def random(num_heads: int) -> Tensor:
            shape = (num_tokens, num_heads, spec.head_dim)
            return torch.randn(shape, dtype=caches[0].dtype, device=caches[0].device)

        q, k, v = random(spec.num_heads), random(spec.num_kv_heads), random(spec.num_kv_heads)

        def run() -> None:
            for cache in caches:
                self.worker.backend.forward(q, k, v, cache, batch)

        # As steps that only decode are served: launched one by one, kernels of microseconds would wait for the host.
        is_captured = isinstance(self.worker, AheadWorker) and batch.num_decodes == len(sequences)
        return self.seconds(CudaCapture()(run) if is_captured else run) / len(caches)

    def embedding(self, sequences: list[tuple[int, int]]) -> float:
        batch = self.batch(sequences)
        return self.seconds(lambda: self.model.embed(batch))

    def head(self, num_rows: int) -> float:
        """Final norm, logits and the choice of tokens."""
        rows = self.model.embed(self.batch([(0, num_rows)]))
        return self.seconds(lambda: self.worker.sample(self.model.head(rows)).cpu())

    def overhead(self, num_requests: int) -> float:
        """A step of the real engine less its model: rule, pool, batch, settling."""
        worker = ModelFree(self.worker)
        pool = Pool(kv_blocks=num_requests * 8, block_size=BLOCK_SIZE)
        engine = Engine(OneLane(LaneSettings(mix=True), pool), worker)
        for i in range(num_requests):
            engine.submit(Generation(i, prompt=(0,) * 8, max_output=100))
        engine.step()
        steps = 12
        seconds = []
        for _ in range(steps):
            started = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - started)
        worker.release(range(num_requests))
        return statistics.mean(seconds)

    def step(self, sequences: list[tuple[int, int]]) -> float:
        """A whole step less the loop: embedding, layers with attention, head, choice of tokens."""
        batch = self.batch(sequences)
        return self.seconds(lambda: self.worker.next_tokens(batch))

    def batch(self, sequences: list[tuple[int, int]]) -> Batch:
        """A batch of (tokens before, tokens now) sequences with K/V blocks of their own; decodes come first."""
        before, query_len = np.asarray(sequences, np.int32).T
        context_len = before + query_len
        width = -(-int(context_len.max()) // BLOCK_SIZE)
        return make_batch(
            np.zeros(int(query_len.sum()), np.int64),
            query_len,
            context_len,
            np.arange(len(sequences) * width, dtype=np.int32).reshape(len(sequences), width),
            block_size=BLOCK_SIZE,
            num_decodes=int(((before > 0) & (query_len == 1)).sum()),
            device=self.worker.cache.layers[0].device,
        )


class ModelFree(Worker):
    """Does all of a worker's bookkeeping and none of its arithmetic."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.model, worker.cache, worker.backend)

    def next_tokens(self, batch: Batch) -> np.ndarray:
        return np.zeros(len(batch.logit_rows), np.int64)


def _prompt_tokens(key: tuple[str | int, ...]) -> int:
    name, *sizes = key
    return math.prod(map(int, sizes)) if name in ("step", "encode attention") else 0


def timed(run: Callable[[], object]) -> float:
    """Seconds of a call with all that it has launched, and nothing launched before it."""
    _wait_for_gpu()
    started = time.perf_counter()
    run()
    _wait_for_gpu()
    return time.perf_counter() - started


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _fastest_num_threads(bench: Bench) -> int:
    """On a small shared machine one thread can beat two: measure a whole step with each number."""
    most = torch.get_num_threads()
    times = {}
    for threads in sorted({1, *(2**i for i in range(int(math.log2(most)) + 1)), most}):
        torch.set_num_threads(threads)
        times[threads] = min(bench.step(TYPICAL_STEP) for _ in range(3))
    return min(times, key=times.__getitem__)


def _environment() -> dict[str, str]:
    names = ("torch", "numba", "numpy", "xgpt")
    return {"python": platform.python_version(), "machine": platform.machine()} | {n: version(n) for n in names}
