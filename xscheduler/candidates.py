"""List the candidates of a problem: the settings of each policy on each placement whose memory holds the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.schema import Constraint, EngineSpec, Precision, Profile
from xscheduler.engine_limits import why_not_divided
from xscheduler.lower_tables import lowered
from xscheduler.placement import Placement, Placements
from xscheduler.placement_bounds import PlacementBounds, PolicyBounds
from xscheduler.problem import Problem
from xscheduler.space import Models, Space, SpaceLimits
from xsimulator.costs.curves import Degrees
from xsimulator.costs.step_cost import LaneCost
from xsimulator.forecast import CHOICES
from xsimulator.lengths import Lengths
from xsimulator.memory import LaneMemory, RequestBlocks
from xsimulator.stages import Lane, lane, spread

BLOCK_SIZE = 16


class Candidates:
    """The candidates of one problem.

    Raises:
        InputError: the workload is longer than the model's context.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.lengths = Lengths(problem.workload, problem.reused)
        _check_context(problem, self.lengths)
        self._models = _Predictors(problem, self.lengths)
        engine = problem.engine
        self.placements = Placements(
            problem.model,
            problem.cluster,
            problem.step_profile,
            self.lengths,
            problem.max_devices,
            engine,
            in_groups=problem.in_groups,
        )
        self._block_size = BLOCK_SIZE if engine is None else engine.block_size
        self._max_batch = problem.step_profile.largest_batch
        if engine is not None and engine.max_batch is not None and "max_batch" not in problem.fixed:
            self._max_batch = min(self._max_batch, engine.max_batch)
        quantile = problem.constraint.planned_quantile
        self.screen = PlacementBounds(
            problem.model, self._models.floor, self.lengths, self.lengths.decodes_at(quantile), self._max_batch
        )
        self._spaces: dict[str, _Spaces] = {}
        self._memories: dict[tuple[Lane, bool], LaneMemory | InfeasibleError] = {}

    def under(self, constraint: Constraint) -> Candidates:
        own_constraint, problem = self.problem.constraint, replace(self.problem, constraint=constraint)
        if (constraint.quantile, constraint.sla) != (own_constraint.quantile, own_constraint.sla):
            return Candidates(problem)
        other = copy(self)
        other.problem = problem
        return other

    def devices_needed(self) -> int | None:
        """Return the smallest number of devices that, as a pipeline, hold the model and one request of the longest
        length.

        None means that even one device for each layer would not be enough.
        """
        model, longest = self.problem.model, self.lengths.max_input + self.lengths.max_output
        if model.is_encoder_decoder:
            return None
        for number in range(1, model.num_layers + 1):
            memory = self.memory(lane((1,) * number, spread(model.num_layers, [1.0] * number)))
            if isinstance(memory, LaneMemory):
                blocks = memory.blocks_beside(min(longest, 2048))[0] - memory.request_blocks
                if blocks * self._block_size >= longest:
                    return number
        return None

    def num_points(self, kind: str) -> int:
        return self._spaces_of(kind).num_points

    def spaces(self, kind: str, *, between: bool = False) -> list[Space]:
        """Return the spaces of one policy, one for each placement that holds the model."""
        constraint, all_spaces = self.problem.constraint, self._spaces_of(kind)
        bounds = [] if all_spaces.bounds is None else all_spaces.bounds.under(constraint).tolist()
        return [
            space.under(constraint, bound, between=between)
            for space, bound in zip(all_spaces.spaces, bounds, strict=True)
        ]

    def _spaces_of(self, kind: str) -> _Spaces:
        if kind not in self._spaces:
            found = list(self._standing(kind))
            placements = [space.placement for space in found]
            capacities = [space.under(space.constraint, inf, between=True).capacity for space in found]
            bounds = self.screen.of(kind, placements, capacities) if found else None
            self._spaces[kind] = _Spaces(found, sum(space.num_points for space in found), bounds)
        return self._spaces[kind]

    def _standing(self, kind: str) -> Iterator[Space]:
        problem = self.problem
        for placement in self.placements.of(kind) if problem.placement is None else [problem.placement]:
            if problem.speculation is not None and len(placement.decode_lane) > 1:
                continue
            if (problem.uniform and not placement.is_uniform) or (problem.even and not placement.is_even):
                continue
            if problem.replicas not in (None, placement.replicas) or not placement.has(problem.fixed):
                continue
            limits = self._limits(kind, placement)
            if limits is not None:
                space = self._space(kind, placement, limits)
                if space.capacity >= space.least_requests:
                    yield space

    def _space(self, kind: str, placement: Placement, limits: SpaceLimits) -> Space:
        models = partial(self._models, kind, *(layout.lane for layout in placement.layouts))
        return Space(kind, placement, self.lengths, models, self.problem.constraint, limits)

    def _limits(self, kind: str, placement: Placement) -> SpaceLimits | None:
        # Cached prompts use memory of the lane that encodes prompts.
        memories = [self.memory(layout.lane, keeps=not i) for i, layout in enumerate(placement.layouts)]
        if any(isinstance(memory, InfeasibleError) for memory in memories):
            return None
        encode, decode = memories[0], memories[-1]
        assert isinstance(encode, LaneMemory) and isinstance(decode, LaneMemory)
        return SpaceLimits(
            memory=decode,
            block_size=self._block_size,
            kv=self.problem.promise(kind, placement.microbatches),
            max_batch=self._max_batch,
            engine=self.problem.engine_of(kind),
            encode_memory=encode if len(placement.layouts) == 2 else None,
            fixed=self.problem.fixed,
            price_per_device_hour=self.problem.cluster.price_per_device_hour,
        )

    def space(self, kind: str, placement: Placement) -> Space:
        for layout in placement.layouts:
            memory = self.memory(layout.lane)
            if isinstance(memory, InfeasibleError):
                raise memory
        limits = self._limits(kind, placement)
        assert limits is not None
        return self._space(kind, placement, limits)

    def uniform_placement(
        self, kind: str, tp_degree: int, num_stages: int, replicas: int, ep_degree: int = 1
    ) -> Placement:
        """Return the placement whose replicas are pipelines of equal stages, with one micro-batch for each stage.

        Raises:
            InputError: the cluster, the model or the profile does not allow this placement.
        """
        size = tp_degree * num_stages
        engine = self.problem.deployed or self.problem.engine
        if (reason := why_not_divided(self.problem.model, engine, tp_degree, ep_degree)) is not None:
            raise InputError("placement", f"tensor-parallel degree {tp_degree}", reason)
        for placement in self.placements.one_lane(kind, size, replicas):
            layout = placement.layouts[0]
            if (
                layout.is_uniform
                and layout.tp.ep_degree == ep_degree
                and layout.num_stages == num_stages
                and placement.microbatches == num_stages
            ):
                return placement
        raise InputError(
            "placement",
            f"{replicas} x {num_stages} stages of {tp_degree} devices, experts in {ep_degree} parts",
            f"{self.problem.cluster.name} has no such placement for {self.problem.model.name}; the profile covers "
            f"tensor- and expert-parallel degrees {self.problem.profile.groups}",
        )

    def memory(self, lane: Lane, *, keeps: bool = False) -> LaneMemory | InfeasibleError:
        found = self._memories.get((lane, keeps))
        if found is None:
            problem = self.problem
            profile, engine = problem.profile, problem.deployed or problem.engine
            memory = partial(
                LaneMemory,
                problem.model,
                problem.cluster,
                Precision.of(
                    profile.dtype, problem.cluster.device.type, profile.engine, profile.kv_dtype, profile.layouts
                ),
                lane,
                self._block_size,
                engine,
                kept_blocks=problem.reused.kept_blocks(self._block_size) if problem.reused and keeps else 0,
                context=self.lengths.mean_whole_input + self.lengths.mean_output,
                speculation=problem.speculation,
            )
            try:
                found = memory()
                if problem.deployed is not None:
                    found = memory(slots=problem.deployed.max_batch or 0)
                elif engine is not None and engine.sampling_bytes:
                    # Count the slots that would fit if slots needed no memory. This is slightly too many, so K/V memory
                    # is never overstated.
                    blocks, own_blocks = found.blocks_beside(0), found.request_blocks
                    law = RequestBlocks.of(self.lengths, self._block_size, "quantile", request_blocks=own_blocks)
                    found = memory(slots=min(self._max_batch, int(law.most(blocks)[0])))
            except InfeasibleError as error:
                found = error.with_traceback(None)
            self._memories[lane, keeps] = found
        return found


class _Spaces(NamedTuple):
    """They do not depend on the constraint."""

    spaces: list[Space]
    num_points: int
    bounds: PolicyBounds | None


class _Predictors:
    """Otherwise there would be reference cycles, and collecting them would interrupt a later search."""

    def __init__(self, problem: Problem, lengths: Lengths) -> None:
        self._profile = problem.step_profile
        self.floor = lowered(self._profile)
        self._problem, self._lengths = problem, lengths
        self._degrees, self._floor_degrees = Degrees(self._profile), Degrees(self.floor)
        self._made: dict[tuple[Callable[..., Any], str, tuple[Lane, ...]], Models] = {}

    def __call__(self, kind: str, *lanes: Lane) -> Models:
        make, profile, engine = CHOICES[kind].model, self._profile, self._problem.engine_of(kind)
        key = make, "" if engine is None else engine.name, lanes
        found = self._made.get(key)
        if found is None:
            model = floor = self._model(make, lanes, profile, self._degrees, engine)
            if self.floor is not profile or (engine is not None and engine.mixing):
                floor = self._model(make, lanes, self.floor, self._floor_degrees, engine, is_floor=True)
            found = self._made[key] = Models(model, floor)
        return found

    def _model(
        self,
        make: Callable[..., Any],
        lanes: tuple[Lane, ...],
        profile: Profile,
        degrees: Degrees,
        engine: EngineSpec | None,
        *,
        is_floor: bool = False,
    ) -> Any:
        constraint, model = self._problem.constraint, self._problem.model
        costs = [LaneCost(model, profile, lane, degrees, engine, is_floor=is_floor) for lane in lanes]
        of_all = constraint.sla == "request"
        return make(*costs, self._lengths, constraint.planned_quantile, all_requests=of_all)


def _check_context(problem: Problem, lengths: Lengths) -> None:
    model = problem.model
    if model.is_encoder_decoder:
        context = max(lengths.max_whole_input, lengths.max_output)
    else:
        context = lengths.max_whole_input + lengths.max_output
    if context > model.max_context:
        says = f"its longest request has {context} tokens, but {model.name} accepts {model.max_context}"
        raise InputError("workload", problem.workload.name, says)
