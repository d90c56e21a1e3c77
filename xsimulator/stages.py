"""Describe the stages of a lane, and distribute a model's layers over the stages."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from xgpt.core.errors import InputError
from xgpt.core.schema import ClusterSpec, ModelSpec, Stage
from xgpt.core.schema.plan import num_groups


class StageShape(NamedTuple):
    """One pipeline stage, with the properties that determine its times and memory.

    Attributes:
        ep: number of parts into which the experts of a layer are divided.
        decoder_layers, encoder_layers: numbers of layers. All layers of a decoder-only model are decoder layers.
        far: whether the stage's input comes from another node.
    """

    tp: int
    decoder_layers: int
    encoder_layers: int = 0
    embeds: bool = False
    heads: bool = False
    far: bool = False
    ep: int = 1

    @property
    def group(self) -> tuple[int, int]:
        """Tensor-parallel and expert-parallel degree. They are the key of the layers' tables in a profile."""
        return self.tp, self.ep


Lane = tuple[StageShape, ...]


def is_grouped(lane: Lane) -> bool:
    """Return whether the stages are groups side by side, each with the whole model, instead of a pipeline."""
    return len(lane) > 1 and lane[1].embeds


def last_layers(lane: Lane) -> list[int]:
    """Return for each stage the number of its last decoder layer plus one."""
    layers = [stage.decoder_layers for stage in lane]
    return layers if is_grouped(lane) else list(accumulate(layers))


def whole(spec: ModelSpec, tp: int = 1, ep: int = 1) -> Lane:
    """Return a lane whose single stage has the whole model."""
    return (StageShape(tp, spec.num_layers, spec.num_encoder_layers, embeds=True, heads=True, ep=ep),)


def spread(num_layers: int, layer_s: Sequence[float], fixed_s: Sequence[float] | None = None) -> tuple[int, ...]:
    """Return the number of layers of each stage (at least one) that makes the slowest stage as fast as possible.

    Each layer in turn goes to the stage whose time is shortest with this layer. This is optimal, since every layer adds
    the same time to a stage.
    """
    if len(layer_s) > num_layers:
        says = f"the model has {num_layers} layers, and each stage holds at least one"
        raise InputError("stages", len(layer_s), says)
    fixed = fixed_s or [0.0] * len(layer_s)
    counts = [1] * len(layer_s)
    queue = [(fixed[i] + 2 * seconds, i) for i, seconds in enumerate(layer_s)]
    heapq.heapify(queue)
    for _ in range(num_layers - len(layer_s)):
        seconds, i = queue[0]
        counts[i] += 1
        heapq.heapreplace(queue, (seconds + layer_s[i], i))
    return tuple(counts)


def degrees(num_devices: int, tp_degree: int, tp_devices: int) -> tuple[int, ...]:
    """Return the tensor-parallel degree of each stage: `tp_devices` devices form groups of `tp_degree`, and each other
    device is a stage by itself.

    Source: ExeGPT sec. 4.2, Figure 4 (d).
    """
    groups = tp_devices // tp_degree if tp_degree > 1 else 0
    return (tp_degree,) * groups + (1,) * (num_devices - groups * tp_degree)


def lane(
    degrees: Sequence[int],
    decoder_layers: Sequence[int],
    encoder_layers: Sequence[int] | None = None,
    *,
    heads: bool = True,
    first_device: int = 0,
    cluster: ClusterSpec | None = None,
    ep: int = 1,
) -> Lane:
    """Return a lane of stages on consecutive devices.

    Args:
        ep: number of parts into which each group of several devices divides the experts. A lane with a single group may
            have more parts than devices, and then shares the experts with other replicas.
        heads: whether the lane computes tokens. The encode lane of an encoder-decoder does not.
        first_device: index in the cluster of the lane's first device. It determines the hops between nodes.
    """
    encoder = encoder_layers or [0] * len(degrees)
    stages, device, node = [], first_device, -1
    per_node = cluster.devices_per_node if cluster is not None else None
    for i, tp in enumerate(degrees):
        starts_on = device // per_node if per_node else 0
        stages.append(
            StageShape(
                tp,
                decoder_layers[i],
                encoder[i],
                embeds=i == 0,
                heads=heads and i == len(degrees) - 1,
                far=i > 0 and starts_on != node,
                ep=ep if tp > 1 or len(degrees) == 1 else 1,
            )
        )
        device += tp
        node = (device - 1) // per_node if per_node else 0
    return tuple(stages)


def lane_of(stages: Sequence[Stage], cluster: ClusterSpec, *, heads: bool = True) -> Lane:
    layers = [stage.decode_layers[1] - stage.decode_layers[0] for stage in stages]
    if num_groups(stages) > 1:
        shapes = zip(stages, layers, strict=True)
        return tuple(StageShape(s.tp, number, embeds=True, heads=heads, ep=s.ep) for s, number in shapes)
    encoder = [
        0 if stage.encode_layers is None else stage.encode_layers[1] - stage.encode_layers[0] for stage in stages
    ]
    found = lane([stage.tp for stage in stages], layers, encoder, heads=heads)
    nodes = [{device // cluster.devices_per_node for device in stage.devices} for stage in stages]
    return tuple(
        shape._replace(far=i > 0 and nodes[i].isdisjoint(nodes[i - 1]), ep=stage.ep)
        for i, (shape, stage) in enumerate(zip(found, stages, strict=True))
    )
