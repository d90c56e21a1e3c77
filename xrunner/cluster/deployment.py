"""Compute each worker's part of the model, and the workers with which it exchanges data.

Every worker computes this from the plan alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pydantic import PositiveInt, model_validator

from xgpt.core.schema import Frozen, Plan, Stage
from xrunner.build import WorkerSettings
from xrunner.parallel import Part


class Deployment(Frozen):
    """One replica: a model divided into stages. Worker i uses the stages' device number i."""

    settings: WorkerSettings
    stages: tuple[Stage, ...]
    devices_per_node: PositiveInt = 1
    """Number of devices per machine, even if the stages use only some of them."""

    @classmethod
    def of(cls, plan: Plan) -> Self:
        per_node = plan.cluster.devices_per_node
        return cls(settings=WorkerSettings.of(plan, num_blocks=0), stages=plan.stages, devices_per_node=per_node)

    @model_validator(mode="after")
    def _check(self) -> Self:
        devices = [device for stage in self.stages for device in stage.devices]
        if sorted(devices) != list(range(len(devices))):
            raise ValueError(f"stages: devices {devices} must contain each number from 0 to {len(devices) - 1} once")
        for stage in self.stages:
            if stage.tp != len(stage.devices):
                raise ValueError(f"stages: tp {stage.tp} must be the number of the stage's devices {stage.devices}")
        return self

    @property
    def num_workers(self) -> int:
        return sum(len(stage.devices) for stage in self.stages)

    def role(self, worker: int) -> Role:
        """Return a worker's part of the model, and the workers with which it exchanges data."""
        number = next(i for i, stage in enumerate(self.stages) if worker in stage.devices)
        stage = self.stages[number]
        lane = [other for other in self.stages if other.lane == stage.lane]
        at = lane.index(stage)
        rank = stage.devices.index(worker)
        before = lane[at - 1].devices if at else ()
        behind = lane[at + 1].devices if at + 1 < len(lane) else ()
        is_leader = rank == 0
        part = Part(
            self.settings.spec,
            stage.decode_layers,
            stage.encode_layers or (0, 0),
            is_first=not at,
            is_last=at == len(lane) - 1,
            rank=rank,
            degree=stage.tp,
            ep=stage.ep,
            runs_decoder=not (self.settings.spec.is_encoder_decoder and stage.lane == "encode"),
        )
        return Role(
            number=number,
            part=part,
            kv_blocks=stage.kv_blocks,
            receives_from=before[rank % len(before)] if before else None,
            sends_to=tuple(other for i, other in enumerate(behind) if i % stage.tp == rank),
            last=lane[-1].devices[0],
            encoder_output_to=tuple(device for other in lane[:-1] for device in other.devices)
            if part.runs_decoder
            else (),
            forwards_to=((*stage.devices[1:], *behind[:1]) if is_leader else ()),
            reports=is_leader and part.is_last,
        )

    def lane(self, name: str) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.lane == name)


@dataclass(frozen=True, slots=True)
class Role:
    """One worker's part of the model, and the workers with which it exchanges data."""

    number: int
    part: Part
    kv_blocks: int
    receives_from: int | None
    sends_to: tuple[int, ...]
    last: int
    encoder_output_to: tuple[int, ...]
    forwards_to: tuple[int, ...]
    reports: bool
