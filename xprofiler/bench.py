"""Measure the points of a profile on a worker.

Each point is measured once in each of several passes. Its time is the mean over the passes, since means add up to the
time of many steps. The clock of a shared machine changes between two or three rates about every second. A median of a
few calls would be the time at one of these rates, and not at the same rate for all points. All layers are run one after
the other, as in a step, so weights and K/V come from memory and not from a cache.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from xgpt.core.policies import LaneSettings, OneLane, Pool
from xgpt.core.progress import Progress
from xgpt.core.schema import RESTLESS, Curve, ModelSpec
from xprofiler.measurement_order import in_passes
from xrunner.ahead import AheadWorker
from xrunner.attention import Batch, Scoring, Sequences, make_batch
from xrunner.cores import own_cores
from xrunner.engine import Engine
from xrunner.generation import Generation
from xrunner.gpu.graphs import CudaCapture
from xrunner.models import DecoderModel, EncoderDecoderModel
from xrunner.models.latent import LatentSelfAttention
from xrunner.models.layers import SelfAttention
from xrunner.worker import Worker

BLOCK_SIZE = 16
TOKENS = (*range(1, 15), 16, 17, 18, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128, 256, 512, 1024, 2048)
"""All small numbers are measured: matrix kernels process rows in blocks, and with 3, 11, 13, 14 or 17 rows a step takes
4 to 8% longer than interpolation between multiples of four predicts.
"""
STAIR = 128
"""Difference in tokens between the measured sizes of large steps on a GPU."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = tuple(n - BLOCK_SIZE // 2 for n in (16, 64, 128, 256, 512, 1024, 2048))
"""Measured contexts end in the middle of a block. Kernels read whole blocks, on average half a block beyond a
context."""
PROMPTS = (8, 24, *CONTEXTS[1:])
ENCODE_BATCHES = (1, 4, 16)
STEP_PROMPT = 128
"""Length of prompts in measured whole steps. Their attention takes so little time that an error in measuring it does
not affect the rest of a layer."""
TYPICAL_STEP = [(100, 1)] * 8 + [(0, 128)]
"""A step that is measured repeatedly, for `spread`. Each sequence is (tokens before, tokens now)."""
SHORT_STEP = [(100, 1)]
"""The shortest step of a server. It is measured `SHORT_STEPS` times after each typical step, for `jitter_of`."""
SHORT_STEPS = 6
JITTER_QUANTILES = 100
JOBS_A_STEP = 16
STEPS_A_STRETCH = 3
"""Number of consecutive typical steps per mean. Such means vary about as much as the mean over one request's steps."""
WORST_ONE_IN, MORE_PASSES = 4, 6
BRIEF_PASSES, BRIEF_TOKENS = 2, 512
"""Number of passes, and tokens of the largest measured step, on a busy machine. Steps of more than 128 tokens compute
no logits. Two sizes of such steps are measured, and the times of larger steps are extrapolated linearly.
"""
LEAST_TRIMMED = 3
"""If a point has at most this number of calls, the mean includes all of them."""
WARM_STEPS, LOOP_STEPS = 4, 12
THREADS_ROUNDS = 3
SUSTAINED_S, SUSTAINED_TOKENS = 0.15, 512
"""A step of at least `SUSTAINED_TOKENS` tokens is repeated on a GPU for `SUSTAINED_S` seconds before it is timed."""
MIXED_DECODES, MIXED_CONTEXT, MIXED_PROMPTS, MIXED_LENGTH = 32, 56, 4, 120
"""A step that is measured in the loop of a GPU engine: its number of decodes, their context, its number of prompts, and
their length.
"""
MAX_STEP_TOKENS = 2048
"""Largest number of prompt tokens in a measured attention call. The time of a larger call is extrapolated in
proportion.
"""
MAX_CACHED_TOKENS = 16384
"""Largest number of K/V tokens in a measured decode batch. The time of a larger batch is extrapolated in proportion."""

NUM_BLOCKS = MAX_CACHED_TOKENS // BLOCK_SIZE + 2 * max(BATCHES)

Sizes = Sequence[tuple[int, int]]
"""Sequences of a batch, decodes first. In a decoder-only model each is (tokens before, tokens now). In an
encoder-decoder each is (prompt tokens, earlier decoder tokens), where 0 means that the prompt is encoded.
"""
Jobs = dict[tuple[str | int, ...], Callable[[], float]]
Timings = dict[tuple[str | int, ...], float]


@dataclass(frozen=True)
class Points:
    prompts: list[int]
    contexts: list[int]
    encode: list[tuple[int, int]]
    decode: list[tuple[int, int]]
    steps: dict[int, list[tuple[int, int]]]

    @classmethod
    def of(cls, spec: ModelSpec, device: str) -> Points:
        prompts = [n for n in PROMPTS if n <= spec.max_context]
        contexts = [n for n in CONTEXTS if n <= spec.max_context]
        context = contexts[min(1, len(contexts) - 1)]
        prompt = 2 ** int(math.log2(min(STEP_PROMPT, spec.max_context)))
        steps = {}
        stairs = range(STAIR, TOKENS[-1], STAIR) if device == "gpu" else ()
        for n in sorted({*TOKENS, *stairs}):
            steps[n] = [(context - 1, 1)] * n if n <= max(BATCHES) else [(0, prompt)] * (n // prompt)
        encode = {(b, n) for b in ENCODE_BATCHES for n in prompts if b * n <= MAX_STEP_TOKENS}
        encode |= {(n // prompt, prompt) for n in steps if n > max(BATCHES)}
        decode = {(b, n) for b in BATCHES for n in contexts if b * n <= MAX_CACHED_TOKENS}
        decode |= {(n, context) for n in steps if n <= max(BATCHES)}
        return cls(prompts, contexts, sorted(encode), sorted(decode), steps)


def curve(measured: Timings, name: str, points: Collection[int]) -> Curve:
    return Curve(points=tuple(points), seconds=tuple(measured[name, n] for n in points))


def spread(steps: Sequence[float]) -> float:
    """Return the relative excess of the 90th percentile of step times over their mean.

    With single steps, one long stall could raise the mean above nine tenths of the steps.

    Args:
        steps: seconds of at least `STEPS_A_STRETCH` steps, in the order of measurement.
    """
    whole = len(steps) // STEPS_A_STRETCH * STEPS_A_STRETCH
    stretches = np.mean(np.reshape(steps[:whole], (-1, STEPS_A_STRETCH)), axis=1)
    return max(0.0, float(np.quantile(stretches, 0.9) / np.mean(stretches)) - 1)


def jitter_of(steps: Sequence[float]) -> Timings:
    levels = (np.arange(JITTER_QUANTILES) + 0.5) / JITTER_QUANTILES
    mean = statistics.fmean(steps)
    ratios = np.quantile(steps, levels) / mean
    found: Timings = {("jitter", i): float(ratio) for i, ratio in enumerate(ratios)}
    return found | {("short step", 0): mean}


def least_certain(times: Mapping[tuple[str | int, ...], Sequence[float]]) -> list[tuple[str | int, ...]]:
    def error(values: Sequence[float]) -> float:
        return statistics.stdev(values) / statistics.mean(values) if len(values) > 1 else math.inf

    ranked = sorted(times, key=lambda key: -error(times[key][1:]))
    return ranked[: -(-len(ranked) // WORST_ONE_IN)]


def middle_mean(values: Sequence[float]) -> float:
    """Return the mean. If there are at least four values, leave out the smallest and the largest.

    Other processes make about one call in ten much longer.
    """
    ordered = sorted(values)
    return statistics.mean(ordered[1:-1] if len(ordered) > LEAST_TRIMMED else ordered)


def brief(keys: Collection[tuple[str | int, ...]]) -> list[tuple[str | int, ...]]:
    """Return the points to measure on a busy machine: those whose count is a power of two, and every second length."""
    lengths: dict[str | int, list[int]] = {}
    for name, *sizes in keys:
        lengths.setdefault(name, []).extend(int(size) for size in sizes[1:])
    ranks = {
        name: {n: i for i, n in enumerate(sorted(set(lengths_of), reverse=True))}
        for name, lengths_of in lengths.items()
    }

    def is_kept(name: str | int, first: int, *length: int) -> bool:
        is_large = first * math.prod(length) > BRIEF_TOKENS and (first > 1 or not length) and name != "decode attention"
        is_chosen = all(ranks[name][n] % 2 == 0 or n == min(ranks[name]) for n in length)
        return not is_large and first & (first - 1) == 0 and is_chosen

    return [key for key in keys if is_kept(key[0], *map(int, key[1:]))]


def filled(measured: Timings, wanted: Iterable[tuple[str | int, ...]]) -> Timings:
    times, missing = dict(measured), [key for key in wanted if key not in measured]
    while missing:
        found = {key: time for key in missing if (time := _on_line(times, key)) is not None}
        if not found:
            raise ValueError(f"the measured points do not determine those of {missing[0]}")
        times |= found
        missing = [key for key in missing if key not in found]
    return times


def _on_line(times: Timings, key: tuple[str | int, ...]) -> float | None:
    """Return a point's time on the line through its two nearest neighbours. Return None if there are not two."""
    for place in reversed(range(1, len(key))):
        at = int(key[place])
        others = {
            int(other_key[place]): time
            for other_key, time in times.items()
            if _with(other_key, place, key[place]) == key
        }
        if len(others) > 1:
            low, high = sorted(sorted(others, key=lambda size: abs(size - at))[:2])
            return max(0.0, others[low] + (at - low) / (high - low) * (others[high] - others[low]))
    return None


def _with(key: tuple[str | int, ...], place: int, size: str | int) -> tuple[str | int, ...]:
    return (*key[:place], size, *key[place + 1 :])


class Bench:
    """Measures the points of a profile on one worker. Several workers may measure at the same time."""

    typical_sequences: Sizes = TYPICAL_STEP
    short_sequences: Sizes = SHORT_STEP

    def __init__(
        self,
        worker: Worker,
        progress: Progress,
        meet: Callable[[], object] | None = None,
        *,
        in_group: bool = False,
        is_brief: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.worker = worker
        self.spec = worker.model.spec
        self.progress = progress
        self._meet, self._in_group, self._is_brief, self._clock = meet, in_group, is_brief, clock
        self._capture = CudaCapture()
        self._captured: dict[tuple[object, ...], tuple[Callable[[], object], Callable[[], None]]] = {}

    def meet(self) -> None:
        if self._meet is not None:
            self._meet()

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds of a call. The ranks of a group begin it at the same time."""
        if self._in_group:
            self.meet()
        return timed(run, self._clock)

    def measure(self) -> Timings:
        # Otherwise, all unwritten pages would be read as one page of zeros, which stays in the processor's cache.
        for cache in self.worker.cache.layers:
            cache.fill_(0.1)
        jobs = self.jobs()
        times: dict[tuple[str | int, ...], list[float]] = {key: [] for key in jobs}
        steps: list[float] = []
        short_steps: list[float] = []

        def call(keys: Sequence[tuple[str | int, ...]], what: str) -> None:
            for done, key in enumerate(keys):
                self.progress(done, len(keys), f"{what}: {key[0]}")
                if done % JOBS_A_STEP == 0:
                    self.meet()
                    steps.append(self.typical_step())
                    short_steps.extend(self.short_step() for _ in range(SHORT_STEPS))
                self._sustain(key, jobs[key])
                times[key].append(jobs[key]())

        if self._is_brief:
            call(in_passes(brief(jobs), _prompt_tokens, BRIEF_PASSES), "profiling a busy machine")
        else:
            call(in_passes(jobs, _prompt_tokens), "profiling")
            if self._meet is None and spread(steps[1:]) > RESTLESS:
                call(least_certain(times) * MORE_PASSES, "times vary, repeating the least certain points")
        means = {key: middle_mean(values[1:] or values) for key, values in times.items() if values}
        means = filled(means, jobs)
        return means | {("spread", 0): spread(steps[1:])} | jitter_of(short_steps[SHORT_STEPS:])

    def jobs(self) -> Jobs:
        points = Points.of(self.spec, "gpu" if self.worker.cache.device.type == "cuda" else "cpu")
        jobs: Jobs = {}
        for n, sequences in points.steps.items():
            jobs["step", n] = partial(self.step if n <= max(BATCHES) else self.all_layers, sequences)
            jobs["last layer", n] = partial(self.last_layer, sequences)
            jobs["embedding", n] = partial(self.embedding_of, sequences)
        batches = {*BATCHES, *(len(sequences) for sequences in points.steps.values())}
        for n in sorted(batches):
            jobs["head", n] = partial(self.head, n)
        for n in BATCHES:
            jobs["overhead", n] = partial(self.overhead, n)
        if isinstance(self.worker, AheadWorker):
            jobs["mixed step", 0] = self.mixed_step
        for b, n in points.encode:
            jobs["encode attention", b, n] = partial(self.attention, [(0, n)] * b)
        for b, n in points.decode:
            jobs["decode attention", b, n] = partial(self.attention, [(n - 1, 1)] * b)
        return jobs

    # Points, each in seconds ---------------------------------------------------------------------------------

    def attention(self, sequences: Sizes) -> float:
        caches, batch = self.worker.cache.layers, self.batch(sequences)
        q, k, v = self.queries_keys_values(len(batch.token_ids))
        model = self.worker.model
        assert isinstance(model, DecoderModel)
        layers = [
            attention.scoring
            for attention in model.modules()
            if isinstance(attention, SelfAttention | LatentSelfAttention)
        ]

        def run() -> None:
            for cache, scoring in zip(caches, layers, strict=True):
                self.worker.backend.forward(q, k, v, cache, batch, scoring)

        return self.seconds(self.as_served(run, "attention", *sequences)) / len(caches)

    def embedding_of(self, sequences: Sizes) -> float:
        model, batch = self.worker.model, self.batch(sequences)
        assert isinstance(model, DecoderModel)
        return self.seconds(self.as_served(lambda: model.embed(batch), "embedding", *sequences))

    def all_layers(self, sequences: Sizes) -> float:
        """Return the seconds of the embedding and all layers. The last layer computes all tokens, as the others do."""
        model, batch = self.worker.model, self.batch(sequences)
        assert isinstance(model, DecoderModel)
        cache, backend = self.worker.cache, self.worker.backend

        def run() -> None:
            attends = [partial(backend.forward, cache=layer_cache, batch=batch) for layer_cache in cache.layers]
            model.run_layers(model.embed(batch), batch, attends, None)

        return self.seconds(self.as_served(run, "all layers", *sequences))

    def last_layer(self, sequences: Sizes) -> float:
        """Return the seconds that the last layer takes for tokens whose logits are not needed, without attention.

        All layers are run as the last layer, so that weights come from memory. The result is the mean over them.
        """
        model, batch = self.worker.model, self.batch(sequences)
        assert isinstance(model, DecoderModel)
        hidden, rows = self.random(len(batch.token_ids), self.spec.hidden_size), batch.logit_rows[:0]

        def attend(q: Tensor, k: Tensor, v: Tensor, *, scoring: Scoring) -> Tensor:
            return q.flatten(1)

        def run() -> None:
            for layer in model.layers:
                layer(hidden, batch, attend, rows)

        return self.seconds(self.as_served(run, "last layer", *sequences)) / len(model.layers)

    def head(self, num_rows: int) -> float:
        """Return the seconds of the final norm, the logits, sampling, and the copy of the tokens to the host."""
        model = self.worker.model
        assert isinstance(model, DecoderModel | EncoderDecoderModel)
        rows = self.random(num_rows, self.spec.hidden_size)
        tokens = torch.zeros(num_rows, dtype=torch.int64, pin_memory=rows.is_cuda)

        def run() -> None:
            tokens.copy_(self.worker.sample(model.head(rows, highest_only=True)), non_blocking=True)

        return self.seconds(self.as_served(run, "head", num_rows))

    def overhead(self, num_requests: int) -> float:
        """Return the seconds that the engine's loop adds to a step: to schedule, build the batch, and record results.

        On a GPU, most of this overlaps with a running step. So the result is the time of a step in the loop minus that
        of the model's step.
        """
        if isinstance(self.worker, AheadWorker):
            return max(0.0, self._decoding(self.worker, num_requests) - self.step([(BLOCK_SIZE, 1)] * num_requests))
        return self._decoding(ModelFree(self.worker), num_requests)

    def _decoding(self, worker: Worker, num_requests: int) -> float:
        engine = self._engine(worker, num_requests, prompt_length=8)
        for _ in range(WARM_STEPS):  # the first step encodes the prompts
            engine.step()
        seconds = timed(lambda: [engine.step() for _ in range(LOOP_STEPS)]) / LOOP_STEPS
        worker.release(range(num_requests))
        return seconds

    def mixed_step(self) -> float:
        """Return the seconds of a step of the engine that both encodes prompts and decodes (see `MIXED_DECODES`)."""
        engine = self._engine(self.worker, MIXED_DECODES, MIXED_CONTEXT - LOOP_STEPS - WARM_STEPS)
        for _ in range(WARM_STEPS):
            engine.step()
        seconds, ids = [], itertools.count(MIXED_DECODES)
        for _ in range(LOOP_STEPS):
            for _ in range(MIXED_PROMPTS):
                engine.submit(Generation(next(ids), prompt=(0,) * MIXED_LENGTH, max_output=1))
            seconds.append(self.seconds(engine.step))
            engine.step()
        self.worker.release(range(MIXED_DECODES))
        return middle_mean(seconds)

    @staticmethod
    def _engine(worker: Worker, num_requests: int, prompt_length: int) -> Engine:
        pool = Pool(worker.cache.num_blocks - 1, BLOCK_SIZE)
        engine = Engine(OneLane(LaneSettings(mix=True), pool), worker)
        for i in range(num_requests):
            engine.submit(Generation(i, prompt=(0,) * prompt_length, max_output=100))
        return engine

    def run_products(self) -> None:
        self.last_layer(self.typical_sequences)
        self.head(len(self.typical_sequences))

    def run_attention(self) -> None:
        self.attention(self.typical_sequences)

    def typical_step(self) -> float:
        return self.step(self.typical_sequences)

    def short_step(self) -> float:
        return self.step(self.short_sequences)

    def step(self, sequences: Sizes) -> float:
        batch = self.batch(sequences)
        return self.seconds(lambda: self.worker.next_tokens(batch))

    def _sustain(self, key: tuple[str | int, ...], job: Callable[[], float]) -> None:
        if key[0] == "step" and int(key[1]) >= SUSTAINED_TOKENS and isinstance(self.worker, AheadWorker):
            end = self._clock() + SUSTAINED_S
            while self._clock() < end:
                job()

    def as_served(self, run: Callable[[], object], *what: object) -> Callable[[], object]:
        """Return a function that runs a part of a step as a server does: as a CUDA graph, if the worker captures steps.

        Otherwise, short kernels would wait for launches. Each part is captured only once, so in later passes the GPU is
        as busy, and its clock as low, as in service.
        """
        if not isinstance(self.worker, AheadWorker):
            return run
        if what not in self._captured:
            self._captured[what] = run, self._capture(run)
        return self._captured[what][1]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.worker.dtype, device=self.worker.cache.device)

    def queries_keys_values(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads, size = self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim
        if self.spec.latent is not None:
            kv_heads, size = 1, self.spec.latent.kept_per_token
        q, k, v = (self.random(num_tokens, n, size) for n in (heads, kv_heads, kv_heads))
        return q, k, v

    def batch(self, sequences: Sizes) -> Batch:
        before, query_len = np.asarray(sequences, np.int32).T
        context_len = before + query_len
        width = -(-int(context_len.max()) // BLOCK_SIZE)
        num_tokens = int(query_len.sum())
        # Equal tokens would all go to the same experts, and on a GPU they would need less power, so that the clock
        # would be higher.
        tokens = np.random.default_rng(num_tokens).integers(self.spec.vocab_size, size=num_tokens)
        tables = np.arange(len(sequences) * width, dtype=np.int32).reshape(len(sequences), width)
        return make_batch(
            tokens,
            Sequences(query_len, context_len, tables),
            block_size=BLOCK_SIZE,
            num_decodes=int(((before > 0) & (query_len == 1)).sum()),
            device=self.worker.cache.layers[0].device,
        )


class ModelFree(Worker):
    """A worker that keeps requests and blocks but runs no model. With it, only the engine's loop is timed."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.model, worker.cache, worker.backend)

    def next_tokens(self, batch: Batch) -> np.ndarray:
        return np.zeros(len(batch.logit_rows), np.int64)


def _prompt_tokens(key: tuple[str | int, ...]) -> int:
    name, *sizes = key
    return math.prod(map(int, sizes)) if name in ("step", "encode step", "encode attention") else 0


def timed(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    _wait_for_gpu()
    started = clock()
    run()
    _wait_for_gpu()
    return clock() - started


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def thread_counts() -> list[int]:
    most = torch.get_num_threads()
    return sorted({1, *(2**i for i in range(int(math.log2(most)) + 1)), most})


def seconds_by_threads(bench: Bench, part: int = 0, parts: int = 1) -> dict[int, float]:
    """Return the seconds of a typical step for each of `thread_counts`. The step runs on the cores that the worker
    would have in service.
    """
    counts = thread_counts()
    times: dict[int, list[float]] = {threads: [] for threads in counts}
    # The numbers of threads take turns, so that a slow moment of the machine affects all of them.
    for threads in counts * THREADS_ROUNDS:
        torch.set_num_threads(threads)
        bench.meet()
        with own_cores(part, parts):
            bench.typical_step()
            times[threads] += [bench.typical_step() for _ in range(2)]
    return {threads: min(seconds) for threads, seconds in times.items()}
