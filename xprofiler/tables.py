"""Read imported tables of latencies, and interpolate the logarithms of latencies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InputError
from xgpt.core.schema import DeviceKind, Surface

Array = npt.NDArray[np.float64]

WIDTHS = {"fp8": 1.0, "nvfp4": 0.5625}
"""Bytes per element, by the start of the type's name in tables. Other types have two bytes."""
LEAST_S = 1e-12


class Tables:
    """The times of one kind of device under one serving framework, in seconds.

    A latency below the device's roofline is raised to it. Tables were measured in loops, in which data may stay in a
    cache. Between a model's steps, they do not. `provenance` states how many points were raised.

    Args:
        version: preferred version of the framework. None means the newest.
    """

    def __init__(
        self,
        root: Path,
        framework: str,
        dtype: str,
        kv_dtype: str | None = None,
        device: DeviceKind | None = None,
        version: str | None = None,
    ) -> None:
        self.root, self.framework, self.dtype, self._device = root, framework, dtype, device
        self._version = version
        self.kv_dtype = kv_dtype or dtype
        self.provenance: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self._products: dict[str, Grid3] = {}
        self._quantizing: dict[str, Grid2 | None] = {}
        self._attention: dict[str, dict[str, npt.NDArray[Any]]] = {}
        self._all_reduce: dict[str, npt.NDArray[Any]] | None = None

    def product(
        self,
        m: npt.ArrayLike,
        n: float,
        k: float,
        dtype: str | None = None,
        *,
        finds_scales: bool = True,
        arrives_rounded: bool = False,
    ) -> Array:
        """Return the seconds of the product of matrices [m, k] and [k, n].

        In the tables, times of FP8 products include that of computing the scale of [m, k], which the tables also have
        separately. If the checkpoint contains the scale, it is subtracted, but not below the device's roofline.

        FP8 products with block scales, and FP4 products, were measured with a launch for each product. Captured graphs
        avoid launches, so they take no longer than in bfloat16.

        Args:
            arrives_rounded: whether the kernel that computes [m, k] also rounds it, if the checkpoint contains the
                scale.
        """
        dtype = dtype or self.dtype
        if dtype == "fp8" and not finds_scales:
            return self._with_held_scales(m, n, k, arrives_rounded)
        if dtype in ("fp8_block", "nvfp4"):
            self.provenance[f"{dtype} products"] = "no longer than in bfloat16"
            return np.minimum(self._product(m, n, k, dtype), self._product(m, n, k, "bfloat16"))
        return self._product(m, n, k, dtype)

    def _with_held_scales(self, m: npt.ArrayLike, n: float, k: float, arrives_rounded: bool) -> Array:
        rows = np.asarray(m, float)
        whole_s = saved_s = self._product(rows, n, k, "fp8")
        for operator in ("computescale", "scale_matrix")[: 1 + arrives_rounded]:
            if operator not in self._quantizing:
                self._quantizing[operator] = self._quantizing_grid(operator)
            grid = self._quantizing[operator]
            if grid is None:
                self.provenance["scales of activations"] = "computed in each step, since no table has their time"
                return whole_s
            saved_s = saved_s - grid(rows, k) / 1e3
        self.provenance["scales of activations"] = "in the checkpoint, so not computed in a step"
        return np.minimum(whole_s, np.maximum(saved_s, self._least_s("fp8", "fp8", 2 * rows * n * k, n * k)))

    def _quantizing_grid(self, operator: str) -> Grid2 | None:
        """Return the milliseconds in which `operator` rounds [m, k] or computes its scale."""
        if not self._found("quantize", operator, self.framework):
            return None
        rows = self._read("quantize", operator, ("m", "k", "quant_dtype", "latency"), may_be_zero=True)
        chosen = rows["quant_dtype"] == "fp8"
        return Grid2(*(rows[name][chosen].astype(float) for name in ("m", "k", "latency")))

    def _product(self, m: npt.ArrayLike, n: float, k: float, dtype: str) -> Array:
        if dtype not in self._products:
            rows = self._read("gemm", "gemm", ("gemm_dtype", "m", "n", "k", "latency"))
            known = sorted(set(rows["gemm_dtype"].tolist()))
            chosen = rows["gemm_dtype"] == dtype
            if not chosen.any():
                says = f"the tables of {self.root.name} have matrix products only in {', '.join(known)}"
                raise InputError("dtype", dtype, says)
            ms, ns, ks, latency = (rows[name][chosen].astype(float) for name in ("m", "n", "k", "latency"))
            latency = self._lifted(f"gemm in {dtype}", latency, dtype, 2 * ms * ns * ks, ns * ks)
            self._products[dtype] = Grid3(ms, ns, ks, latency)
        return self._products[dtype](np.asarray(m, float), n, k) / 1e3

    def attention(self, phase: str, heads: int, kv_heads: int, head_dim: int, slower: float = 1.0) -> Surface:
        """Return seconds of attention: for whole prompts ("context"), or for one token per request ("generation")."""
        if phase not in self._attention:
            self._attention[phase] = self._attention_rows(phase)
        rows = self._attention[phase]
        size = min(set(rows["head_dim"].tolist()), key=lambda known: abs(np.log(known / head_dim)))
        sized = rows["head_dim"] == size
        dims = sized & (rows["kv_cache_dtype"] == self.kv_dtype)
        if not dims.any():
            dims = sized & (rows["kv_cache_dtype"] == "bfloat16")
            self.provenance[f"{phase} attention's K/V"] = f"as in bfloat16: no table has it in {self.kv_dtype}"
        if not dims.any():
            known = sorted(set(rows["kv_cache_dtype"][sized].tolist()))
            raise InputError(
                "kv_dtype",
                self.kv_dtype,
                f"the tables of {self.root.name} have times of attention only for K/V in {', '.join(known)}: choose "
                "such a type, or import other tables",
            )
        pairs = sorted(set(zip(rows["num_heads"][dims].tolist(), rows["kv_heads"][dims].tolist(), strict=True)))
        nearest = min(pairs, key=lambda pair: _distance(pair, (heads, kv_heads)))
        # The time for prompts depends on products (one for each head); the time for decode depends on reading K/V.
        # Kernels divide work by requests and heads in the same way, so twice the heads take as long as twice the batch.
        # Both products and reads are in proportion to the size of a head.
        times = (heads / nearest[0] if phase == "context" else kv_heads / nearest[1]) * head_dim / size
        if (*nearest, size) != (heads, kv_heads, head_dim):
            self.provenance[f"{phase} attention of {heads} heads of {head_dim}, {kv_heads} for K/V"] = (
                f"the time for {nearest[0]} heads of {size}, {nearest[1]} for K/V, at {times:g} times the batch"
            )
        chosen = dims & (rows["num_heads"] == nearest[0]) & (rows["kv_heads"] == nearest[1])
        length = (rows["isl"] + rows["step"])[chosen]
        batch = rows["batch_size"][chosen].astype(float)
        flops = reads = np.zeros(len(batch))
        if phase == "context":
            flops = 2 * batch * length.astype(float) ** 2 * nearest[0] * size
        else:
            reads = 2 * batch * length * nearest[1] * size
        kept = str(rows["kv_cache_dtype"][chosen][0])
        latency = self._lifted(f"{phase} attention", rows["latency"][chosen], kept, flops, reads)
        return surface_of(rows["batch_size"][chosen], length, latency * slower / 1e3, times)

    def _lifted(self, name: str, latency: Array, dtype: str, flops: Array, reads: Array) -> Array:
        # Attention computes in half precision, even if K/V have another type.
        computed = dtype if name.startswith("gemm") else "bfloat16"
        least = 1e3 * self._least_s(dtype, computed, flops, reads)
        below = latency < least
        if below.any():
            self.provenance[f"{name}, lifted"] = (
                f"{100 * np.mean(below):.2g}% of {len(below)} points were raised to the device's rates, at most by "
                f"a factor of {np.max(least / latency):.2f}"
            )
        return np.maximum(latency, least)

    def _least_s(self, read: str, computed: str, flops: Array, elements: Array | float) -> Array:
        """Return the device's roofline, in seconds: for FLOPs in the type `computed`, and elements read in the type
        `read`. It is 0 if unknown.
        """
        device = self._device
        if device is None or device.memory_bandwidth_bytes_per_s is None:
            return np.zeros(np.shape(flops))
        width = next((width for kind, width in WIDTHS.items() if read.startswith(kind)), 2.0)
        rate = device.flops_per_s.get("float8" if computed.startswith("fp8") else "bfloat16")
        rate = None if computed == "nvfp4" else rate  # the shipped datasheets have no rate for four bits
        least = np.broadcast_to(width * np.asarray(elements) / device.memory_bandwidth_bytes_per_s, np.shape(flops))
        return least if rate is None else np.maximum(least, flops / rate)

    def all_reduce(self, elements: npt.ArrayLike, devices: int) -> Array:
        if devices == 1:
            return np.zeros_like(np.asarray(elements, float))
        if self._all_reduce is None:
            self._all_reduce = self._all_reduce_rows()
        rows = self._all_reduce
        known = min(set(rows["num_gpus"].tolist()), key=lambda number: abs(np.log(number / devices)))
        if known != devices:
            self.provenance[f"all-reduce over {devices} devices"] = (
                f"that over {known}, by the bytes that a device sends"
            )
        chosen = rows["num_gpus"] == known
        sizes, first = np.unique(rows["message_size"][chosen], return_index=True)
        sent = (1 - 1 / devices) / (1 - 1 / known)  # of a ring
        seconds = sent * rows["latency"][chosen][first] / 1e3
        x = np.maximum(np.asarray(elements, float), 1)
        return np.exp(interpolate(np.log(x), np.log(sizes), np.log(seconds)))

    def _attention_rows(self, phase: str) -> dict[str, npt.NDArray[Any]]:
        names = ("batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim", "kv_cache_dtype")
        rows = self._read("attention", f"{phase}_attention", (*names, "attn_dtype", "latency"), ("window_size",))
        chosen = rows["attn_dtype"] != "fp8"
        if "window_size" in rows:
            chosen &= rows["window_size"] == 0
        rows = {name: column[chosen] for name, column in rows.items()}
        # Some tables contain 0 if the numbers of key/value heads and of heads are equal.
        kv_heads = rows["num_key_value_heads"]
        rows["kv_heads"] = np.where(kv_heads == 0, rows["num_heads"], kv_heads)
        return rows

    def _all_reduce_rows(self) -> dict[str, npt.NDArray[Any]]:
        """Return the table of all-reduces. Sizes are numbers of half-precision elements. If there are rows from
        captured graphs (vLLM), return only these.
        """
        names = ("num_gpus", "message_size", "kernel_source", "latency")
        rows = self._read("comm", "custom_allreduce", names)
        graph = np.char.endswith(rows["kernel_source"].astype(str), "_graph")
        chosen = graph if graph.any() else np.ones(len(graph), bool)
        return {name: column[chosen] for name, column in rows.items()}

    def _read(
        self, family: str, operator: str, columns: Sequence[str], optional: Sequence[str] = (), **how: bool
    ) -> dict[str, npt.NDArray[Any]]:
        path = self.paths(family, operator)[0]
        rows = self.read(path, columns, optional, **how)
        self.note(operator, path)
        return rows

    def paths(self, family: str, operator: str, framework: str | None = None) -> list[Path]:
        """Return the paths of an operator's tables: first the engine's version and later ones, ascending, then older
        ones, descending. Without a version, the newest comes first.
        """
        found = self._found(family, operator, framework or self.framework)
        if not found and framework is None:
            versions = sorted({path.parts[-3] for path in self.root.glob(f"{family}/*/*/{operator}_perf.parquet")})
            says = f"the tables have {operator} only for {', '.join(versions) or 'no version'}"
            raise InputError("framework", self.framework, says)
        found.sort(key=lambda path: _version_key(path.parts[-2]))
        if self._version is None or framework is not None:
            return found[::-1]
        own_version = _version_key(self._version)
        older = sum(_version_key(path.parts[-2]) < own_version for path in found)
        return [*found[older:], *found[:older][::-1]]

    def has(self, family: str, operator: str) -> bool:
        return bool(self._found(family, operator, self.framework))

    def _found(self, family: str, operator: str, framework: str) -> list[Path]:
        return list((self.root / family / framework).glob(f"*/{operator}_perf.parquet"))

    def read(
        self, path: Path, columns: Sequence[str], optional: Sequence[str] = (), *, may_be_zero: bool = False
    ) -> dict[str, npt.NDArray[Any]]:
        try:
            from pyarrow import ArrowInvalid, parquet
        except ImportError:
            says = "it needs pyarrow: pip install 'xgpt-serve[import]'"
            raise InputError("import_from", self.root.name, says) from None
        try:
            present = parquet.read_schema(path).names
            wanted = [*columns, *(name for name in optional if name in present)]
            table = parquet.read_table(path, columns=wanted)
            rows = {name: table.column(name).to_numpy(zero_copy_only=False) for name in wanted}
        except (ArrowInvalid, KeyError, OSError) as error:
            says = f"it must be a table with columns {', '.join(columns)}"
            raise InputError(str(path), type(error).__name__, says) from None
        latency = rows["latency"]
        if not len(latency) or not (np.isfinite(latency) & (latency >= 0 if may_be_zero else latency > 0)).all():
            raise InputError(f"{path}: latency", "empty, negative or NaN", "every latency must be above zero")
        return rows

    def note(self, operator: str, path: Path) -> None:
        self.provenance[operator] = "/".join(path.parts[-5:-1])
        self.versions[operator] = path.parts[-2]


class Grid3:
    """A function from (log m, log n, log k) to log(latency), linear between points. Beyond the last point, latency is
    proportional to size.
    """

    def __init__(self, m: Array, n: Array, k: Array, latency: Array) -> None:
        usual = np.logical_and.reduce([_usual(axis) for axis in (n, k)])
        m, n, k, latency = (values[usual] for values in (m, n, k, latency))
        axes, places = zip(*(np.unique(axis, return_inverse=True) for axis in (m, n, k)), strict=True)
        self.axes = [np.log(axis) for axis in axes]
        grid = np.full([len(axis) for axis in axes], np.nan)
        # If several kernels were measured, only the fastest counts.
        order = np.argsort(latency)[::-1]
        grid[tuple(place[order] for place in places)] = np.log(latency[order])
        self.grid = _filled(grid, self.axes)

    def __call__(self, m: Array, n: float, k: float) -> Array:
        by_m = interpolate(np.log(k), self.axes[2], interpolate(np.log(n), self.axes[1], self.grid, 1), 1)
        return np.exp(interpolate(np.log(m), self.axes[0], by_m))


class Grid2:
    """A function from (log m, log k) to latency, linear between points and constant beyond them."""

    def __init__(self, m: Array, k: Array, latency: Array) -> None:
        axes, places = zip(*(np.unique(axis, return_inverse=True) for axis in (m, k)), strict=True)
        self.axes = [np.log(axis) for axis in axes]
        self.grid = np.full([len(axis) for axis in axes], np.nan)
        self.grid[places] = latency
        if np.isnan(self.grid).any():
            says = "the table must contain every combination of m and k: import complete tables"
            raise InputError("latency", "missing", says)

    def __call__(self, m: Array, k: float) -> Array:
        by_m = [np.interp(np.log(k), self.axes[1], row) for row in self.grid]
        return np.interp(np.log(m), self.axes[0], by_m)


def _usual(values: Array) -> npt.NDArray[np.bool_]:
    """Return which points have a usual size. Some tables contain one model's unusual sizes, at too few points to
    interpolate.
    """
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    chosen: npt.NDArray[np.bool_] = (counts >= np.median(counts) / 4)[place]
    return chosen


def _filled(grid: Array, axes: Sequence[Array]) -> Array:
    for place in map(tuple, np.argwhere(np.isnan(grid))):
        for d in range(grid.ndim):
            before = (*place[:d], place[d] - 1, *place[d + 1 :])
            if place[d] > 0 and not np.isnan(grid[before]):
                grid[place] = grid[before] + axes[d][place[d]] - axes[d][place[d] - 1]
                break
        else:
            says = "the table must contain the point of the smallest sizes: import complete tables"
            raise InputError("latency", "missing", says)
    return grid


def interpolate(x: npt.ArrayLike, points: Array, values: Array, axis: int = 0) -> Array:
    """Interpolate along an axis. Sizes (`x`, `points`) and values are logarithms. Values are constant below the first
    point, and proportional to size beyond the last.
    """
    inside = np.clip(x, points[0], points[-1])
    i = np.clip(np.searchsorted(points, inside, side="right") - 1, 0, len(points) - 2)
    share = (inside - points[i]) / (points[i + 1] - points[i])
    low, high = np.take(values, i, axis), np.take(values, i + 1, axis)
    result: Array = low + share * (high - low) + np.maximum(x - points[-1], 0.0)
    return result


def surface_of(batch: Array, length: Array, seconds: Array, times: float = 1.0) -> Surface:
    batches, row = np.unique(batch, return_inverse=True)
    lengths, column = np.unique(length, return_inverse=True)
    grid = np.full((len(batches), len(lengths)), np.nan)
    grid[row, column] = np.log(seconds)
    for known in grid:  # interpolate lengths that lie between two measured lengths of this batch
        inside = np.flatnonzero(np.isfinite(known))
        between = slice(inside[0], inside[-1] + 1) if len(inside) else slice(0)
        known[between] = np.interp(np.log(lengths[between]), np.log(lengths[inside]), known[inside])
    grid = _filled(grid, [np.log(batches), np.log(lengths)])
    if times != 1:
        grid = np.stack([interpolate(np.log(batches * times), np.log(batches), column) for column in grid.T], axis=1)
    grid = np.exp(grid)
    return Surface(
        batches=tuple(batches.tolist()), lengths=tuple(lengths.tolist()), seconds=tuple(map(tuple, grid.tolist()))
    )


def mean_surface(surfaces: Sequence[Surface], weights: Sequence[float]) -> Surface:
    if len(surfaces) == 1 and weights[0] == 1:
        return surfaces[0]
    batches, lengths = (
        np.unique(np.concatenate([getattr(surface, axis) for surface in surfaces])) for axis in ("batches", "lengths")
    )
    total = np.zeros((len(batches), len(lengths)))
    for surface, weight in zip(surfaces, weights, strict=True):
        logs = np.log(np.maximum(np.asarray(surface.seconds), LEAST_S))
        for axis, points, known in ((0, batches, surface.batches), (1, lengths, surface.lengths)):
            x, at = np.log(points), np.log(known)
            logs = np.apply_along_axis(partial(interpolate, x, at), axis, logs)
        total += weight * np.exp(logs)
    return Surface(
        batches=tuple(batches.tolist()), lengths=tuple(lengths.tolist()), seconds=tuple(map(tuple, total.tolist()))
    )


def _distance(pair: tuple[int, int], wanted: tuple[int, int]) -> tuple[float, float]:
    """Return the distance between two pairs (heads, key/value heads). It compares first the number of heads per
    key/value head, then the number of key/value heads.
    """
    group, wanted_group = pair[0] / pair[1], wanted[0] / wanted[1]
    return abs(np.log(group / wanted_group)), abs(np.log(pair[1] / wanted[1]))


def _version_key(text: str) -> tuple[tuple[int, str], ...]:
    """Return a version's sort key: 1.10.0 is after 1.9.0, and 1.3.0 after 1.3.0rc20."""
    parts = re.findall(r"\d+|[a-z]+", text.lower())
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in [*parts, "0"])
