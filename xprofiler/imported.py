"""Compute a profile from AIConfigurator's published latencies, from its wheel or a folder.

The folder of a kind of device contains `<family of operators>/<framework>/<version>/<operator>_perf.parquet`, with
latencies in milliseconds. Matrix products, attention and all-reduces come from these tables. All other times (norms,
activations, hops between stages, K/V transfer) come from the datasheet, as `provenance` states.

Between a table's points, the logarithm of latency is interpolated over the logarithm of size. This is exact for power
laws. Beyond the last point, latency is proportional to size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InputError
from xgpt.core.schema import (
    BYTES_PER_ELEMENT,
    Attention,
    Block,
    ClusterSpec,
    Curve,
    DType,
    EngineSpec,
    Experts,
    LayerTimes,
    ModelSpec,
    Part,
    Profile,
    Quantization,
    Recurrent,
    Surface,
)
from xprofiler import analytic, launches
from xprofiler.attention_tables import latent_attention, recurrence, within_window
from xprofiler.experts import ExpertTable, Routing, stored_as
from xprofiler.tables import Tables, mean_surface

PACKAGE = "aiconfigurator_core"

SYSTEMS = {
    "a100-sxm4-80gb": "a100_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "h100-80gb-hbm3": "h100_sxm",
    "h200": "h200_sxm",
    "l40s": "l40s",
    "rtx-pro-6000": "rtx_pro_6000_server",
}

TABLE_DTYPES: Mapping[DType, str] = {"float16": "bfloat16", "bfloat16": "bfloat16", "float8": "fp8"}


def profile(
    spec: ModelSpec,
    cluster: ClusterSpec,
    dtype: DType,
    engine: EngineSpec,
    folder: Path | None = None,
    kv_dtype: DType | None = None,
) -> Profile:
    """Return a profile from the tables, for every tensor-parallel degree that fits in a node and each way to divide
    experts.

    Args:
        folder: a folder of one kind of device, or with a subfolder for each kind, named as in `SYSTEMS`. None means the
            installed wheel's tables.
    """
    if spec.is_encoder_decoder:
        raise InputError("model", spec.name, "tables can be imported only for decoder-only models")
    if dtype not in TABLE_DTYPES:
        raise InputError("dtype", dtype, f"tables can be imported only for {', '.join(TABLE_DTYPES)}")
    root = _folder_of(cluster.device.name, folder)
    kept = TABLE_DTYPES[kv_dtype or dtype]
    tables = Tables(root, engine.framework, TABLE_DTYPES[dtype], kept, cluster.device, engine.version)
    kernels = analytic.Kernels(cluster, dtype)
    layers = tuple(ImportedLayers(spec, cluster, tables, kernels, engine).all())
    return Profile(
        source="imported",
        model=spec.shape,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=cluster.device.name,
        devices_per_node=cluster.devices_per_node,
        engine=engine.framework,
        engine_version=engine.version,
        layers=layers,
        embedding=analytic.curve(lambda n: kernels.copy(2 * n * spec.hidden_size), TOKENS),
        head=head(spec, tables, kernels, 1),
        overhead=analytic.loop(engine.step_s or 0.0, engine),
        **analytic.transfers(spec, cluster, dtype, kv_dtype, engine),
        provenance={
            **tables.provenance,
            "norms, activations, embedding, hops, K/V transfer": "datasheet",
            "serving loop": f"configs/engines, {engine.name}",
        },
        environment=_package() if folder is None else {"folder": root.name},
    )


def wheel_folder() -> Path:
    """Return the installed wheel's folder `systems`, which contains the tables."""
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        says = "it is not installed: pip install --no-deps aiconfigurator-core"
        raise InputError("import_from", "aiconfigurator", says)
    return Path(found.submodule_search_locations[0]) / "systems"


def _package() -> dict[str, str]:
    try:
        return {"aiconfigurator-core": version("aiconfigurator-core")}
    except PackageNotFoundError:
        return {}


def _folder_of(device: str, folder: Path | None) -> Path:
    if folder is not None and (folder / "gemm").is_dir():
        return folder
    base = wheel_folder() / "data" if folder is None else folder
    root = base / SYSTEMS.get(device, device)
    if not (root / "gemm").is_dir():
        systems = sorted(name for name, system in SYSTEMS.items() if (base / system / "gemm").is_dir())
        says = f"{base} has tables for {', '.join(systems) or 'no device'}; choose one of these"
        raise InputError("cluster.device", device, says)
    return root


Array = npt.NDArray[np.float64]

TOKENS = tuple(sorted({*analytic.TOKENS, *(3 * n for n in analytic.TOKENS if 8 <= n <= 4096)}))


class ImportedLayers:
    """Computes the times of a model's layers for every way to divide them among devices."""

    def __init__(
        self, spec: ModelSpec, cluster: ClusterSpec, tables: Tables, kernels: analytic.Kernels, engine: EngineSpec
    ) -> None:
        self.spec, self.tables, self.kernels = spec, tables, kernels
        self._cluster, self._engine = cluster, engine
        dtype, _ = self.format_of("experts")
        routed = {kind.experts: kind.experts.width_in(spec.hidden_size) for kind in spec.kinds if kind.experts}
        self._experts = {
            experts: ExpertTable(tables, width, experts, dtype, rounds=engine.rounds_activations)
            for experts, width in routed.items()
        }
        self._halves = {
            experts: ExpertTable(tables, width, experts, "bfloat16")
            for experts, width in routed.items()
            if dtype == "int4_wo"
        }

    def all(self) -> Iterator[LayerTimes]:
        degrees = [t for t in analytic.tp_degrees(self.spec, self._cluster) if not t & (t - 1)]  # tables have no others
        if not self._experts:
            for t in degrees:
                yield self._layer((t, 1))
            return
        known = [{group for group in table.groups if group[0] in degrees} for table in self._experts.values()]
        groups, usual = set.intersection(*known), set(analytic.groups(self.spec, self._cluster))
        if not groups and (near := [table.nearest for table in self._experts.values() if table.nearest.groups]):
            width_in, each = near[0].width_in, near[0].experts
            self.tables.provenance["experts"] = (
                f"of {each.number} experts of {each.ffn_size}, {each.active} active, hidden size {width_in}, the "
                "nearest shape in the tables: scaled by the datasheet's ratios"
            )
        elif not groups:
            self.tables.provenance["experts"] = "datasheet: no table has a shape in this type"
        elif usual - groups:
            of_missing = ", ".join(f"{t} devices in {ep} parts" for t, ep in sorted(usual - groups))
            self.tables.provenance["experts"] = f"of {of_missing}: scaled by the datasheet's ratios"
        for group in sorted(groups | usual):
            yield self._layer(group)

    def format_of(self, part: Part) -> tuple[str, bool]:
        stored = self._stored(part)
        return stored_as(stored, self.tables.dtype), stored is not None and stored.finds_scales

    def _stored(self, part: Part) -> Quantization | None:
        return None if self.spec.quantization is None else self.spec.quantization.of(part)

    def _layer(self, group: tuple[int, int]) -> LayerTimes:
        spec, engine, (t, ep) = self.spec, self._engine, group
        tokens = np.asarray(TOKENS, float)
        slower, captured_tokens = engine.uncaptured or 1.0, engine.captured_tokens or 0
        distinct = {(kind.attention, kind.recurrent): kind for kind in spec.kinds}
        found = {key: self._mixer(kind, t, slower) for key, kind in distinct.items()}
        shares = [sum(len(k.layers) for k in spec.kinds if (k.attention, k.recurrent) == key) for key in found]
        mixers = [found[kind.attention, kind.recurrent] for kind in spec.kinds]
        rest = analytic.mean_over_layers(spec, [products for _, _, products in mixers])
        rest = rest + analytic.mean_over_layers(spec, [self._feed_forward(kind, group) for kind in spec.kinds])
        rest = rest + analytic.all_reduces(spec) * self.tables.all_reduce(tokens * spec.hidden_size, t)
        if spec.norms_span_heads:  # sums of squares of queries and keys, in float32
            rest = rest + self.tables.all_reduce(4 * tokens, t)
        # Read and written in half precision: two norms with residuals, rotations (which also write K/V), the
        # activation.
        elements = analytic.mean_over_layers(spec, [float(_moved(spec, kind, t)) for kind in spec.kinds])
        rest = rest + np.asarray([self.kernels.copy(n * elements) for n in TOKENS]) / self.kernels.elementwise
        captured = np.interp(captured_tokens, tokens, rest)
        rest = (engine.layer_s or 0.0) + np.where(tokens > captured_tokens, captured + slower * (rest - captured), rest)
        weights = [share / sum(shares) for share in shares]
        return LayerTimes(
            tp_degree=t,
            ep_degree=ep,
            rest=Curve(points=TOKENS, seconds=tuple(rest.tolist())),
            encode_attention=launches.added(
                mean_surface([encode for encode, _, _ in found.values()], weights), spec, t, engine
            ),
            decode_attention=mean_surface([decode for _, decode, _ in found.values()], weights),
            head=None if t == 1 else head(spec, self.tables, self.kernels, t),
        )

    # Blocks that mix tokens -------------------------------------------------------------------------------------

    def _mixer(self, kind: Block, t: int, slower: float) -> tuple[Surface, Surface, Array]:
        """Return the seconds of attention or recurrence for prompts and for decode, and those of the projections that
        these do not include. # third: [tokens]
        """
        dtype, finds_scales = self.format_of("attention")
        found: list[tuple[Surface, Surface, Array]] = []
        if kind.recurrent is not None:
            encode, decode = recurrence(self.tables, self.kernels, self.spec.hidden_size, kind.recurrent, t, slower)
            shapes = _recurrent_shapes(self.spec, kind.recurrent, t)
            found.append((encode, decode, self._in_turn(shapes, dtype, finds_scales=finds_scales)))
        if (attention := kind.attention) is not None:
            found.append(self._attention(kind, attention, t, slower))
        if not found:
            none = analytic.surface(lambda b, length: 0.0)
            return none, none, np.zeros(len(TOKENS))
        encodes, decodes, products = zip(*found, strict=True)
        ones = [1.0] * len(found)
        return mean_surface(encodes, ones), mean_surface(decodes, ones), sum(products, np.zeros(len(TOKENS)))

    def _attention(self, kind: Block, attention: Attention, t: int, slower: float) -> tuple[Surface, Surface, Array]:
        tables, heads, kv_heads = self.tables, attention.num_heads // t, max(1, attention.num_kv_heads // t)
        dtype, finds_scales = self.format_of("attention")
        if attention.latent is not None:
            latent = latent_attention(tables, self.spec.hidden_size, attention, t, dtype, slower)
            if latent is not None:
                encode, decode, shapes = latent
                each = (tables.product(TOKENS, *shape, dtype, finds_scales=finds_scales) for shape in shapes)
                return encode, decode, sum(each, np.zeros(len(TOKENS)))
        elif attention.indexer is None and attention.compression == 1:
            products = self._in_turn(attention_shapes(self.spec, attention, t), dtype, finds_scales=finds_scales)
            encode = tables.attention("context", heads, kv_heads, attention.head_dim, slower)
            decode = tables.attention("generation", heads, kv_heads, attention.head_dim)
            return (
                within_window(encode, attention.window, prompts=True),
                within_window(decode, attention.window, prompts=False),
                products,
            )
        tables.provenance["attention"] = "datasheet: no table has this kind"
        mixing = analytic.Mixing(self.spec, Block(layers=kind.layers, attention=attention), self.kernels, t)
        sizes, stored = self.spec.sizes, self._stored("attention")
        unshared = sizes.unshared(kind)
        params = (attention.params(self.spec.hidden_size) - unshared) / t + unshared
        products = np.asarray([self.kernels.matrix(n, params, 4, stored) for n in TOKENS])
        return analytic.surface(mixing.prompt), analytic.surface(mixing.decode), products

    def _in_turn(self, shapes: Sequence[tuple[float, float]], dtype: str, *, finds_scales: bool) -> Array:
        """Return the seconds of two consecutive matrix products. # [tokens]"""
        first, second = shapes
        before = self.tables.product(TOKENS, *first, dtype, finds_scales=finds_scales)
        return before + self.tables.product(TOKENS, *second, dtype, finds_scales=finds_scales, arrives_rounded=True)

    # Feed-forward blocks ----------------------------------------------------------------------------------------

    def _feed_forward(self, kind: Block, group: tuple[int, int]) -> Array:
        spec, t, experts = self.spec, group[0], kind.experts

        def block(width: int, part: Part) -> Array:
            dtype, finds_scales = self.format_of(part)
            return self._in_turn(ffn_shapes(spec, width), dtype, finds_scales=finds_scales)

        found = block(kind.ffn_size // t, "dense") if kind.ffn_size else np.zeros(len(TOKENS))
        if experts is None:
            return found
        found = found + self._routed(kind, group)
        found = found + self.tables.product(TOKENS, experts.number, spec.hidden_size, "bfloat16")
        if experts.shared_ffn_size:
            found = found + block(max(1, experts.shared_ffn_size // t), "shared")
        if experts.latent_size:
            found = found + 2 * self.tables.product(TOKENS, experts.latent_size, spec.hidden_size, "bfloat16")
        return found

    def _routed(self, kind: Block, group: tuple[int, int]) -> Array:
        """Return the seconds of the routed experts. If the group or the shape was not measured, the nearest one's times
        are scaled by the ratio of rooflines. # [tokens]
        """
        assert kind.experts is not None
        experts, stored, sizes = kind.experts, self._stored("experts"), self.spec.sizes

        def roofline(experts: Experts, params: int, group: tuple[int, int]) -> Array:
            routing, each = Routing(experts, group[1]), params / (group[0] // group[1])
            return np.asarray([self.kernels.grouped(n, each, routing, stored) for n in TOKENS])

        table, tokens = self._experts[experts], np.asarray(TOKENS, float)
        halves = self._halves.get(experts)
        if group in table.groups and halves is not None and group in halves.groups:
            return np.minimum(table.seconds(tokens, *group), self._unpacked(halves, stored, group))
        if group in table.groups:
            return table.seconds(tokens, *group)
        own, near = roofline(experts, sizes.expert(kind), group), table.nearest
        if not near.groups:
            return own
        t, ep = group
        like = min(near.groups, key=lambda other: (abs(np.log(other[0] / t)), abs(np.log(other[1] / ep))))
        params = sizes.products * near.width_in * near.experts.ffn_size
        return near.seconds(tokens, *like) * own / roofline(near.experts, params, like)

    def _unpacked(self, halves: ExpertTable, stored: Quantization | None, group: tuple[int, int]) -> Array:
        """Return the seconds of experts with 4-bit weights, estimated from those in half precision (`halves`). #
        [tokens]

        For INT4, the tables have only a generic kernel, which is up to four times as slow as half precision. Engines
        use Marlin's kernel. It reads 4-bit weights, and in the largest batches it is as fast as half precision.
        """
        assert stored is not None
        self.tables.provenance["experts in INT4"] = "no longer than in bfloat16, with fewer bytes to read"
        tokens, most = np.asarray(TOKENS, float), halves.most_tokens(*group)
        read = halves.seconds(tokens, *group) * stored.bytes_per_weight / BYTES_PER_ELEMENT["bfloat16"]
        multiplied = halves.seconds(np.asarray([most]), *group) * tokens / most
        return np.maximum(read, multiplied)


def head(spec: ModelSpec, tables: Tables, kernels: analytic.Kernels, t: int) -> Curve:
    rows = np.asarray(analytic.BATCHES, float)
    gathered = [kernels.all_gather(n * spec.vocab_size, t) for n in analytic.BATCHES]
    seconds = tables.product(rows, spec.vocab_size / t, spec.hidden_size, "bfloat16") + gathered
    return Curve(points=analytic.BATCHES, seconds=tuple(seconds.tolist()))


def attention_shapes(spec: ModelSpec, attention: Attention, t: int) -> list[tuple[float, float]]:
    heads, kv_heads = attention.num_heads // t, max(1, attention.num_kv_heads // t)
    out = heads * attention.values
    kept = kv_heads * (attention.head_dim + attention.values * attention.has_values) if attention.keeps else 0
    into = heads * attention.head_dim + kept + (out if attention.is_gated else 0)
    return [(into, spec.hidden_size), (spec.hidden_size, out)]


def _recurrent_shapes(spec: ModelSpec, recurrent: Recurrent, t: int) -> list[tuple[float, float]]:
    out = min(_values(recurrent), recurrent.weights / spec.hidden_size / 2)
    return [((recurrent.weights / spec.hidden_size - out) / t, spec.hidden_size), (spec.hidden_size, out / t)]


def _values(recurrent: Recurrent) -> float:
    """Return the width of all values of a recurrent block. Each head's state is assumed to be square."""
    return float(np.sqrt(recurrent.state_elements * recurrent.num_heads))


def ffn_shapes(spec: ModelSpec, width: int) -> list[tuple[float, float]]:
    return [((2 if spec.gated_ffn else 1) * width, spec.hidden_size), (spec.hidden_size, width)]


def _moved(spec: ModelSpec, kind: Block, t: int) -> float:
    elements = 8.0 * spec.hidden_size + (3 if spec.gated_ffn else 2) * (kind.ffn_size // t)
    if (attention := kind.attention) is not None:
        kept = max(1, attention.num_kv_heads // t) * attention.head_dim
        elements += 2 * (attention.num_heads // t * attention.head_dim + 2 * kept)
    if kind.recurrent is not None:  # the gated norm of the recurrent block's output
        elements += 3 * _values(kind.recurrent) / t
    return elements
