"""Plans as the planner makes them, for small checkpoints on CPU devices of a made-up datasheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from xgpt.checkpoints.files import read_spec
from xgpt.core.schema import (
    ClusterSpec,
    Constraint,
    DeviceKind,
    Efficiency,
    Histogram,
    Link,
    ModelShape,
    Plan,
    Workload,
)
from xprofiler import analytic
from xscheduler.placement import Placement, Placements
from xscheduler.problem import Problem
from xscheduler.schedule import Scheduler
from xscheduler.space import POLICIES
from xsimulator.lengths import Lengths

CPU = DeviceKind(
    name="cpu-core",
    type="cpu",
    memory_bytes=2**29,
    flops_per_s={"float32": 50e9, "bfloat16": 50e9},
    memory_bandwidth_bytes_per_s=10e9,
    efficiency=Efficiency(
        matrix=0.7, attention=0.5, weights=0.8, kv=0.7, bus=0.7, links=0.7, layer_s=5e-5, step_s=3e-4, source="made up"
    ),
)
SHORT = Workload(
    name="short",
    input=Histogram(lengths=(1, 20, 60), probabilities=(0.3, 0.5, 0.2)),
    output=Histogram(lengths=(1, 8, 16), probabilities=(0.2, 0.6, 0.2)),
)


def cpus(num_devices: int) -> ClusterSpec:
    """Return CPU devices on one machine, for which a datasheet profile stands."""
    link = Link(bandwidth_bytes_per_s=5e9, latency_s=5e-5)
    return ClusterSpec(name="cpus", device=CPU, devices_per_node=num_devices, intra_node=link, host=link)


def problem_of(directory: Path, num_devices: int) -> Problem:
    """Return the planning problem of a checkpoint on `num_devices` CPU devices, without a latency bound."""
    spec, cluster = read_spec(directory), cpus(num_devices)
    profile = analytic.profile(spec, cluster, "float32")
    return Problem(spec, str(directory), cluster, SHORT, profile, Constraint())


def placements_of(problem: Problem, kind: str) -> list[Placement]:
    """Where one replica on all of the problem's devices may stand."""
    found = Placements(problem.model, problem.cluster, problem.profile, Lengths(problem.workload)).of(kind)
    return [placement for placement in found if placement.num_devices == problem.cluster.num_devices]


def planned(problem: Problem, kind: str, placement: Placement | None = None) -> Plan:
    """The policy's best plan, on one placement or wherever is best."""
    return Scheduler(replace(problem, placement=placement)).best([kind])


def scored(problem: Problem, kind: str, degrees: Sequence[Sequence[int]], microbatches: int, **values: int) -> Plan:
    """The plan of these values of a policy's variables, on lanes of these tensor-parallel degrees."""
    placement = next(
        placement
        for placement in placements_of(problem, kind)
        if [[stage.tp for stage in layout.lane] for layout in placement.layouts] == [list(lane) for lane in degrees]
        and placement.microbatches == microbatches
    )
    return Scheduler(problem).score(POLICIES[kind](**placement.fixed, **values), placement)


def num_params(spec: ModelShape, *, active: bool = False) -> int:
    """Number of weights in matrices, or of those that a token passes; biases, norms and positions are under 1%."""
    idle = 0
    if active and spec.experts is not None:
        idle = (spec.experts.number - spec.experts.active) * sum(
            len(kind.layers) * spec.sizes.expert(kind) for kind in spec.kinds
        )
    encoder = spec.num_encoder_layers * spec.encoder_layer_params
    return spec.embedding_params + encoder + spec.decoder_params - idle
