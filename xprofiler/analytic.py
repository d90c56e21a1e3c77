"""A profile from the datasheet: roofline per operator, one set of efficiencies a device kind.

Source: ExeGPT sec. 3 names what is profiled; the efficiencies put ExeGPT Table 6 within 12% on an A40.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from xgpt.errors import InputError
from xgpt.schema import BYTES_PER_ELEMENT, ClusterSpec, Curve, DType, LayerTimes, ModelSpec, Profile, Surface

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LENGTHS = (1, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Efficiency(NamedTuple):
    """Shares of the datasheet's rates that kernels reach, and the fixed costs beside them."""

    matrix: float
    weights: float
    kv: float
    layer_launch_s: float
    step_s: float


EFFICIENCY = Efficiency(matrix=0.66, weights=0.90, kv=0.80, layer_launch_s=20e-6, step_s=200e-6)


def profile(spec: ModelSpec, cluster: ClusterSpec, dtype: DType) -> Profile:
    """Compute the tables of one device.

    Raises:
        InputError: the cluster's device has no rate for this dtype, or the family is not covered.
    """
    device = cluster.device
    rate, bandwidth = device.flops_per_s.get(dtype), device.memory_bandwidth_bytes_per_s
    if rate is None or bandwidth is None:
        raise InputError(
            "cluster.device", device.name, f"it states no {dtype} rate or no memory bandwidth; add them to its YAML"
        )
    if spec.is_encoder_decoder:
        raise InputError("model", spec.name, "encoder-decoder models cannot be planned yet; take a decoder-only one")
    size, eff = BYTES_PER_ELEMENT[dtype], EFFICIENCY

    def matrix(tokens: int, params: int) -> float:
        compute = 2 * tokens * params / (rate * eff.matrix)
        return max(compute, params * size / (bandwidth * eff.weights))

    def rest(tokens: int) -> float:
        return matrix(tokens, spec.decoder_layer_params) + eff.layer_launch_s

    def encode_attention(batch: int, length: int) -> float:
        # Causal: half of the length^2 products, for scores and for values.
        flops = 2 * batch * length**2 * spec.num_heads * spec.head_dim
        return flops / (rate * eff.matrix)

    def decode_attention(batch: int, context: int) -> float:
        kv_bytes = 2 * batch * context * spec.num_kv_heads * spec.head_dim * size
        return kv_bytes / (bandwidth * eff.kv)

    def surface(seconds: Callable[[int, int], float]) -> Surface:
        return Surface(
            batches=BATCHES,
            lengths=LENGTHS,
            seconds=tuple(tuple(seconds(b, length) for length in LENGTHS) for b in BATCHES),
        )

    layer = LayerTimes(
        rest=Curve(points=TOKENS, seconds=tuple(map(rest, TOKENS))),
        encode_attention=surface(encode_attention),
        decode_attention=surface(decode_attention),
    )
    embed_s = [2 * tokens * spec.hidden_size * size / bandwidth for tokens in TOKENS]
    head_s = [matrix(tokens, spec.vocab_size * spec.hidden_size) for tokens in BATCHES]
    return Profile(
        source="analytic",
        model=spec.name,
        dtype=dtype,
        device=device.name,
        layers=(layer,),
        embedding=Curve(points=TOKENS, seconds=tuple(embed_s)),
        head=Curve(points=BATCHES, seconds=tuple(head_s)),
        overhead=Curve(points=(1, BATCHES[-1]), seconds=(eff.step_s, eff.step_s)),
    )
