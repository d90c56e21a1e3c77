"""List the placements of a model on a cluster: replicas, pipeline stages, partial tensor parallelism, WAA's two lanes.

A replica has n devices. In each lane, the first `tp_devices` devices form groups of `tp_degree`, and each of the other
devices is a group by itself. Each group is a pipeline stage (ExeGPT sec. 4.2, Fig. 4d). Layers are distributed so that
the slowest stage is as fast as possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

from xgpt.core.schema import ClusterSpec, EngineSpec, ModelSpec, PlanDraft, Profile, TensorParallel
from xscheduler.engine_limits import why_not_divided
from xsimulator.costs.curves import Grid, Line
from xsimulator.forecast import CHOICES
from xsimulator.lengths import Lengths
from xsimulator.stages import Lane, degrees, is_grouped, lane, lane_of, spread, whole

PLACED = ("tp", "tp_devices", "ep", "pp", "replicas", "microbatches", "encode_microbatches", "decode_microbatches")
"""The variables of a placement that a user can fix. Without `tp_devices`, `tp` is the tensor-parallel degree of every
stage. With `tp_devices`, `tp` is the degree of the groups only, and `tp_devices` is the number of a replica's devices
in groups. `pp` is the number of the decode lane's stages.
"""
MAX_SPLITS = 6
"""Largest number of values of `tp_devices` to try for a degree."""
FEW_DEVICES = 8
"""With up to this many devices, every size of a replica and every division into WAA's two lanes is tried."""
TYPICAL_BATCH = 32
"""Decode batch for which layers are distributed over stages, and devices over WAA's two lanes."""


@dataclass(frozen=True)
class LanePlacement:
    tp: TensorParallel
    lane: Lane

    @cached_property
    def num_devices(self) -> int:
        return sum(stage.tp for stage in self.lane)

    @property
    def num_stages(self) -> int:
        return len(self.lane)

    @property
    def shares_experts(self) -> bool:
        return self.tp.ep_degree > self.tp.degree

    @property
    def is_uniform(self) -> bool:
        return len({stage.tp for stage in self.lane}) == 1


@dataclass(frozen=True)
class Placement:
    """The distribution of a model over devices: all of a plan except its policy and the policy's searched variables."""

    replicas: int
    layouts: tuple[LanePlacement, ...]
    fixed: dict[str, Any]

    @property
    def encode_lane(self) -> Lane:
        return self.layouts[0].lane

    @property
    def decode_lane(self) -> Lane:
        return self.layouts[-1].lane

    @property
    def num_groups(self) -> int:
        return len(self.encode_lane) if is_grouped(self.encode_lane) else 1

    @property
    def num_devices(self) -> int:
        return sum(layout.num_devices for layout in self.layouts)

    @cached_property
    def microbatches(self) -> int:
        fixed = self.fixed
        return int(fixed.get("microbatches") or fixed.get("decode_microbatches") or 1)

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(stage.tp for layout in self.layouts for stage in layout.lane)

    @property
    def is_even(self) -> bool:
        return all(layout.is_uniform for layout in self.layouts)

    @property
    def is_uniform(self) -> bool:
        """Whether a replica has one lane of equal stages. Other planners consider only such replicas."""
        return len(self.layouts) == 1 and self.is_even

    def has(self, fixed: Mapping[str, int]) -> bool:
        shapes = [shape for layout in self.layouts for shape in layout.lane]
        in_groups = {layout.tp.degree for layout in self.layouts if layout.tp.devices}
        values = {"replicas": {self.replicas}, "pp": {len(self.decode_lane)}}
        values |= {"tp": {shape.tp for shape in shapes}, "ep": {shape.ep for shape in shapes}}
        values |= {"tp_devices": {sum(layout.tp.devices for layout in self.layouts)}}
        if "tp_devices" in fixed:
            values["tp"] = in_groups
        return all(values.get(name, {self.fixed.get(name, 1)}) == {fixed[name]} for name in PLACED if name in fixed)

    @classmethod
    def of(cls, plan: PlanDraft) -> Placement:
        policy = plan.policy
        searched = {"kind", *policy.tuned, *(variable.name for variable in policy.variables)}
        fixed = {name: getattr(policy, name) for name in type(policy).model_fields if name not in searched}
        layouts = []
        for name in dict.fromkeys(stage.lane for stage in plan.stages):
            stages = [stage for stage in plan.stages if stage.lane == name]
            grouped = [stage.tp for stage in stages if stage.tp > 1]
            ep = max(stage.ep for stage in stages)
            tp = TensorParallel(degree=max(grouped, default=1), devices=sum(grouped), ep_degree=ep)
            heads = name != "encode" or not plan.model.is_encoder_decoder
            layouts.append(LanePlacement(tp, lane_of(stages, plan.cluster, heads=heads)))
        return cls(plan.replicas, tuple(layouts), fixed)


class Placements:
    """Lists placements.

    Args:
        in_groups: whether prompts may also be encoded by several groups side by side, each with the whole model.
    """

    def __init__(
        self,
        model: ModelSpec,
        cluster: ClusterSpec,
        profile: Profile,
        lengths: Lengths,
        max_devices: int | None = None,
        engine: EngineSpec | None = None,
        *,
        in_groups: bool = False,
    ) -> None:
        self._model, self._in_groups = model, in_groups
        self._cluster = cluster
        self._profile = profile
        self._lengths = lengths
        self._groups = [group for group in profile.groups if why_not_divided(model, engine, *group) is None]
        self.num_devices = min(cluster.num_devices, max_devices or cluster.num_devices)
        self._shared: dict[tuple[int, int, bool, bool, int], tuple[LanePlacement, ...]] = {}
        self._seconds: dict[tuple[tuple[int, int], bool, bool, bool], float] = {}
        self._heads: dict[int, float] = {}
        self._spread: dict[tuple[tuple[int, ...], int, int, bool, bool], tuple[int, ...]] = {}

    def of(self, kind: str) -> list[Placement]:
        """Return all placements for a policy. Devices may be left idle.

        On N devices there are floor(N/n) replicas of n devices. Up to N = 8, every possible placement is included.
        """
        found, num_lanes = [], len(CHOICES[kind].settings.lanes)
        for size in _sizes(self.num_devices):
            replicas = self.num_devices // size
            layouts = self._two_lanes(kind, size, replicas) if num_lanes == 2 else self.one_lane(kind, size, replicas)
            found += list(layouts)
        return found

    @cached_property
    def widest(self) -> Lane:
        sizes = reversed(_sizes(self.num_devices))
        found = (layout for size in sizes for layout in self._standing(size, self.num_devices // size))
        return next(found).lane

    def one_lane(self, kind: str, size: int, replicas: int) -> Iterator[Placement]:
        for layout in self._standing(size, replicas):
            tp = {"tp_degree": layout.tp.degree, "tp_devices": layout.tp.devices, "ep_degree": layout.tp.ep_degree}
            for fixed in CHOICES[kind].microbatches(_microbatches(layout.num_stages)):
                yield Placement(replicas, (layout,), tp | fixed)

    def _standing(self, size: int, replicas: int) -> Iterator[LanePlacement]:
        return (
            layout
            for layout in self.layouts(size)
            if self._fits_nodes((layout,), replicas) and not replicas % max(1, layout.tp.ep_degree // size)
        )

    def _two_lanes(self, kind: str, size: int, replicas: int) -> Iterator[Placement]:
        for encoders, allocations in self._allocations(size).items():
            allocation = next((each for each in allocations if CHOICES[kind].takes({"allocation": each})), None)
            if allocation is None:
                continue
            groups = () if self._cluster.devices_per_node % size else self._groups_on(encoders)
            for encode in (*self.layouts(encoders, decode=False), *groups):
                for decode in self.layouts(size - encoders, encode=False, first_device=encoders):
                    if encode.shares_experts or decode.shares_experts:
                        continue
                    if not self._fits_nodes((encode, decode), replicas):
                        continue
                    for count in sorted({1, decode.num_stages}):
                        fixed = {
                            "allocation": allocation,
                            "encode_tp": encode.tp,
                            "decode_tp": decode.tp,
                            "decode_microbatches": count,
                        }
                        yield Placement(replicas, (encode, decode), fixed)

    def _groups_on(self, size: int) -> Iterator[LanePlacement]:
        for degree, ep in self._groups if self._in_groups and self._profile.hop is not None else ():
            if size > degree >= ep and not size % degree:
                tp = TensorParallel(degree=degree, devices=size if degree > 1 else 0, ep_degree=ep)
                yield LanePlacement(tp, whole(self._model, degree, ep) * (size // degree))

    def layouts(
        self, size: int, *, encode: bool = True, decode: bool = True, first_device: int = 0
    ) -> tuple[LanePlacement, ...]:
        """Return all lanes on `size` devices in which every stage has at least one layer and consecutive stages are
        linked.
        """
        key = (size, first_device, encode, decode, 0)
        if key not in self._shared:
            self._shared[key] = tuple(self._layouts(size, encode, decode, first_device))
        return self._shared[key]

    def _layouts(self, size: int, encode: bool, decode: bool, first_device: int) -> Iterator[LanePlacement]:
        model, profile = self._model, self._profile
        for degree, ep in self._groups:
            if ep > degree and size != degree:
                continue  # replicas that share experts have only one stage
            for tp_devices in _splits(size, degree):
                tps = degrees(size, degree, tp_devices)
                if len(tps) > 1 and profile.hop is None:
                    continue
                encoder = None
                if model.is_encoder_decoder:
                    encoder = self._shares(tps, ep, model.num_encoder_layers, encode, False) if encode else None
                    decoder = self._shares(tps, ep, model.num_layers, False, decode) if decode else (0,) * len(tps)
                    if encode and encoder is None:
                        continue
                else:
                    decoder = self._shares(tps, ep, model.num_layers, encode, decode)
                if decoder is None:
                    continue
                heads = decode or not model.is_encoder_decoder
                stages = lane(
                    tps, decoder, encoder, heads=heads, first_device=first_device, cluster=self._cluster, ep=ep
                )
                if any(stage.far for stage in stages) and profile.inter_node_hop is None:
                    continue
                yield LanePlacement(TensorParallel(degree=degree, devices=tp_devices, ep_degree=ep), stages)

    def _shares(
        self, tps: tuple[int, ...], ep: int, num_layers: int, encode: bool, decode: bool
    ) -> tuple[int, ...] | None:
        if len(tps) > num_layers:
            return None
        key = tps, ep, num_layers, encode, decode
        if key not in self._spread:
            self._spread[key] = self._spread_over(*key)
        return self._spread[key]

    def _spread_over(
        self, tps: tuple[int, ...], ep: int, num_layers: int, encode: bool, decode: bool
    ) -> tuple[int, ...]:
        groups = [(tp, ep if tp > 1 or len(tps) == 1 else 1) for tp in tps]
        layer_s = [self._layer_seconds(group, encode, decode) for group in groups]
        fixed_s = [0.0] * len(tps)
        fixed_s[-1] = (encode + decode * self._lengths.mean_decodes) * self._head_seconds(tps[-1])
        fixed_s[-1] += self._layer_seconds(groups[-1], encode, decode, is_last=True) - layer_s[-1]
        return spread(num_layers, layer_s, fixed_s)

    def _head_seconds(self, tp: int) -> float:
        if tp not in self._heads:
            self._heads[tp] = float(Line.of(self._profile.head_of(tp))(TYPICAL_BATCH)) / TYPICAL_BATCH
        return self._heads[tp]

    def _layer_seconds(self, group: tuple[int, int], encode: bool, decode: bool, *, is_last: bool = False) -> float:
        key = (group, encode, decode, is_last)
        if key not in self._seconds:
            lengths, layer, batch = self._lengths, self._profile.layer(*group), TYPICAL_BATCH
            seconds, tokens = 0.0, batch * lengths.mean_input
            of_tokens = Line.of(layer.last if is_last and layer.last is not None else layer.rest)
            if encode:
                rest, attention = of_tokens, Grid(layer.encode_attention)
                if self._profile.encoder_layers:
                    encoder = self._profile.encoder_layer(group[0])
                    rest, attention = Line.of(encoder.rest), Grid(encoder.attention)
                seconds += float(rest(tokens) + attention(batch, lengths.mean_input)) / batch
            if decode:
                attention = Grid(layer.decode_attention)
                step = of_tokens(batch) + attention(batch, lengths.mean_decode_context)
                seconds += lengths.mean_decodes * float(step) / batch
            self._seconds[key] = seconds
        return self._seconds[key]

    def _allocations(self, size: int) -> dict[int, tuple[str, ...]]:
        """WAA-C divides devices by computing time (ExeGPT sec. 4.1: ceil(N C_E / (C_E + C_D))), WAA-M by memory. Each
        number to try stands for the allocation whose computed number is nearer to it, or for both.
        """
        if size < 2:
            return {}
        encode = self._num_encoder_layers * self._layer_seconds((1, 1), True, False)
        decode = self._model.num_layers * self._layer_seconds((1, 1), False, True)
        by_compute = min(ceil(size * encode / (encode + decode)), size - 1)
        by_memory = min(max(self._encoders_by_memory(size), 1), size - 1)
        near = {center + step for center in (by_compute, by_memory) for step in (-1, 0, 1)}
        tried = range(1, size) if size <= FEW_DEVICES else sorted(near & set(range(1, size)))
        names = ("compute", "memory")
        away = {n: (abs(n - by_compute), abs(n - by_memory)) for n in tried}
        return {
            n: tuple(name for name, distance in zip(names, far, strict=True) if distance == min(far))
            for n, far in away.items()
        }

    @property
    def _num_encoder_layers(self) -> int:
        return self._model.num_encoder_layers or self._model.num_layers

    def _encoders_by_memory(self, size: int) -> int:
        """Return the number of encode devices for which all devices hold equal numbers of bytes, if K/V fills the
        decode lane's free memory.
        """
        model, dtype = self._model, self._profile.dtype
        device = self._cluster.device
        total = size * device.memory_bytes * device.usable_memory
        weights = model.weight_bytes(dtype)
        encode = weights * (model.num_encoder_layers / (model.num_encoder_layers + model.num_layers) or 1.0)
        decode = weights - encode if model.is_encoder_decoder else weights
        kv = max(total - encode - decode, 0.0)
        return round(size * encode / (encode + decode + kv))

    def _fits_nodes(self, layouts: tuple[LanePlacement, ...], replicas: int) -> bool:
        per_node = self._cluster.devices_per_node
        size = sum(layout.num_devices for layout in layouts)
        widest = max(layout.tp.degree for layout in layouts)
        if all(n % widest == 0 for n in (per_node, size, layouts[0].num_devices)):
            return True
        begin, groups = 0, []
        for layout in layouts:
            tp = layout.tp.degree
            groups += [(begin + first, tp) for first in range(0, layout.tp.devices, tp)]
            begin += layout.num_devices
        offsets = {replica * size % per_node for replica in range(replicas)}
        return all((offset + first) % per_node + tp <= per_node for offset in offsets for first, tp in groups)


def _sizes(num_devices: int) -> list[int]:
    steps = {
        n for n in range(1, num_devices + 1) if n <= FEW_DEVICES or n % max(2, 2 ** ((n - 1).bit_length() - 3)) == 0
    }
    return sorted(steps | {num_devices // replicas for replicas in range(1, num_devices + 1)})


def _splits(size: int, degree: int) -> Iterator[int]:
    if degree == 1:
        yield 0
        return
    groups = size // degree
    step = max(1, -(-groups // MAX_SPLITS))
    yield from (degree * count for count in range(groups, 0, -step))


def _microbatches(num_stages: int) -> list[int]:
    """With fewer micro-batches than stages, some stages idle. With more, the steps are smaller."""
    return sorted({1, num_stages, 2 * num_stages}) if num_stages > 1 else [1]
