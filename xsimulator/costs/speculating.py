"""Convert a profile for speculative decoding, so that one step gives each request one token on average.

A decode step of b requests, each with k drafted tokens, sends (1 + k) b tokens through the model once. The draft has k
passes: the first reads as many tokens, and each other one b tokens. Each request gets T = `Speculation.tokens_per_step`
tokens on average. All other code counts one token for each request and step. So a step of the converted profile stands
for 1 / T of an engine step, and encodes 1 / T of the prompts of an engine step. If n tokens take f(n) seconds, this
step takes f((1 + k) b + T p) / T for b requests and p prompt tokens. A table f by tokens becomes F(n) = f(T n) / T,
which is exact for prompts. Decodes take F((1 + k) b / T) - F(b) more. This difference and the time of the draft's
passes are added to the table of decode attention.

Attention reads a request's K/V once for all tokens that are verified together.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from xgpt.core.schema import (
    BYTES_PER_ELEMENT,
    Attention,
    Curve,
    DType,
    LayerTimes,
    ModelSpec,
    Profile,
    Speculation,
    Surface,
)
from xsimulator.costs.curves import Array, Line

EAGLE3_VOCAB = 32000
"""Size of the vocabulary of an EAGLE-3 draft (arXiv 2503.01840, published checkpoints)."""
PASS_S = 0.15e-3


class Draft:
    """The size of a model's draft, and the cost of the draft's passes relative to the model.

    Attributes:
        layers: number of the draft's layers that store K/V of their own.
        params: number of weights in the draft's layer and in the projection of the model's hidden states.
        head_share: size of the draft's output head, relative to the model's.
    """

    def __init__(self, spec: ModelSpec, speculation: Speculation) -> None:
        kind, hidden, method = spec.kinds[-1], spec.hidden_size, speculation.method
        self.layers = 0 if method == "ngram" else 1
        self.head_share = {"ngram": 0.0, "eagle3": min(1.0, EAGLE3_VOCAB / spec.vocab_size)}.get(method, 1.0)
        attention = next((kind.attention for kind in reversed(spec.kinds) if kind.attention is not None), None)
        if method == "mtp":
            self.params = 2.0 * hidden * hidden + spec.sizes.whole(kind)
        elif method == "ngram" or attention is None:
            self.params = 0.0
        else:
            self.params = _eagle_params(spec, attention, states=3 if method == "eagle3" else 1)
        self._spec, self._is_own = spec, method == "mtp"

    def bytes(self, dtype: DType) -> float:
        """Return the bytes of the draft's weights. Only an EAGLE-3 draft has an output head of its own."""
        spec = self._spec
        size = spec.bytes_per_weight(dtype, "experts") if self._is_own else max(2, BYTES_PER_ELEMENT[dtype])
        own_head = EAGLE3_VOCAB * spec.hidden_size * 2 if 0 < self.head_share < 1 else 0
        return self.params * size + own_head

    def kept_bytes(self, dtype: DType, group: int) -> float:
        """Return the draft's K/V bytes per token on a device of a group. A layer of the draft stores as many bytes as a
        layer of the model."""
        kinds = [kind for kind in self._spec.kinds if kind.attention is not None and kind.attention.keeps]
        return self.layers * self._spec.kv_bytes_of(kinds[-1], dtype, group) if kinds else 0.0

    def share(self, dtype: DType, tokens: Array) -> Array:
        """Return the bytes that a pass of the draft reads, divided by those that a layer of the model reads."""
        spec = self._spec
        kind, sizes = max(spec.kinds, key=lambda kind: len(kind.layers)), spec.sizes
        read = sizes.mixer(kind) * spec.bytes_per_weight(dtype, "attention") + np.zeros_like(tokens)
        read += sizes.dense(kind) * spec.bytes_per_weight(dtype, "dense")
        read += sizes.beside_experts(kind) * spec.bytes_per_weight(dtype, "shared")
        if (experts := kind.experts) is not None:
            met = 1 - (1 - experts.active / experts.number) ** np.maximum(tokens, 1.0)
            read += met * experts.number * sizes.expert(kind) * spec.bytes_per_weight(dtype, "experts")
        if self._is_own:
            return np.ones_like(tokens)
        return self.params * max(2, BYTES_PER_ELEMENT[dtype]) / read


def _eagle_params(spec: ModelSpec, attention: Attention, states: int) -> float:
    hidden, dim = spec.hidden_size, attention.head_dim
    heads = attention.num_heads * dim + 2 * attention.num_kv_heads * dim
    width = max((kind.ffn_size for kind in spec.kinds), default=0) or 4 * hidden
    read = 2 * hidden if states > 1 else hidden
    joins = states * hidden * hidden if states > 1 else 2 * hidden * hidden
    return float(read * heads + attention.num_heads * dim * hidden + 3 * hidden * width + joins)


def speculating(profile: Profile, spec: ModelSpec, speculation: Speculation | None) -> Profile:
    """Return the profile of steps that give each request one token on average."""
    return profile if speculation is None else _speculating(_Same(profile), _Same(spec), speculation)


class _Same:
    """A cache key that is equal only for the same object. Comparing profiles by value would be slow."""

    def __init__(self, whole: Profile | ModelSpec) -> None:
        self.of = whole

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.of is self.of

    def __hash__(self) -> int:
        return id(self.of)


@lru_cache(maxsize=64)
def _speculating(profile_: _Same, spec_: _Same, speculation: Speculation) -> Profile:
    profile, spec = profile_.of, spec_.of
    assert isinstance(profile, Profile) and isinstance(spec, ModelSpec)
    each, draft = speculation.tokens_per_step, Draft(spec, speculation)
    passes = speculation.tokens * bool(draft.layers)
    loop = Line.of(profile.overhead)
    return profile.but(
        layers=tuple(_layer(layer, profile, spec, speculation, draft) for layer in profile.layers),
        embedding=_shortened(profile.embedding, each),
        head=_shortened(profile.head, each),
        overhead=_curve(profile.overhead.points, (loop(np.asarray(profile.overhead.points)) + passes * PASS_S) / each),
    )


def _layer(layer: LayerTimes, profile: Profile, spec: ModelSpec, speculation: Speculation, draft: Draft) -> LayerTimes:
    each, ahead, number = speculation.tokens_per_step, speculation.tokens, spec.num_layers
    rest, last = Line.of(layer.rest), Line.of(layer.last or layer.rest)
    head = Line.of(layer.head or profile.head)
    verified = speculation.verified

    def model(tokens: Array) -> Array:
        return (number - 1) * rest(tokens) + last(tokens) + head(tokens)

    def drafted(requests: Array) -> Array:
        """Return the seconds of all passes of the draft. The first pass reads all tokens of the last step."""
        if not draft.layers:
            return np.zeros_like(requests)
        share = draft.share(profile.dtype, requests)
        first, others = rest(verified * requests), (ahead - 1) * rest(requests)
        return share * (first + others) + ahead * draft.head_share * head(requests)

    decode = layer.decode_attention
    batches = np.unique(np.concatenate([decode.batches, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]])).astype(float)
    batches = batches[batches <= decode.batches[-1]]
    table = np.asarray(decode.seconds)
    attention = np.asarray([np.interp(batches, [0, *decode.batches], [0, *column]) for column in table.T]).T
    more = model(verified * batches) / each - model(each * batches) / each + drafted(batches) / each
    seconds = attention * (1 + ahead * draft.layers / number) / each + np.maximum(more, 0.0)[:, None] / number
    encode = layer.encode_attention
    return layer.but(
        rest=_shortened(layer.rest, each),
        last=None if layer.last is None else _shortened(layer.last, each),
        head=None if layer.head is None else _shortened(layer.head, each),
        encode_attention=encode.times(1 + draft.layers / number),
        decode_attention=Surface(
            batches=tuple(batches.astype(int).tolist()),
            lengths=decode.lengths,
            seconds=tuple(map(tuple, seconds.tolist())),
        ),
    )


def _shortened(curve: Curve, each: float) -> Curve:
    """Return the curve F(n) = f(each n) / each. Its points are the integers next to f's points divided by `each`."""
    points = np.asarray(curve.points) / each
    whole = np.unique(np.concatenate([np.floor(points), np.ceil(points)])).astype(int)
    whole = whole[whole >= (0 if curve.points[0] == 0 else 1)]
    return _curve(tuple(whole.tolist()), Line.of(curve)(each * whole) / each)


def _curve(points: tuple[int, ...], seconds: Array) -> Curve:
    return Curve(points=points, seconds=tuple(np.maximum(seconds, 0.0).tolist()))
