"""From a profile to a plan: build each policy's space, search it, resolve every number the run needs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xgpt.errors import InfeasibleError, InputError
from xgpt.io import sha256
from xgpt.schema import (
    SLICE_TOKENS,
    Admission,
    ClusterSpec,
    Constraint,
    Estimate,
    KvPromise,
    ModelSpec,
    Plan,
    Profile,
    ProfileRef,
    SearchCertificate,
    Stage,
    Workload,
)
from xscheduler.frontier import Point, frontier
from xscheduler.minorant import minorant
from xscheduler.search import SEARCHES, Method
from xscheduler.space import POLICIES, Limits, Settings, Space
from xsimulator.analytic import OneLaneModel
from xsimulator.cost import CostModel
from xsimulator.lengths import Lengths
from xsimulator.memory import WORKSPACE_BYTES, activation_bytes_per_token, kv_blocks

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Problem:
    """Everything that a plan answers to."""

    model: ModelSpec
    checkpoint: str | None
    cluster: ClusterSpec
    workload: Workload
    profile: Profile
    constraint: Constraint
    kv: KvPromise = "reserve"


class Scheduler:
    """Finds plans for one problem; each policy's space is searched once."""

    def __init__(self, problem: Problem, method: Method = "branch-and-bound") -> None:
        self.problem = problem
        self.method = method
        lengths = Lengths(problem.workload)
        context = lengths.max_input + lengths.max_output
        if context > problem.model.max_context:
            raise InputError(
                "workload",
                problem.workload.name,
                f"its longest request has {context} tokens, {problem.model.name} takes {problem.model.max_context}",
            )
        cost = CostModel(problem.model, problem.profile)
        self._model = OneLaneModel(cost, lengths, problem.constraint.quantile)
        floor = minorant(problem.profile)
        self._floor = (
            self._model
            if floor is problem.profile
            else OneLaneModel(CostModel(problem.model, floor), lengths, problem.constraint.quantile)
        )
        max_batch = problem.profile.layers[0].decode_attention.batches[-1]
        model, dtype = problem.model, problem.profile.dtype
        block_bytes = BLOCK_SIZE * model.kv_bytes_per_token(dtype)
        self._limits = Limits(
            blocks=kv_blocks(model, problem.cluster, dtype, BLOCK_SIZE),
            blocks_per_step_token=activation_bytes_per_token(model, dtype) / block_bytes,
            block_size=BLOCK_SIZE,
            kv=problem.kv,
            max_batch=max_batch,
        )

    def space(self, kind: str) -> Space:
        return Space(kind, self._model, self.problem.constraint, self._limits, self._floor)

    def frontier(self, kind: str) -> list[Point]:
        """A policy's trade-off between latency and throughput, whatever the latency bound."""
        constraint = self.problem.constraint.model_copy(update={"latency_bound_s": None})
        return frontier(Space(kind, self._model, constraint, self._limits))

    def best_of_each(self, kinds: Sequence[str]) -> dict[str, Plan]:
        """The best plan of each policy that has one.

        Raises:
            InfeasibleError: none has; with the nearest bound that one of them meets.
        """
        plans = {}
        for kind in kinds:
            space = self.space(kind)
            started = time.perf_counter()
            found = SEARCHES[self.method]([space])
            seconds = time.perf_counter() - started
            if found.settings is not None:
                certificate = SearchCertificate(
                    method=self.method,
                    evaluations=found.evaluations,
                    space_size=space.num_points,
                    seconds=round(seconds, 4),
                    gap=found.gap,
                    bound=found.bound,
                )
                plans[kind] = self._plan(space, found.values, found.settings, certificate)
        if not plans:
            raise self._infeasible(kinds)
        return plans

    def best(self, kinds: Sequence[str] = tuple(POLICIES)) -> Plan:
        """The plan with the highest throughput among these policies."""
        return max(self.best_of_each(kinds).values(), key=lambda plan: plan.estimate.throughput_rps)

    def score(self, settings: Settings) -> Plan:
        """What somebody's own settings would do, whether or not they keep the constraint.

        Raises:
            InfeasibleError: they do not fit in memory.
        """
        space = self.space(settings.kind)
        columns = {variable.name: np.asarray([getattr(settings, variable.name)]) for variable in settings.variables}
        evaluation = space.evaluate(columns)
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
        return self._plan(space, evaluation.performance.at(0), settings, given)

    def _plan(self, space: Space, values: dict[str, float], settings: Settings, certificate: SearchCertificate) -> Plan:
        problem, limits = self.problem, self._limits
        profile = problem.profile
        blocks = int(space.blocks_beside(values["peak_tokens"]))
        return Plan(
            model=problem.model,
            checkpoint=problem.checkpoint,
            dtype=profile.dtype,
            cluster=problem.cluster,
            workload=problem.workload,
            constraint=problem.constraint,
            policy=settings,
            admission=Admission(kv=space.kv, max_running=int(space.capacity) if space.kv == "quantile" else None),
            block_size=limits.block_size,
            stages=(Stage(devices=(0,), decode_layers=(0, problem.model.num_layers), kv_blocks=blocks),),
            estimate=self._estimate(values, blocks),
            search=certificate,
            profile=ProfileRef(
                source=profile.source,
                sha256=sha256(profile),
                num_threads=profile.num_threads,
                spread=profile.spread,
                provenance=profile.provenance,
            ),
        )

    def _estimate(self, values: dict[str, float], blocks: int) -> Estimate:
        problem, lengths = self.problem, self._model.lengths
        rps = values["throughput"]
        output_tokens_per_s = rps * lengths.mean_output
        step_tokens = values["encode_tokens"] + values["decode_batch"]
        model, dtype = problem.model, problem.profile.dtype
        memory = (
            model.weight_bytes(dtype)
            + WORKSPACE_BYTES
            + int(min(values["peak_tokens"], SLICE_TOKENS)) * activation_bytes_per_token(model, dtype)
            + blocks * BLOCK_SIZE * model.kv_bytes_per_token(dtype)
        )
        price = problem.cluster.price_per_device_hour
        return Estimate(
            throughput_rps=rps,
            output_tokens_per_s=output_tokens_per_s,
            latency_s=values["latency"],
            ttft_s=values["ttft"],
            tpot_s=values["tpot"],
            itl_p99_s=values["itl_p99"],
            encode_batch=values["encode_batch"],
            decode_batch=values["decode_batch"],
            encode_tokens=values["encode_tokens"],
            cycle_s=values["cycle"],
            memory_bytes=(memory,),
            cost_per_million_tokens=None if price is None else price / 3600 / output_tokens_per_s * 1e6,
            warnings=tuple(
                self._model.cost.beyond_profile(
                    step_tokens, values["decode_batch"], lengths.max_input + lengths.max_output
                )
            ),
        )

    def _infeasible(self, kinds: Sequence[str]) -> InfeasibleError:
        """The least constrained space's point of lowest excess says what binds and what would be met."""
        relaxed = self.problem.constraint.model_copy(update={"latency_bound_s": None, "ttft_s": None, "tpot_s": None})
        headroom = 1 + relaxed.headroom
        nearest: dict[str, float] = {}
        for kind in kinds:
            space = Space(kind, self._model, relaxed, self._limits)
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
        if not nearest:
            return InfeasibleError(
                "memory: the K/V of a single request does not fit; take more memory or shorter requests",
                nearest_bound_s=None,
                binding="memory",
            )
        constraint = self.problem.constraint
        bounds = {name: getattr(constraint, name) for name in nearest}
        broken = [name for name, bound in bounds.items() if bound is not None and bound < nearest[name]]
        binding = broken[0] if broken else "latency_bound_s"
        return InfeasibleError(
            f"{binding}: no schedule of {', '.join(kinds)} keeps {bounds[binding]:g} s on {self.problem.cluster.name}; "
            f"the nearest bound that one keeps is {_round_up(nearest[binding])} s",
            nearest_bound_s=nearest["latency_bound_s"],
            binding=binding,
        )


def _round_up(seconds: float) -> str:
    """Four significant digits, never below the value: a bound that is printed can be asked for."""
    return f"{float(f'{seconds * 1.0005:.4g}'):g}"
