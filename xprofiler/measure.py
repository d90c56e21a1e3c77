"""Measure step times on this machine, with xrunner's layers and backends.

The times of a step's parts, measured one by one, add up to as little as nine tenths of the whole step's time. So whole
steps are measured. A layer's `rest` is the time of a whole step minus attention, embedding and head, per layer. Source:
ExeGPT sec. 3 (XProfiler).
"""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from xgpt.core.machine import num_cores
from xgpt.core.progress import Progress, silent
from xgpt.core.schema import (
    BYTES_PER_ELEMENT,
    SLICE_TOKENS,
    ClusterSpec,
    Curve,
    DType,
    EncoderLayerTimes,
    Jitter,
    LayerTimes,
    ModelSpec,
    Precision,
    Profile,
    Surface,
)
from xgpt.core.version import __version__
from xprofiler import libraries, ranks, xgpt_version
from xprofiler.bench import (
    BATCHES,
    BLOCK_SIZE,
    ENCODE_BATCHES,
    JITTER_QUANTILES,
    MIXED_CONTEXT,
    MIXED_DECODES,
    MIXED_LENGTH,
    MIXED_PROMPTS,
    NUM_BLOCKS,
    TOKENS,
    Points,
    Timings,
    curve,
    seconds_by_threads,
    thread_counts,
)
from xprofiler.encoder_decoder import bench_of, layers_of
from xprofiler.others import BUSY, Others, cores_taken, gflops
from xrunner import memory
from xrunner.build import WorkerSettings, build_worker
from xrunner.cores import own_cores
from xrunner.packing.choice import fastest, fastest_head
from xrunner.parallel import Part, build
from xrunner.weights import Checkpoint, load_prepacked

LOADED_LAYERS, LOADS = 4, 4


def profile(
    spec: ModelSpec,
    cluster: ClusterSpec,
    dtype: DType,
    *,
    kv_dtype: DType | None = None,
    checkpoint: Path | None = None,
    progress: Progress | None = None,
    wait: Callable[[], None] = lambda: None,
) -> Profile:
    """Measure a model's profile on this machine.

    Args:
        wait: waits until kernels have been compiled. On a busy machine, it is called only after weight layouts have
            been compared.
    """
    device = "cuda" if cluster.device.type == "gpu" else "cpu"
    progress = progress or silent
    is_brief = device == "cpu" and cores_taken() > BUSY * num_cores()
    if not is_brief:
        progress(0, 1, "compiling kernels (once on a machine)")
        wait()
    others = Others()
    measure = _together if cluster.num_devices > 1 else _one_device
    found = measure(_Asked(spec, cluster, dtype, kv_dtype, checkpoint, device, progress, wait, is_brief))
    if device == "cuda":  # a server that starts while this process continues needs the memory
        gc.collect()
        torch.cuda.empty_cache()
    # On a busy machine, kernels are still being compiled when the measurement begins.
    return found.but(others=others.cores(), is_brief=is_brief, gflops=gflops() if device == "cpu" else None)


@dataclass(frozen=True)
class _Asked:
    spec: ModelSpec
    cluster: ClusterSpec
    dtype: DType
    kv_dtype: DType | None
    checkpoint: Path | None
    device: str
    progress: Progress
    wait: Callable[[], None]
    is_brief: bool

    def settings(self, threads: int | None, layouts: dict[str, str]) -> WorkerSettings:
        return WorkerSettings(
            spec=self.spec,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            checkpoint=self.checkpoint,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            device=self.device,
            threads=threads,
            layouts=layouts,
        )


def _one_device(asked: _Asked) -> Profile:
    spec, dtype, on_cpu, is_brief = asked.spec, asked.dtype, asked.device == "cpu", asked.is_brief
    layouts: dict[str, str] = {}
    if on_cpu:
        asked.progress(0, 1, "choosing layouts of weights")
        with own_cores():
            layouts = fastest_layouts(spec, dtype, (1,), is_brief=is_brief)
    worker = build_worker(asked.settings(None, layouts))
    with torch.inference_mode():
        bench = bench_of(worker)(worker, asked.progress, is_brief=is_brief)
        if on_cpu:
            most = torch.get_num_threads()
            for count in thread_counts():
                torch.set_num_threads(count)
                bench.run_products()
            torch.set_num_threads(most)
            asked.wait()
            seconds = seconds_by_threads(bench)
            torch.set_num_threads(min(seconds, key=seconds.__getitem__))
        with own_cores() if on_cpu else nullcontext():
            measured = bench.measure()
    threads = torch.get_num_threads() if on_cpu else None
    found = assembled(spec, asked.cluster, dtype, threads, layouts, {(1, 1): measured}, asked.kv_dtype)
    return _with_loading(found, asked)


def _with_loading(profile: Profile, asked: _Asked) -> Profile:
    if asked.checkpoint is None:
        return profile  # weights are random, so nothing is loaded
    rate = loading_rate(asked.spec, asked.dtype, asked.checkpoint, asked.device, profile.layouts)
    return profile.but(load_bytes_per_s=rate)


def loading_rate(
    spec: ModelSpec, dtype: DType, checkpoint: Path, device: str, layouts: Mapping[str, str] | None = None
) -> float:
    """Return the bytes of weights per second that a worker reads from the page cache, converts and packs.

    A few layers are loaded several times. The first time fills the page cache and does not count. The mean of the
    others counts, not the shortest, because other processes would also slow a redeployment.
    """
    last, last_encoder = min(spec.num_layers, LOADED_LAYERS), min(spec.num_encoder_layers, LOADED_LAYERS)
    part = Part(spec, (0, last), (0, last_encoder), is_first=False, is_last=False)
    size = BYTES_PER_ELEMENT[Precision.of(dtype, "gpu" if device == "cuda" else "cpu", "xgpt").weights]
    num_bytes = size * (last * spec.decoder_layer_params + last_encoder * spec.encoder_layer_params)
    seconds = []
    for _ in range(LOADS):
        start = time.perf_counter()
        load_prepacked(spec, dtype, Checkpoint(checkpoint), device, part, layouts)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return num_bytes / statistics.fmean(seconds[1:])


def fastest_layouts(spec: ModelSpec, dtype: DType, degrees: Sequence[int], *, is_brief: bool = False) -> dict[str, str]:
    memory.keep_freed_memory()  # as in a worker, so that calls need not allocate buffers again
    parts = [
        Part(spec, (0, spec.num_layers), (0, spec.num_encoder_layers), rank=rank, degree=degree)
        for degree in degrees
        for rank in range(degree)
    ]
    weights = [projection.weight for part in parts for projection in build(part).projections()]
    shapes = [(len(weight), weight.shape[1]) for weight in weights if weight is not None]
    layouts = fastest(shapes, dtype, is_brief=is_brief)
    if dtype == "float32" and spec.tie_embeddings:  # the head's weight is also the embedding, which stays unpacked
        layouts |= fastest_head((spec.vocab_size, spec.hidden_size), layouts, is_brief=is_brief)
    return layouts


def _together(asked: _Asked) -> Profile:
    spec, dtype, count = asked.spec, asked.dtype, asked.cluster.num_devices
    threads: int | None = None
    layouts: dict[str, str] = {}
    if asked.device == "cpu":
        threads = max(1, num_cores() // count)
        torch.set_num_threads(threads)
        layouts = fastest_layouts(spec, dtype, ranks.degrees(spec, count), is_brief=asked.is_brief)
    asked.wait()
    found = ranks.measure(asked.settings(threads, layouts), count, asked.progress, is_brief=asked.is_brief)
    profile = assembled(spec, asked.cluster, dtype, found.threads, layouts, found.by_group, asked.kv_dtype)
    profile = profile.but(hop=found.hop, kv_transfer=found.kv_transfer)
    return _with_loading(profile, asked)


def assembled(
    spec: ModelSpec,
    cluster: ClusterSpec,
    dtype: DType,
    threads: int | None,
    layouts: dict[str, str],
    by_group: dict[tuple[int, int], Timings],
    kv_dtype: DType | None = None,
) -> Profile:
    alone, head = by_group[1, 1], curve(by_group[1, 1], "head", BATCHES)
    tokens: Collection[int] = TOKENS
    layers: tuple[LayerTimes, ...]
    encoder_layers: tuple[EncoderLayerTimes, ...] = ()
    if spec.is_encoder_decoder:
        pairs = [layers_of(spec, degree, measured, alone) for (degree, _), measured in by_group.items()]
        layers, encoder_layers = (tuple(pair) for pair in zip(*pairs, strict=True))
    else:
        points = Points.of(spec, cluster.device.type)
        tokens = points.steps
        layers = tuple(_layer(spec, points, group, measured, alone) for group, measured in by_group.items())
        head = _with_last_layer(head, layers[0])
        if ("mixed step", 0) in alone:
            layers = (_with_loop(spec, layers[0], head, alone),)
    return Profile(
        source="measured",
        model=spec.shape,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=cluster.device.name,
        devices_per_node=cluster.devices_per_node,
        engine="xgpt",
        engine_version=xgpt_version(cluster.device.type),
        num_threads=threads,
        layouts=layouts,
        layers=layers,
        encoder_layers=encoder_layers,
        embedding=_sliced(curve(alone, "embedding", tokens)),
        head=head,
        overhead=curve(alone, "overhead", BATCHES),
        spread=alone["spread", 0],
        jitter=_jitter(alone),
        environment=_environment(),
    )


def _jitter(measured: Timings) -> Jitter:
    ratios = tuple(round(measured["jitter", i], 4) for i in range(JITTER_QUANTILES))
    return Jitter(seconds=measured["short step", 0], ratios=ratios)


def _layer(spec: ModelSpec, points: Points, group: tuple[int, int], measured: Timings, alone: Timings) -> LayerTimes:
    """Return a layer's times on one group of devices, from `measured`. `alone` has the times on one device.

    A profile has only one device's time of the embedding. The group's difference from it is included in the layers.
    """
    rest: Timings = {}
    for n, sequences in points.steps.items():
        before, length = sequences[0]
        attention = "decode attention" if before else "encode attention"
        seconds = measured["step", n] - spec.num_layers * measured[attention, len(sequences), before + length]
        seconds -= alone["embedding", n] + (measured["head", n] if before else 0.0)
        rest["rest", n] = max(seconds, 0.0) / spec.num_layers
        rest["last", n] = min(measured["last layer", n], rest["rest", n])
    layer = LayerTimes(
        tp_degree=group[0],
        ep_degree=group[1],
        rest=_sliced(curve(rest, "rest", points.steps)),
        last=_sliced(curve(rest, "last", points.steps)),
        encode_attention=Surface.filled(
            {at: measured["encode attention", *at] for at in points.encode}, ENCODE_BATCHES, points.prompts
        ),
        decode_attention=Surface.filled(
            {at: measured["decode attention", *at] for at in points.decode}, BATCHES, points.contexts
        ),
    )
    if group[0] == 1:
        return layer
    return layer.but(head=_with_last_layer(curve(measured, "head", BATCHES), layer))


def _sliced(of_tokens: Curve) -> Curve:
    """Add a point for two slices. A step with more tokens than a slice runs slice by slice.

    Extrapolating from the last two measured points would be wrong, since times on a GPU rise in stairs.
    """
    if of_tokens.points[-1] != SLICE_TOKENS:
        return of_tokens
    points, seconds = (*of_tokens.points, 2 * SLICE_TOKENS), (*of_tokens.seconds, 2 * of_tokens.seconds[-1])
    return Curve(points=points, seconds=seconds)


def _with_loop(spec: ModelSpec, layer: LayerTimes, head: Curve, alone: Timings) -> LayerTimes:
    """Return a layer's times on a GPU. The excess of a measured step with prompts over the sum of its parts is added to
    the attention of prompts.

    Such a step is launched only after the previous step has ended, so the loop does not overlap with it. A captured
    step also computes logits for more tokens, and launches programs for more sequences, than the batch has.
    """
    assert layer.last is not None

    def at(curve_: Curve, size: int) -> float:
        return float(np.interp(size, curve_.points, curve_.seconds))

    tokens, sampled = MIXED_DECODES + MIXED_PROMPTS * MIXED_LENGTH, MIXED_DECODES + MIXED_PROMPTS
    attention = alone["encode attention", MIXED_PROMPTS, MIXED_LENGTH]
    attention += alone["decode attention", MIXED_DECODES, MIXED_CONTEXT]
    layers = (spec.num_layers - 1) * at(layer.rest, tokens) + at(layer.last, tokens) + spec.num_layers * attention
    others = at(head, sampled) + at(curve(alone, "overhead", BATCHES), sampled) + alone["embedding", tokens]
    beyond = max(0.0, alone["mixed step", 0] - layers - others) / spec.num_layers
    surface = layer.encode_attention
    seconds = tuple(tuple(beyond + each for each in row) for row in surface.seconds)
    return layer.but(encode_attention=surface.but(seconds=seconds))


def _with_last_layer(head: Curve, layer: LayerTimes) -> Curve:
    assert layer.last is not None
    whole, all_tokens = (dict(zip(side.points, side.seconds, strict=True)) for side in (layer.rest, layer.last))
    seconds = (s + whole[n] - all_tokens[n] for n, s in zip(head.points, head.seconds, strict=True))
    return Curve(points=head.points, seconds=tuple(seconds))


def _environment() -> dict[str, str]:
    versions = {"python": platform.python_version(), "machine": platform.machine(), "xgpt": __version__}
    return versions | libraries()
