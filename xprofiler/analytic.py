"""Compute a profile from a datasheet: a roofline for each operator, with one set of efficiencies per kind of device.

    product of n tokens with W weights   max(2 n W / (FLOP/s eff), bytes(W) / (bandwidth eff)) + fixed
    the same for experts                 sum over the busiest device's experts; unused experts are not read
    attention of prompts of length L     FLOPs (1 + half length / L) / (FLOP/s eff) + fixed
    attention of decode                  K/V bytes / (bandwidth eff) + fixed
    all-reduce of b bytes over t         2 (t-1)/t b / (link eff) + fixed, or 2 (t-1) hops
    from one device to another           b / (link eff) + one hop

A group of t devices divides matrices, heads and vocabulary evenly. If a model has several kinds of layers
(`ModelSpec.kinds`), a layer's times are the mean over all layers. Latent attention decodes on latent vectors, which
every device of a group stores completely. A recurrent block reads and writes its state. Sparse attention scores all
tokens with its index, and reads only the tokens with the best scores. The list of operators is from ExeGPT sec. 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InputError
from xgpt.core.schema import (
    BYTES_PER_ELEMENT,
    Block,
    ClusterSpec,
    CrossTimes,
    Curve,
    DType,
    Efficiency,
    EncoderLayerTimes,
    EngineSpec,
    Experts,
    Indexer,
    LatentAttention,
    LayerTimes,
    Link,
    ModelSpec,
    Part,
    Precision,
    Profile,
    Quantization,
    Recurrent,
    Surface,
)
from xprofiler import launches
from xprofiler.experts import Routing

T = TypeVar("T", float, npt.NDArray[np.float64])

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
NUM_PRODUCTS = 4
"""Number of matrix products in a layer without cross-attention: one for Q, K and V together, one for attention's
output, two for the feed-forward block.
"""
LENGTHS = (1, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

A40_EFFICIENCY = Efficiency(
    matrix=0.66,
    attention=0.66,
    weights=0.90,
    kv=0.80,
    bus=0.59,
    links=0.8,
    layer_s=20e-6,
    step_s=200e-6,
    source="ExeGPT Table 6: OPT-13B on four A40",
)


def profile(
    spec: ModelSpec,
    cluster: ClusterSpec,
    dtype: DType,
    engine: EngineSpec | None = None,
    kv_dtype: DType | None = None,
    shared: int = 0,
) -> Profile:
    """Return a profile with tables for every tensor-parallel degree that fits in a node and way to divide experts.

    Args:
        shared: a further number of devices among which replicas may divide the experts.
        engine: the serving engine. The profile includes its time per step and per request. None means the time per step
            in the device's efficiencies.
    """
    kernels = Kernels(cluster, dtype, engine, kv_dtype)
    degrees = tp_degrees(spec, cluster)
    return Profile(
        source="analytic",
        model=spec.shape,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=cluster.device.name,
        devices_per_node=cluster.devices_per_node,
        engine=None if engine is None else engine.framework,
        engine_version=None if engine is None else engine.version,
        layers=tuple(
            _layer(spec, kernels, tp, ep) for tp, ep in groups(spec, cluster) + shared_groups(spec, cluster, shared)
        ),
        encoder_layers=tuple(_encoder_layer(spec, kernels, degree) for degree in degrees)
        if spec.is_encoder_decoder
        else (),
        embedding=curve(lambda n: kernels.copy(2 * n * spec.hidden_size), TOKENS),
        head=_head(spec, kernels, 1),
        overhead=loop(kernels.efficiency.step_s, engine),
        **transfers(spec, cluster, dtype, kv_dtype, engine),
        provenance={"efficiency": kernels.efficiency.source}
        | ({} if engine is None else {"serving loop": f"configs/engines, {engine.name}"}),
    )


def groups(spec: ModelSpec, cluster: ClusterSpec) -> tuple[tuple[int, int], ...]:
    """Return pairs (tensor-parallel degree t, expert-parallel degree). The second is 1 or, with experts, also t."""
    degrees = tp_degrees(spec, cluster)
    experts = [kind.experts for kind in spec.kinds if kind.experts is not None]
    if not experts:
        return tuple((t, 1) for t in degrees)
    return tuple(
        (t, ep)
        for t in degrees
        for ep in dict.fromkeys((1, t))
        if all(_shares_experts(each, t // ep, ep) for each in experts)
    )


def shared_groups(spec: ModelSpec, cluster: ClusterSpec, shared: int = 0) -> tuple[tuple[int, int], ...]:
    """Return pairs (t, n) for which n / t tensor-parallel groups of t devices divide the experts among all n devices:
    those of a node, of all linked nodes, or `shared`.
    """
    found = [kind.experts for kind in spec.kinds if kind.experts is not None]
    sizes = dict.fromkeys((*_linked(cluster), shared))
    if not found or cluster.intra_node is None:
        return ()
    return tuple(
        (t, size)
        for t in tp_degrees(spec, cluster)
        for size in sizes
        if size > t and size % t == 0 and all(experts.number % size == 0 for experts in found)
    )


def _linked(cluster: ClusterSpec) -> tuple[int, int]:
    return cluster.devices_per_node, cluster.devices_per_node if cluster.inter_node is None else cluster.num_devices


def as_searched(profile: Profile, cluster: ClusterSpec) -> Profile:
    """Return a profile without the groups that only `shared` has added, which plans are not searched for."""
    layers = [each for each in profile.layers if each.ep_degree <= each.tp_degree or each.ep_degree in _linked(cluster)]
    return profile if len(layers) == len(profile.layers) else profile.but(layers=tuple(layers))


def _shares_experts(experts: Experts, slices: int, ep: int) -> bool:
    return experts.ffn_size % slices == 0 and experts.number % ep == 0


def tp_degrees(spec: ModelSpec, cluster: ClusterSpec) -> tuple[int, ...]:
    """Return the tensor-parallel degrees: those that fit in a node and evenly divide heads and feed-forward blocks.

    If there are fewer key/value heads than devices, several devices hold copies of a head.
    """
    most = cluster.devices_per_node if cluster.intra_node is not None else 1
    return tuple(t for t in range(1, most + 1) if all(_shares_evenly(kind, t) for kind in spec.kinds))


def _shares_evenly(kind: Block, t: int) -> bool:
    experts = kind.experts
    if experts is not None and not any(_shares_experts(experts, t // ep, ep) for ep in (1, t)):
        return False
    if kind.ffn_size % t or (kind.recurrent is not None and kind.recurrent.num_heads % t):
        return False
    if (attention := kind.attention) is None:
        return True
    kv_heads = attention.num_kv_heads
    return attention.num_heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)


class Transfers(TypedDict):
    hop: Curve | None
    inter_node_hop: Curve | None
    kv_transfer: Curve | None


def transfers(
    spec: ModelSpec, cluster: ClusterSpec, dtype: DType, kv_dtype: DType | None = None, engine: EngineSpec | None = None
) -> Transfers:
    efficiency = cluster.device.efficiency or A40_EFFICIENCY
    hidden_bytes = spec.hidden_size * state_bytes(cluster, dtype, engine)
    kv_bytes = spec.kv_bytes_per_token(kv_dtype or dtype)

    def sent(link: Link | None, token_bytes: int, hops: int) -> Curve | None:
        if link is None:
            return None
        rate = link.bandwidth_bytes_per_s * efficiency.links
        return curve(lambda n: n * token_bytes / rate + hops * link.latency_s, TOKENS)

    return {
        "hop": sent(cluster.intra_node, hidden_bytes, 1),
        "inter_node_hop": sent(cluster.inter_node, hidden_bytes, 1),
        # Copies into and out of host memory overlap, one layer apart, so together they take two latencies and the time
        # of one copy.
        "kv_transfer": sent(cluster.host, kv_bytes, 2),
    }


def state_bytes(cluster: ClusterSpec, dtype: DType, engine: EngineSpec | None = None) -> int:
    """Return the bytes per element of hidden states and logits that devices exchange. With float8 weights, it is 2."""
    framework = None if engine is None else engine.framework
    return BYTES_PER_ELEMENT[Precision.of(dtype, cluster.device.type, framework).state]


class Kernels:
    """Computes the time of each operator on one kind of device, in seconds.

    Attributes:
        elementwise: share of the datasheet's memory bandwidth that norms and activation functions achieve in half
            precision.
        of_head: computes the times of the output head. With float8 weights, the head is bfloat16.
    """

    def __init__(
        self, cluster: ClusterSpec, dtype: DType, engine: EngineSpec | None = None, kv_dtype: DType | None = None
    ) -> None:
        device = cluster.device
        rate, bandwidth = device.flops_per_s.get(dtype), device.memory_bandwidth_bytes_per_s
        if rate is None or bandwidth is None:
            lacking = f"flops_per_s.{dtype}" if rate is None else "memory_bandwidth_bytes_per_s"
            says = f"it states no {lacking}; add it to its YAML file"
            raise InputError("cluster.device", device.name, says)
        efficiency = device.efficiency or A40_EFFICIENCY
        self.elementwise, self._bus, self._all_reduce_s = efficiency.kv, efficiency.bus, efficiency.all_reduce_s
        is_halved = dtype == "float8" and "bfloat16" in device.flops_per_s
        self.of_head = Kernels(cluster, "bfloat16", engine, kv_dtype) if is_halved else self
        if dtype == "float8" and device.efficiency_float8 is not None:
            efficiency = device.efficiency_float8
        self.engine = engine
        times = {} if engine is None else {"layer_s": engine.layer_s, "step_s": engine.step_s}
        self.efficiency = efficiency.but(**{k: value for k, value in times.items() if value is not None})
        self._rate, self._bandwidth = rate, bandwidth
        self._eight_bits = max(rate, device.flops_per_s.get("float8", rate))
        self.size, self.kv_dtype = BYTES_PER_ELEMENT[dtype], kv_dtype or dtype
        self.state = state_bytes(cluster, dtype, engine)
        self._link, self._far_link, self._per_node = cluster.intra_node, cluster.inter_node, cluster.devices_per_node

    def matrix(
        self, tokens: float, params: float, num_products: float = 1, stored: Quantization | None = None
    ) -> float:
        """Return the seconds of `num_products` matrix products, whose weights have `params` elements in all."""
        compute_s, read_s = self._per_weight(stored)
        return max(tokens * params * compute_s, params * read_s) + num_products * self.efficiency.product_s

    def grouped(self, tokens: float, params: float, routing: Routing, stored: Quantization | None = None) -> float:
        """Return seconds of the busiest device's experts. An expert has two products, with `params` weights in all."""
        compute_s, read_s = self._per_weight(stored)
        loads, hits = routing.expected(tokens)
        least_s = 2 * self.efficiency.product_s if self.efficiency.experts_s is None else self.efficiency.experts_s
        return float(params * np.maximum(loads * compute_s, hits * read_s).sum()) / self.efficiency.experts + least_s

    def _per_weight(self, stored: Quantization | None) -> tuple[float, float]:
        """Return two times in seconds: to multiply one weight by one token, and to read one weight."""
        rate, size = self._rate, float(self.size)
        if stored is not None:
            size = min(size, stored.bytes_per_weight)
            rate = self._eight_bits if stored.computes_in_eight_bits else rate
        return 2 / (rate * self.efficiency.matrix), size / (self._bandwidth * self.efficiency.weights)

    def prompt_attention(self, batch: int, length: int, heads_dim: float, *, causal: bool) -> float:
        flops = (2 if causal else 4) * batch * length * (length + self.efficiency.attention_half_length) * heads_dim
        return flops / (self._rate * self.efficiency.attention) + self.efficiency.attention_s

    def decode_attention(self, batch: int, context: int, kept_bytes: float) -> float:
        return batch * context * kept_bytes / (self._bandwidth * self.efficiency.kv) + self.efficiency.attention_s

    def latent_attention(self, batch: int, context: int, heads: float, latent: LatentAttention) -> float:
        kept = latent.kept_per_token
        read = batch * context * kept * BYTES_PER_ELEMENT[self.kv_dtype] / (self._bandwidth * self.efficiency.kv)
        flops = 2 * batch * context * heads * (kept + latent.kv_rank)
        return max(read, flops / (self._rate * self.efficiency.attention)) + self.efficiency.attention_s

    def index(self, pairs: float, read_bytes: float, indexer: Indexer) -> float:
        """Return seconds in which sparse attention's index scores pairs, all of them on every device, in eight bits."""
        flops = 2 * pairs * indexer.num_heads * indexer.head_dim
        read_s = read_bytes / (self._bandwidth * self.efficiency.kv)
        return max(read_s, flops / (self._eight_bits * self.efficiency.attention)) + self.efficiency.attention_s

    def recurrence(self, batch: int, length: int, recurrent: Recurrent, t: int) -> float:
        share = min(t, recurrent.num_heads)
        moved_s = 2 * batch * recurrent.state_bytes / share / (self._bandwidth * self.efficiency.kv)
        flops = 6 * batch * length * recurrent.state_elements / share
        return max(moved_s, flops / (self._rate * self.efficiency.attention)) + self.efficiency.attention_s

    def copy(self, elements: float) -> float:
        return elements * self.state / self._bandwidth

    def all_reduce(self, elements: float, devices: int) -> float:
        """Return the seconds of an all-reduce. Data goes around a ring twice, and each hop carries 1 / `devices` of it.
        `all_reduce_s` in the device's efficiencies replaces the hops' latencies.
        """
        return self._around(elements, devices, 2)

    def all_gather(self, elements: float, devices: int) -> float:
        return self._around(elements, devices, 1)

    def exchange(self, sent_bytes: float, devices: int) -> float:
        """Return the seconds of an all-to-all. Each device sends `sent_bytes`, in equal parts, to all devices.

        Traffic within nodes and between nodes overlaps. Each device is assumed to have its own network adapter.
        """
        assert self._link is not None
        near = min(devices, self._per_node)
        fixed = self._all_reduce_s or self._link.latency_s
        near_s = sent_bytes * (near - 1) / devices / (self._link.bandwidth_bytes_per_s * self._bus)
        if near == devices:
            return near_s + fixed
        assert self._far_link is not None, "shared_groups offers no group of several nodes without a link"
        far_s = sent_bytes * (devices - near) / devices / (self._far_link.bandwidth_bytes_per_s * self.efficiency.links)
        return max(near_s, far_s) + self._far_link.latency_s

    def _around(self, elements: float, devices: int, times: int) -> float:
        if devices == 1:
            return 0.0
        assert self._link is not None, "tp_degrees offers no group without a link"
        rate = self._link.bandwidth_bytes_per_s * self._bus
        num_hops = times * (devices - 1)
        fixed = self._all_reduce_s
        return num_hops * elements * self.state / devices / rate + (
            num_hops * self._link.latency_s if fixed is None else fixed
        )


def _layer(spec: ModelSpec, kernels: Kernels, t: int, ep: int) -> LayerTimes:
    kv_heads = max(1.0, spec.num_kv_heads / t)
    cross, cross_kv_params = None, 0.0
    if spec.is_encoder_decoder:
        cross_kv_params = 2 * spec.hidden_size * kv_heads * spec.head_dim
        kept_bytes = spec.kv_bytes_of(spec.kinds[0], kernels.kv_dtype, t)
        cross = CrossTimes(
            keys_values=curve(lambda n: kernels.matrix(n, cross_kv_params), TOKENS),
            attention=surface(lambda b, length: kernels.decode_attention(b, length, kept_bytes)),
        )
    products, num_all_reduces = _products(spec, kernels, t, ep, cross_kv_params), all_reduces(spec)

    if ep > t:
        num_all_reduces -= _share_with_experts(spec)

    def rest(tokens: int) -> float:
        shared = num_all_reduces * kernels.all_reduce(tokens * spec.hidden_size, t)
        if spec.norms_span_heads:
            shared += kernels.all_reduce(
                8 * tokens / kernels.state, t
            )  # sums of squares of queries and keys, in float32
        return products(tokens) + shared + kernels.efficiency.layer_s

    encode_attention, decode_attention = _attention(spec, kernels, t)
    encode_attention = launches.added(encode_attention, spec, t, kernels.engine)
    return LayerTimes(
        tp_degree=t,
        ep_degree=ep,
        rest=curve(rest, TOKENS),
        encode_attention=encode_attention,
        decode_attention=decode_attention,
        cross=cross,
        head=None if t == 1 else _head(spec, kernels, t),
    )


def all_reduces(spec: ModelSpec) -> float:
    """Return the mean number of all-reduces per layer: one after attention or recurrence, one after cross-attention,
    and one after the feed-forward block.
    """
    if spec.is_encoder_decoder:
        return 3
    of_kind = [
        (kind.attention is not None or kind.recurrent is not None) + bool(kind.ffn_size or kind.experts)
        for kind in spec.kinds
    ]
    return mean_over_layers(spec, of_kind)


def _share_with_experts(spec: ModelSpec) -> float:
    return mean_over_layers(spec, [float(kind.experts is not None) for kind in spec.kinds])


def mean_over_layers(spec: ModelSpec, values: Sequence[T]) -> T:
    if len(values) == 1:
        return values[0]
    counts = [len(kind.layers) for kind in spec.kinds]
    first, *others = (value * count for value, count in zip(values, counts, strict=True))
    return sum(others, first) / sum(counts)  # type: ignore[return-value]


def _products(spec: ModelSpec, kernels: Kernels, t: int, ep: int, left_out: float) -> Callable[[int], float]:
    """Return a function from a step's number of tokens to the seconds of a layer's matrix products on a group's busiest
    device.

    Copies of key/value heads are not counted.

    Args:
        left_out: number of weights to leave out, since another table has the times of their products.
    """
    if spec.is_encoder_decoder:
        params = spec.decoder_layer_params / t - left_out
        return lambda tokens: kernels.matrix(tokens, params, NUM_PRODUCTS + 2, spec.quantization)
    of_kinds = [_products_of(spec, kind, kernels, t, ep) for kind in spec.kinds]
    return lambda tokens: mean_over_layers(spec, [of_kind(tokens) for of_kind in of_kinds])


def _products_of(spec: ModelSpec, kind: Block, kernels: Kernels, t: int, ep: int) -> Callable[[int], float]:
    sizes, stored, experts = spec.sizes, spec.quantization, kind.experts
    by_format: dict[Quantization | None, list[float]] = {}

    def add(part: Part, params: float, products: int) -> None:
        found = by_format.setdefault(None if stored is None else stored.of(part), [0.0, 0])
        found[0], found[1] = found[0] + params, found[1] + products

    unshared = sizes.unshared(kind)
    mixers = (kind.attention is not None) + (kind.recurrent is not None)
    if mixers:
        add("attention", (sizes.mixer(kind) - unshared) / t + unshared, 2 * mixers)
    if kind.ffn_size:
        add("dense", sizes.dense(kind) / t, 2)
    if experts is None:
        groups = list(by_format.items())
        return lambda tokens: sum(kernels.matrix(tokens, params, n, form) for form, (params, n) in groups)
    add("shared", sizes.beside_experts(kind) / t, 1 + 2 * (experts.shared_ffn_size > 0))
    groups = list(by_format.items())
    routing, each = Routing(experts, ep), sizes.expert(kind) / max(1, t // ep)
    of_experts = None if stored is None else stored.of("experts")
    sharing = max(1, ep // t)
    # Tokens are sent in eight bits if the experts compute in eight bits; results come back in the activations' type.
    there = 1 if of_experts is not None and of_experts.computes_in_eight_bits else kernels.size
    sent = experts.active * experts.width_in(spec.hidden_size) / t

    def seconds(tokens: int) -> float:
        others = sum(kernels.matrix(tokens, params, n, form) for form, (params, n) in groups)
        if sharing > 1:
            others += kernels.exchange(tokens * sent * there, ep) + kernels.exchange(tokens * sent * kernels.state, ep)
        return others + kernels.grouped(tokens * sharing, each, routing, of_experts)

    return seconds


def _attention(spec: ModelSpec, kernels: Kernels, t: int) -> tuple[Surface, Surface]:
    kinds = [Mixing(spec, kind, kernels, t) for kind in spec.kinds]
    return (
        surface(lambda b, length: mean_over_layers(spec, [kind.prompt(b, length) for kind in kinds])),
        surface(lambda b, length: mean_over_layers(spec, [kind.decode(b, length) for kind in kinds])),
    )


class Mixing:
    def __init__(self, spec: ModelSpec, kind: Block, kernels: Kernels, t: int) -> None:
        self._kernels, self._kind, self._t = kernels, kind, t
        if (attention := kind.attention) is not None:
            self._heads = attention.num_heads / t
            self._width = (attention.head_dim + attention.values) / 2
            # A layer that keeps no K/V reads as much of an earlier layer.
            keeping = kind.but(attention=attention.but(keeps=True))
            self._kept_bytes = spec.kv_bytes_of(keeping, kernels.kv_dtype, t) - attention.index_bytes

    def prompt(self, batch: int, length: int) -> float:
        kernels, seconds = self._kernels, 0.0
        if self._kind.recurrent is not None:
            seconds += kernels.recurrence(batch, length, self._kind.recurrent, self._t)
        if (attention := self._kind.attention) is None:
            return seconds
        reach, indexer = attention.window, attention.indexer
        if indexer is not None:
            reach = indexer.top_k + (attention.window or 0)
            if not indexer.is_shared:
                seconds += kernels.index(batch * length * length / 2 / attention.compression, 0.0, indexer)
        elif attention.compression > 1:
            reach = round(length / 2 / attention.compression) + (attention.window or 0)
        if reach is None or length <= reach:
            return seconds + kernels.prompt_attention(batch, length, self._heads * self._width, causal=True)
        # Each token beyond the first window attends to a whole window; tokens within it attend to half of it on
        # average.
        fixed = kernels.efficiency.attention_s
        inside = kernels.prompt_attention(batch, reach, self._heads * self._width, causal=True) - fixed
        return seconds + inside * (1 + 2 * (length - reach) / reach) + fixed

    def decode(self, batch: int, context: int) -> float:
        kernels, seconds = self._kernels, 0.0
        if self._kind.recurrent is not None:
            seconds += kernels.recurrence(batch, 1, self._kind.recurrent, self._t)
        if (attention := self._kind.attention) is None:
            return seconds
        reach, indexer = context // attention.compression, attention.indexer
        if indexer is not None:
            if not indexer.is_shared:
                seconds += kernels.index(batch * reach, batch * context * attention.index_bytes, indexer)
            reach = min(reach, indexer.top_k)
        if attention.window is not None:
            reach = min(context, attention.window if attention.compression == 1 else reach + attention.window)
        if attention.latent is not None:
            return seconds + kernels.latent_attention(batch, reach, self._heads, attention.latent)
        return seconds + kernels.decode_attention(batch, reach, self._kept_bytes)


def _encoder_layer(spec: ModelSpec, kernels: Kernels, t: int) -> EncoderLayerTimes:
    heads_dim = spec.num_heads * spec.head_dim / t

    def rest(tokens: int) -> float:
        shared = 2 * kernels.all_reduce(tokens * spec.hidden_size, t)
        products = kernels.matrix(tokens, spec.encoder_layer_params / t, NUM_PRODUCTS)
        return products + shared + kernels.efficiency.layer_s

    return EncoderLayerTimes(
        tp_degree=t,
        rest=curve(rest, TOKENS),
        attention=surface(lambda b, length: kernels.prompt_attention(b, length, heads_dim, causal=False)),
    )


def _head(spec: ModelSpec, kernels: Kernels, t: int) -> Curve:
    def head(rows: int) -> float:
        product = kernels.of_head.matrix(rows, spec.vocab_size * spec.hidden_size / t)
        return product + kernels.all_gather(rows * spec.vocab_size, t)

    return curve(head, BATCHES)


def loop(step_s: float, engine: EngineSpec | None) -> Curve:
    each = 0.0 if engine is None else engine.request_s or 0.0
    return curve(lambda n: step_s + n * each, (1, BATCHES[-1]))


def curve(seconds: Callable[[int], float], points: Iterable[int]) -> Curve:
    points = tuple(points)
    return Curve(points=points, seconds=tuple(map(seconds, points)))


def surface(seconds: Callable[[int, int], float]) -> Surface:
    rows = tuple(tuple(seconds(b, length) for length in LENGTHS) for b in BATCHES)
    return Surface(batches=BATCHES, lengths=LENGTHS, seconds=rows)
