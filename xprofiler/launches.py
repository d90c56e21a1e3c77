"""Count the kernels that a layer launches, from the model's architecture, and add their time to steps that encode."""

from __future__ import annotations

import numpy as np

from xgpt.core.schema import Block, EngineSpec, ModelSpec, Surface


def of_layer(kind: Block, tp: int) -> int:
    """Return the number of kernels of a layer on one of tp devices, without fusions that engines may have."""
    found = 0
    if (attention := kind.attention) is not None:
        found += 6  # norm, Q/K/V, rotation, write to the cache, attention, output
        found += 5 if attention.latent is not None else 0  # two more norms, a second product for Q, two of the latents
        found += 3 if attention.indexer is not None else 0  # keys, scores, best scores
    if kind.recurrent is not None:
        found += kind.recurrent.launches
    if kind.ffn_size:
        found += 4  # norm, two products, activation
    if kind.experts is not None:
        found += 9  # norm, router, choice, two to sort tokens by expert, two products, activation, sum
        found += 4 if kind.experts.shared_ffn_size else 0
    if tp > 1:
        found += (attention is not None or kind.recurrent is not None) + bool(kind.ffn_size or kind.experts)
    return found


def added(encode: Surface, spec: ModelSpec, tp: int, engine: EngineSpec | None) -> Surface:
    if engine is None or not engine.launch_s:
        return encode
    mean = sum(of_layer(kind, tp) * len(kind.layers) for kind in spec.kinds) / spec.num_layers
    seconds = np.asarray(encode.seconds) + engine.launch_s * mean
    return encode.but(seconds=tuple(map(tuple, seconds.tolist())))
