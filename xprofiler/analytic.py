"""A profile from the datasheet: roofline per operator, one set of efficiencies a device kind.

    product of n tokens with W weights   max(2 n W / (FLOP/s eff), bytes(W) / (bandwidth eff)) + fixed
    attention of prompts of length L     FLOPs (1 + half length / L) / (FLOP/s eff) + fixed
    attention of decode                  K/V bytes / (bandwidth eff) + fixed
    all-reduce of b bytes over t         2 (t-1)/t b / (link eff) + fixed, or 2 (t-1) hops
    from one device to another           b / (link eff) + one hop

A group of t devices shares matrices, heads and vocabulary evenly. Source: ExeGPT sec. 3 names what is profiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypedDict

from xgpt.errors import InputError
from xgpt.schema import (
    BYTES_PER_ELEMENT,
    ClusterSpec,
    CrossTimes,
    Curve,
    DType,
    Efficiency,
    EncoderLayerTimes,
    EngineSpec,
    LayerTimes,
    Link,
    ModelSpec,
    Profile,
    Surface,
)

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
NUM_PRODUCTS = 4
"""Of a layer without cross-attention: to Q, K and V together, from attention, into and out of feed-forward."""
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
"""For kinds of device that state none of their own."""


def profile(spec: ModelSpec, cluster: ClusterSpec, dtype: DType, engine: EngineSpec | None = None) -> Profile:
    """Compute the tables of every tensor-parallel degree that fits in a node.

    Args:
        engine: whose loop goes around the kernels; None: what the device's efficiencies say of any engine's.

    Raises:
        InputError: the cluster's device has no rate for this dtype.
    """
    check_known(spec)
    kernels = Kernels(cluster, dtype, engine)
    degrees = tp_degrees(spec, cluster)
    return Profile(
        source="analytic",
        model=spec.shape,
        dtype=dtype,
        device=cluster.device.name,
        devices_per_node=cluster.devices_per_node,
        engine=None if engine is None else engine.framework,
        engine_version=None if engine is None else engine.version,
        layers=tuple(_layer(spec, kernels, degree) for degree in degrees),
        encoder_layers=tuple(_encoder_layer(spec, kernels, degree) for degree in degrees)
        if spec.is_encoder_decoder
        else (),
        embedding=curve(lambda n: kernels.copy(2 * n * spec.hidden_size), TOKENS),
        head=_head(spec, kernels, 1),
        overhead=loop(kernels.efficiency.step_s, engine),
        **transfers(spec, cluster, dtype),
        provenance={"efficiency": kernels.efficiency.source}
        | ({} if engine is None else {"serving loop": f"configs/engines/{engine.name}.yaml"}),
    )


def check_known(spec: ModelSpec) -> None:
    """Refuse a model with parts that no times are known of.

    Raises:
        InputError: names the part.
    """
    for name in ("experts", "latent", "sliding_window", "quantization"):
        if getattr(spec, name) is not None:
            raise InputError(f"model.{name}", getattr(spec, name), f"{spec.name} cannot be planned for yet")


def tp_degrees(spec: ModelSpec, cluster: ClusterSpec) -> tuple[int, ...]:
    """Powers of two that a node holds and that share heads and feed-forward block evenly.

    Where there are fewer key/value heads than devices, devices hold copies of them.
    """
    most = cluster.devices_per_node if cluster.intra_node is not None else 1
    degrees = (2**i for i in range(most.bit_length()))
    return tuple(t for t in degrees if t <= most and _shares_evenly(spec, t))


def _shares_evenly(spec: ModelSpec, t: int) -> bool:
    kv_heads = spec.num_kv_heads
    return spec.num_heads % t == 0 and spec.ffn_size % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)


class Transfers(TypedDict):
    """The fields of a Profile that rest on the cluster's links alone."""

    hop: Curve | None
    inter_node_hop: Curve | None
    kv_transfer: Curve | None


def transfers(spec: ModelSpec, cluster: ClusterSpec, dtype: DType) -> Transfers:
    efficiency = cluster.device.efficiency or A40_EFFICIENCY
    hidden_bytes = spec.hidden_size * BYTES_PER_ELEMENT[dtype]
    kv_bytes = spec.kv_bytes_per_token(dtype)

    def sent(link: Link | None, token_bytes: int, hops: int) -> Curve | None:
        if link is None:
            return None
        rate = link.bandwidth_bytes_per_s * efficiency.links
        return curve(lambda n: n * token_bytes / rate + hops * link.latency_s, TOKENS)

    return {
        "hop": sent(cluster.intra_node, hidden_bytes, 1),
        "inter_node_hop": sent(cluster.inter_node, hidden_bytes, 1),
        # Into host memory and out of it at once, a layer behind: two latencies, and the time of one copy.
        "kv_transfer": sent(cluster.host, kv_bytes, 2),
    }


class Kernels:
    """Seconds of the operators on one kind of device.

    Raises:
        InputError: the device states no rate for the dtype, or no bandwidth.
    """

    def __init__(self, cluster: ClusterSpec, dtype: DType, engine: EngineSpec | None = None) -> None:
        device = cluster.device
        rate, bandwidth = device.flops_per_s.get(dtype), device.memory_bandwidth_bytes_per_s
        if rate is None or bandwidth is None:
            raise InputError(
                "cluster.device", device.name, f"it states no {dtype} rate or no memory bandwidth; add them to its YAML"
            )
        efficiency = device.efficiency or A40_EFFICIENCY
        own = {} if engine is None else {"layer_s": engine.layer_s, "step_s": engine.step_s}
        self.efficiency = efficiency.model_copy(update={k: value for k, value in own.items() if value is not None})
        self._rate, self._bandwidth = rate, bandwidth
        self.size = BYTES_PER_ELEMENT[dtype]
        self._link = cluster.intra_node

    def matrix(self, tokens: float, params: float, num_products: int = 1) -> float:
        """Return the seconds of products whose weights have `params` elements together."""
        compute = 2 * tokens * params / (self._rate * self.efficiency.matrix)
        read = params * self.size / (self._bandwidth * self.efficiency.weights)
        return max(compute, read) + num_products * self.efficiency.product_s

    def prompt_attention(self, batch: int, length: int, heads_dim: float, *, causal: bool) -> float:
        """Scores and values; a causal mask leaves half of the products out."""
        flops = (2 if causal else 4) * batch * length * (length + self.efficiency.attention_half_length) * heads_dim
        return flops / (self._rate * self.efficiency.attention) + self.efficiency.attention_s

    def decode_attention(self, batch: int, context: int, kv_heads_dim: float) -> float:
        read = 2 * batch * context * kv_heads_dim * self.size
        return read / (self._bandwidth * self.efficiency.kv) + self.efficiency.attention_s

    def copy(self, elements: float) -> float:
        return elements * self.size / self._bandwidth

    def all_reduce(self, elements: float, devices: int) -> float:
        """Twice around a ring, each hop carrying 1/t of the data, or in one kernel where the links allow for it."""
        return self._around(elements, devices, 2)

    def all_gather(self, elements: float, devices: int) -> float:
        """`elements` on each device in the end."""
        return self._around(elements, devices, 1)

    def _around(self, elements: float, devices: int, times: int) -> float:
        if devices == 1:
            return 0.0
        assert self._link is not None, "tp_degrees offers no group without a link"
        rate = self._link.bandwidth_bytes_per_s * self.efficiency.bus
        num_hops = times * (devices - 1)
        fixed = self.efficiency.all_reduce_s
        return num_hops * elements * self.size / devices / rate + (
            num_hops * self._link.latency_s if fixed is None else fixed
        )


def _layer(spec: ModelSpec, kernels: Kernels, t: int) -> LayerTimes:
    heads_dim = spec.num_heads * spec.head_dim / t
    kv_heads_dim = max(1, spec.num_kv_heads / t) * spec.head_dim
    # What a copied key/value head costs in weights is left out.
    params, num_products, num_all_reduces = spec.decoder_layer_params / t, NUM_PRODUCTS, 2
    cross = None
    if spec.is_encoder_decoder:
        cross_kv_params = 2 * spec.hidden_size * kv_heads_dim
        params, num_products, num_all_reduces = params - cross_kv_params, NUM_PRODUCTS + 2, 3
        cross = CrossTimes(
            keys_values=curve(lambda n: kernels.matrix(n, cross_kv_params), TOKENS),
            attention=surface(lambda b, length: kernels.decode_attention(b, length, kv_heads_dim)),
        )

    def rest(tokens: int) -> float:
        shared = num_all_reduces * kernels.all_reduce(tokens * spec.hidden_size, t)
        return kernels.matrix(tokens, params, num_products) + shared + kernels.efficiency.layer_s

    return LayerTimes(
        tp_degree=t,
        rest=curve(rest, TOKENS),
        encode_attention=surface(lambda b, length: kernels.prompt_attention(b, length, heads_dim, causal=True)),
        decode_attention=surface(lambda b, context: kernels.decode_attention(b, context, kv_heads_dim)),
        cross=cross,
        head=None if t == 1 else _head(spec, kernels, t),
    )


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
    """Each device makes its share of the vocabulary's logits; all get them."""

    def head(rows: int) -> float:
        product = kernels.matrix(rows, spec.vocab_size * spec.hidden_size / t)
        return product + kernels.all_gather(rows * spec.vocab_size, t)

    return curve(head, BATCHES)


def loop(step_s: float, engine: EngineSpec | None) -> Curve:
    """Seconds of an engine's loop for a step, against the requests in it."""
    each = 0.0 if engine is None else engine.request_s or 0.0
    return curve(lambda n: step_s + n * each, (1, BATCHES[-1]))


def curve(seconds: Callable[[int], float], points: Iterable[int]) -> Curve:
    points = tuple(points)
    return Curve(points=points, seconds=tuple(map(seconds, points)))


def surface(seconds: Callable[[int, int], float]) -> Surface:
    rows = tuple(tuple(seconds(b, length) for length in LENGTHS) for b in BATCHES)
    return Surface(batches=BATCHES, lengths=LENGTHS, seconds=rows)
