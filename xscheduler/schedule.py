"""Plan a problem policy by policy: build the spaces, search them, and resolve every number that the run needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.schema import Constraint, Plan, PolicySettings, Precision, Profile, SearchCertificate
from xscheduler.arrival_rate import best_under_tighter, by_rate, neighbours, rate_of
from xscheduler.frontier import TradeOff, frontier
from xscheduler.lower_tables import lowered
from xscheduler.placement import Placement, Placements
from xscheduler.placement_bounds import PlacementBounds, PolicyBounds
from xscheduler.plan_builder import plan_of
from xscheduler.problem import Problem
from xscheduler.search import SEARCHES, Method
from xscheduler.space import POLICIES, Models, Space, SpaceLimits
from xsimulator.costs.group_tables import Degrees
from xsimulator.costs.step_cost import LaneCost
from xsimulator.forecast import CHOICES
from xsimulator.lengths import Lengths
from xsimulator.memory import LaneMemory, capacity
from xsimulator.stages import Lane

BLOCK_SIZE = 16


class Scheduler:
    """Finds plans for one problem; each policy's spaces are searched once.

    Raises:
        InputError: the workload is longer than the model's context.
    """

    def __init__(self, problem: Problem, method: Method = "branch-and-bound") -> None:
        self.problem = problem
        self.method: Method = "optuna" if problem.wish is not None and method == "branch-and-bound" else method
        self.lengths = Lengths(problem.workload, problem.reused)
        _check_context(problem, self.lengths)
        self._models = _Predictors(problem, self.lengths)
        self._placements = Placements(
            problem.model, problem.cluster, problem.profile, self.lengths, problem.max_devices
        )
        engine = problem.engine
        self._block_size = BLOCK_SIZE if engine is None else engine.block_size
        self._max_batch = problem.profile.layers[0].decode_attention.batches[-1]
        if engine is not None and engine.max_batch is not None and "max_batch" not in problem.fixed:
            self._max_batch = min(self._max_batch, engine.max_batch)
        self._found: dict[tuple[PolicySettings, int, int], Space] = {}
        """Where plans that were found lie."""
        quantile = problem.constraint.planned_quantile
        self._screen = PlacementBounds(
            problem.model, self._models.floor, self.lengths, self.lengths.decodes_at(quantile), self._max_batch
        )
        self._spaces: dict[str, _Spaces] = {}
        self._memories: dict[tuple[Lane, bool], LaneMemory | InfeasibleError] = {}

    # Spaces ----------------------------------------------------------------------------------------------------

    def spaces(self, kind: str, constraint: Constraint | None = None) -> list[Space]:
        """Return the spaces of one policy: every placement that holds the model and may keep the constraint."""
        constraint = constraint or self.problem.constraint
        of = self._spaces_of(kind)
        bounds = [] if of.bounds is None else of.bounds.under(constraint).tolist()
        return [space.under(constraint, bound) for space, bound in zip(of.spaces, bounds, strict=True)]

    def _spaces_of(self, kind: str) -> _Spaces:
        """Return what does not depend on bounds of the spaces of one policy."""
        if kind not in self._spaces:
            found = list(self._standing(kind))
            placements, capacities = [space.placement for space in found], [space.capacity for space in found]
            bounds = self._screen.of(kind, placements, capacities) if found else None
            self._spaces[kind] = _Spaces(found, sum(space.num_points for space in found), bounds)
        return self._spaces[kind]

    def _standing(self, kind: str) -> Iterator[Space]:
        problem = self.problem
        for placement in self._placements.of(kind) if problem.placement is None else [problem.placement]:
            if problem.uniform and not placement.is_uniform:
                continue
            if problem.replicas not in (None, placement.replicas) or not placement.has(problem.fixed):
                continue
            limits = self._limits(placement)
            if limits is not None:
                space = self._space(kind, placement, problem.constraint, limits)
                if space.capacity >= space.least_requests:
                    yield space

    def _space(self, kind: str, placement: Placement, constraint: Constraint, limits: SpaceLimits) -> Space:
        models = partial(self._models, kind, *(layout.lane for layout in placement.layouts))
        return Space(kind, placement, self.lengths, models, constraint, limits, wish=self.problem.wish)

    def _limits(self, placement: Placement) -> SpaceLimits | None:
        """None where the weights do not fit."""
        # Prompts are kept where they are encoded.
        memories = [self._memory(layout.lane, keeps=not i) for i, layout in enumerate(placement.layouts)]
        if any(isinstance(memory, InfeasibleError) for memory in memories):
            return None
        encode, decode = memories[0], memories[-1]
        assert isinstance(encode, LaneMemory) and isinstance(decode, LaneMemory)
        return SpaceLimits(
            memory=decode,
            block_size=self._block_size,
            kv=self.problem.kv,
            max_batch=self._max_batch,
            engine=self.problem.engine,
            encode_memory=encode if len(placement.layouts) == 2 else None,
            fixed=self.problem.fixed,
        )

    def _in_loop(self, constraint: Constraint) -> Constraint:
        """Return what the engine's loop must keep of a constraint on requests that arrive."""
        engine = self.problem.engine
        return constraint if engine is None else constraint.less(engine.request_path_s(self.lengths.mean_whole_input))

    def _memory(self, lane: Lane, *, keeps: bool = False) -> LaneMemory | InfeasibleError:
        found = self._memories.get((lane, keeps))
        if found is None:
            problem = self.problem
            of, engine = problem.profile, problem.deployed or problem.engine
            memory = partial(
                LaneMemory,
                problem.model,
                problem.cluster,
                Precision.of(of.dtype, problem.cluster.device.type, of.engine, of.kv_dtype, of.layouts),
                lane,
                self._block_size,
                engine,
                kept_blocks=problem.reused.kept_blocks(self._block_size) if problem.reused and keeps else 0,
            )
            try:
                found = memory()
                if problem.deployed is not None:
                    found = memory(slots=problem.deployed.max_batch or 0)
                elif engine is not None and engine.sampling_bytes:
                    # As many as it holds without them: a few too many, so what is left for K/V is never overstated.
                    most = capacity(self.lengths, found.blocks_beside(0), self._block_size, "quantile")
                    found = memory(slots=min(self._max_batch, int(most[0])))
            except InfeasibleError as error:
                found = error.with_traceback(None)
            self._memories[lane, keeps] = found
        return found

    # Answers ---------------------------------------------------------------------------------------------------

    def frontier(self, kind: str) -> list[TradeOff]:
        """Return a policy's trade-off between latency and throughput, whatever the latency bound."""
        constraint = self.problem.constraint.model_copy(update={"latency_bound_s": None})
        return frontier(self.spaces(kind, constraint))

    def best_of_each(self, kinds: Sequence[str]) -> dict[str, Plan]:
        """Return the best plan of each policy that has one.

        Raises:
            InfeasibleError: none has; with the nearest bound that one of them meets.
        """
        plans = {}
        for kind in kinds:
            started = time.perf_counter()
            spaces = self.spaces(kind)
            if not spaces:
                continue
            found = SEARCHES[self.method](spaces)
            seconds = time.perf_counter() - started
            if found.settings is not None and found.space is not None:
                certificate = SearchCertificate(
                    method=found.method,
                    evaluations=found.evaluations,
                    space_size=self._spaces_of(kind).num_points,
                    seconds=round(seconds, 4),
                    gap=found.gap,
                    bound=found.bound,
                )
                plans[kind] = plan_of(
                    self.problem, self.lengths, found.space, found.values, found.settings, certificate
                )
                self._found[_key(plans[kind])] = found.space
        if not plans:
            raise self._infeasible(kinds)
        return plans

    def by_arrivals(self, kind: str, most: int) -> list[tuple[Plan, float]]:
        """The policy's plans of the highest arrival rates in closed form, each with that rate, the highest first.

        Args:
            most: the number of plans, of as many placements.
        """
        started = time.perf_counter()
        spaces = self.spaces(kind)
        rated = by_rate(spaces, self._in_loop(self.problem.constraint))
        certificate = SearchCertificate(
            method="grid",
            evaluations=sum(space.evaluations for space in spaces),
            space_size=self._spaces_of(kind).num_points,
            seconds=round(time.perf_counter() - started, 4),
            gap=None,
            bound="none: the arrival rate of settings along curves, in closed form",
        )
        found = []
        for of in rated[:most]:
            evaluation = of.space.evaluate(_columns(of.settings))
            plan = plan_of(self.problem, self.lengths, of.space, evaluation.at(0), of.settings, certificate)
            self._found[_key(plan)] = of.space
            found.append((plan, of.rate))
        return found

    def neighbours(self, plan: Plan) -> list[tuple[Plan, float]]:
        """Plans for the placement of one of `by_arrivals`, each with its rate in closed form: those that differ in one
        variable by some, and the best under tighter bounds.
        """
        space, constraint, found = self._found[_key(plan)], self._in_loop(plan.constraint), []
        near = neighbours(space, plan.policy)
        near += [of for of in best_under_tighter(space, constraint) if of not in (plan.policy, *near)]
        for settings in near:
            evaluation = space.evaluate(_columns(settings))
            if evaluation.fits[0]:
                other = plan_of(self.problem, self.lengths, space, evaluation.at(0), settings, plan.search)
                self._found[_key(other)] = space
                found.append((other, rate_of(space, settings, constraint)))
        return found

    def predicted_rate(self, plan: Plan) -> float:
        """Return the arrival rate that the closed form gives a plan that this scheduler found."""
        return rate_of(self._found[_key(plan)], plan.policy, self._in_loop(plan.constraint))

    def most_stable(self, kind: str) -> float:
        """Requests a second that no schedule of a policy serves, whatever its latency."""
        free = {"latency_bound_s": None, "ttft_s": None, "tpot_s": None}
        spaces = self.spaces(kind, self.problem.constraint.model_copy(update=free))
        return max((space.bound for space in spaces), default=0.0)

    def under(self, constraint: Constraint) -> Scheduler:
        """The scheduler of the same problem under other bounds. Predictors do not depend on them: it shares them."""
        own, problem = self.problem.constraint, replace(self.problem, constraint=constraint)
        if (constraint.quantile, constraint.sla) != (own.quantile, own.sla):
            return Scheduler(problem, self.method)
        other = copy(self)
        other.problem, other._found = problem, {}
        return other

    @property
    def num_devices(self) -> int:
        """Devices that plans may take."""
        return self._placements.num_devices

    def best(self, kinds: Sequence[str] = tuple(POLICIES)) -> Plan:
        """Return the plan with the highest throughput among these policies."""
        return max(self.best_of_each(kinds).values(), key=lambda plan: plan.estimate.throughput_rps)

    def score(self, settings: PolicySettings, placement: Placement) -> Plan:
        """Return what given settings would do, whether or not they keep the constraint.

        Raises:
            InfeasibleError: they do not fit in memory.
        """
        space = self.space(settings.kind, placement)
        evaluation = space.evaluate(_columns(settings))
        if not evaluation.fits[0]:
            raise InfeasibleError(
                f"memory: {evaluation.performance.peak_requests[0]:.0f} requests at once do not fit, "
                f"{space.capacity:.0f} do",
                nearest_bound_s=None,
                binding="memory",
            )
        given = SearchCertificate(
            method="given", evaluations=1, space_size=1, seconds=0.0, gap=None, bound="none: nothing was searched"
        )
        return plan_of(self.problem, self.lengths, space, evaluation.at(0), settings, given)

    def space(self, kind: str, placement: Placement) -> Space:
        """One placement's space.

        Raises:
            InfeasibleError: the model does not fit on it.
        """
        for layout in placement.layouts:
            memory = self._memory(layout.lane)
            if isinstance(memory, InfeasibleError):
                raise memory
        limits = self._limits(placement)
        assert limits is not None
        return self._space(kind, placement, self.problem.constraint, limits)

    def uniform_placement(
        self, kind: str, tp_degree: int, num_stages: int, replicas: int, ep_degree: int = 1
    ) -> Placement:
        """Replicas of a pipeline of equal stages, a micro-batch for each.

        Raises:
            InputError: the cluster, the model or the profile has no such placement.
        """
        size = tp_degree * num_stages
        for placement in self._placements.one_lane(kind, size, replicas):
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
            f"{replicas} x {num_stages} stages of {tp_degree} devices, experts in {ep_degree}",
            f"{self.problem.cluster.name} has none for {self.problem.model.name}; the profile covers tensor- and "
            f"expert-parallel degrees {self.problem.profile.groups}",
        )

    # Why not ---------------------------------------------------------------------------------------------------

    def _infeasible(self, kinds: Sequence[str]) -> InfeasibleError:
        """Return an error that says what binds and what would be met: by the points of lowest excess."""
        constraint = self.problem.constraint
        relaxed = constraint.model_copy(update={"latency_bound_s": None, "ttft_s": None, "tpot_s": None})
        headroom = 1 + relaxed.headroom
        latency_alone = constraint.ttft_s is None and constraint.tpot_s is None
        nearest: dict[str, float] = {}
        for kind in kinds:
            spaces = self.spaces(kind, relaxed)
            least_s = headroom * self._screen.least_latency([space.placement for space in spaces])
            for i in np.argsort(least_s, kind="stable"):
                if latency_alone and least_s[i] > nearest.get("latency_bound_s", np.inf):
                    break
                space = spaces[i]
                evaluation = space.evaluate(space.slowest_points())
                if not evaluation.fits.any():
                    continue
                for name, values in (
                    ("latency_bound_s", evaluation.performance.latency),
                    ("ttft_s", evaluation.performance.ttft),
                    ("tpot_s", evaluation.performance.tpot),
                ):
                    least = float(values[evaluation.fits].min()) * headroom
                    nearest[name] = min(nearest.get(name, least), least)
        if not any(self._placements.of(kind) for kind in kinds):
            num_devices = self._placements.num_devices
            return InfeasibleError(
                f"devices: {', '.join(kinds)} needs at least 2 devices with links between them, "
                f"{self.problem.cluster.name} offers {num_devices}; take a larger cluster or another policy",
                nearest_bound_s=None,
                binding="devices",
            )
        if not nearest:
            return self._no_memory() if not self.problem.fixed else self._not_held(kinds)
        bounds = {name: getattr(constraint, name) for name in nearest}
        broken = [name for name, bound in bounds.items() if bound is not None and bound < nearest[name]]
        binding = broken[0] if broken else "latency_bound_s"
        return InfeasibleError(
            f"{binding}: no schedule of {', '.join(kinds)} keeps {bounds[binding]:g} s on {self.problem.cluster.name}; "
            f"the nearest bound that one keeps is {round_up(nearest[binding])} s",
            nearest_bound_s=nearest["latency_bound_s"],
            binding=binding,
        )

    def _not_held(self, kinds: Sequence[str]) -> InfeasibleError:
        """Return an error that says which values nothing can be held at."""
        held = ", ".join(f"{name}={value}" for name, value in self.problem.fixed.items())
        return InfeasibleError(
            f"fix: no schedule of {', '.join(kinds)} on {self.problem.cluster.name} fits in memory with {held}; leave "
            "one of them out",
            nearest_bound_s=None,
            binding="fix",
        )

    def _no_memory(self) -> InfeasibleError:
        """Return why no placement holds the model, from the one that spreads it widest."""
        memory = self._memory(self._placements.widest)
        if isinstance(memory, InfeasibleError):
            return memory
        return InfeasibleError(
            "memory: the K/V of a single request does not fit; take more memory or shorter requests",
            nearest_bound_s=None,
            binding="memory",
        )


class _Spaces(NamedTuple):
    """The spaces of one policy under any constraint.

    Attributes:
        num_points: of all of them.
        bounds: of their throughput; None: there are no spaces.
    """

    spaces: list[Space]
    num_points: int
    bounds: PolicyBounds | None


class _Predictors:
    """What predicts placements: made once for those on the same lanes.

    Spaces hold it, and it holds neither them nor the scheduler: a search leaves no cycles behind, which the garbage
    collector would look for in the middle of a later one.

    Attributes:
        floor: the profile with lower tables.
    """

    def __init__(self, problem: Problem, lengths: Lengths) -> None:
        self.floor = lowered(problem.profile)
        self._problem, self._lengths = problem, lengths
        self._degrees, self._floor_degrees = Degrees(problem.profile), Degrees(self.floor)
        self._made: dict[tuple[Callable[..., Any], tuple[Lane, ...]], Models] = {}

    def __call__(self, kind: str, *lanes: Lane) -> Models:
        make = CHOICES[kind].model
        found = self._made.get((make, lanes))
        if found is None:
            profile, engine = self._problem.profile, self._problem.engine
            model = floor = self._model(make, lanes, profile, self._degrees)
            if self.floor is not profile or (engine is not None and engine.mixing):
                floor = self._model(make, lanes, self.floor, self._floor_degrees, is_floor=True)
            found = self._made[make, lanes] = Models(model, floor)
        return found

    def _model(
        self,
        make: Callable[..., Any],
        lanes: tuple[Lane, ...],
        profile: Profile,
        degrees: Degrees,
        *,
        is_floor: bool = False,
    ) -> Any:
        constraint = self._problem.constraint
        of, engine = self._problem.model, self._problem.engine
        costs = [LaneCost(of, profile, lane, degrees, engine, is_floor=is_floor) for lane in lanes]
        of_all = constraint.sla == "request"
        return make(*costs, self._lengths, constraint.planned_quantile, all_requests=of_all)


def _columns(settings: PolicySettings) -> dict[str, np.ndarray]:
    return {variable.name: np.asarray([getattr(settings, variable.name)]) for variable in settings.variables}


def _key(plan: Plan) -> tuple[PolicySettings, int, int]:
    return plan.policy, plan.replicas, len(plan.stages)


def _check_context(problem: Problem, lengths: Lengths) -> None:
    model = problem.model
    if model.is_encoder_decoder:
        context = max(lengths.max_whole_input, lengths.max_output)
    else:
        context = lengths.max_whole_input + lengths.max_output
    if context > model.max_context:
        raise InputError(
            "workload",
            problem.workload.name,
            f"its longest request has {context} tokens, {model.name} takes {model.max_context}",
        )


def round_up(seconds: float) -> str:
    """Four significant digits, never below the value: a bound that is printed can be asked for."""
    return f"{float(f'{seconds * 1.0005:.4g}'):g}"


def headroom_of(constraint: Constraint, profile: Profile) -> float:
    """Return the headroom of plans: the constraint's, or the known error of the profile's kind."""
    return constraint.headroom if "headroom" in constraint.model_fields_set else profile.headroom


def scheduler(problem: Problem, search: Method = "branch-and-bound") -> Scheduler:
    """Return the scheduler of a problem; its headroom is the profile's if the constraint names none."""
    headroom = headroom_of(problem.constraint, problem.profile)
    constraint = problem.constraint.model_copy(update={"headroom": headroom})
    return Scheduler(replace(problem, constraint=constraint), search)
