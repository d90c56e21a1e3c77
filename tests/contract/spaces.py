"""Small random spaces of each policy: what searches and bounds are tested on."""

from __future__ import annotations

import numpy as np
import pytest

from tests.contract.scenarios import BLOCK_SIZE, random_profile
from xgpt.core.schema import Constraint, Histogram, Profile, Uniform, Workload
from xgpt.core.workload import histogram
from xgpt.resolve import load_cluster, load_model
from xscheduler.lower_tables import lowered
from xscheduler.placement import Placement, Placements
from xscheduler.placement_bounds import PlacementBounds
from xscheduler.space import POLICIES, Evaluation, Ints, Models, Space, SpaceLimits
from xsimulator.costs.step_cost import LaneCost
from xsimulator.forecast import OneLaneModel, TwoLaneModel
from xsimulator.lengths import Lengths
from xsimulator.stages import Lane

KINDS = tuple(POLICIES)
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
FEW = range(2)
SEEDS = [*FEW, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 24))]


def random_workload(rng: np.random.Generator) -> Workload:
    def lengths(longest: int) -> Histogram:
        low = int(rng.integers(1, longest))
        return histogram(Uniform(min=low, max=int(rng.integers(low, longest + 1))))

    return Workload(name="random", input=lengths(200), output=lengths(24))


def every_point(space: Space) -> tuple[dict[str, Ints], Evaluation]:
    points = space.points(np.arange(space.num_points))
    return points, space.evaluate(points)


class Blocks:
    """Memory of a lane that is all K/V blocks."""

    kept_blocks = 0
    request_blocks = 0.0

    def __init__(self, blocks: int, lane: Lane) -> None:
        self.blocks = blocks
        self.lane = lane

    def blocks_beside(self, step_tokens: np.ndarray) -> np.ndarray:
        return np.full(len(step_tokens), float(self.blocks))


class Spaces:
    """Small random spaces of one policy, on placements of up to three devices, that differ in nothing but the bound."""

    def __init__(self, kind: str, seed: int, *, monotone: bool) -> None:
        rng = np.random.default_rng(seed)
        spec, _ = load_model("opt-125m")
        self.profile = random_profile(rng, monotone=monotone, degrees=(1, 2))
        self.lengths = lengths = Lengths(random_workload(rng))
        self.kind, self.spec = kind, spec
        cluster = load_cluster("a40x4")
        longest = -(-(lengths.max_input + lengths.max_output) // BLOCK_SIZE)
        self.blocks, self.max_batch = longest * int(rng.integers(6, 60)), int(rng.integers(6, 14))
        found = Placements(spec, cluster, self.profile, lengths, max_devices=3).of(kind)
        self.placements = [found[i] for i in rng.choice(len(found), 2, replace=False)]
        self.models = {placement.layouts: self._models(placement) for placement in self.placements}

    def _models(self, placement: Placement) -> Models:
        def build(profile: Profile) -> OneLaneModel | TwoLaneModel:
            lanes = [LaneCost(self.spec, profile, layout.lane) for layout in placement.layouts]
            return OneLaneModel(*lanes, self.lengths) if len(lanes) == 1 else TwoLaneModel(*lanes, self.lengths)

        return Models(build(self.profile), build(lowered(self.profile)))

    def spaces(self, latency_bound_s: float | None = None) -> list[Space]:
        constraint = Constraint(latency_bound_s=latency_bound_s)
        spaces = []
        for placement in self.placements:
            memories = [Blocks(self.blocks, layout.lane) for layout in placement.layouts]
            limits = SpaceLimits(
                memories[-1],  # type: ignore[arg-type]
                BLOCK_SIZE,
                max_batch=self.max_batch,
                encode_memory=memories[0] if len(memories) == 2 else None,  # type: ignore[arg-type]
            )
            models = self.models[placement.layouts]
            space = Space(self.kind, placement, self.lengths, lambda models=models: models, constraint, limits)
            if space.capacity >= space.least_requests:
                spaces.append(space)
        screen = PlacementBounds(
            self.spec, lowered(self.profile), self.lengths, self.lengths.decodes_at(constraint.quantile), self.max_batch
        )
        if not spaces:
            return []
        bounds = screen.of(self.kind, [s.placement for s in spaces], [s.capacity for s in spaces]).under(constraint)
        return [space.under(constraint, bound) for space, bound in zip(spaces, bounds.tolist(), strict=True)]

    def bounds(self) -> list[float | None]:
        """No bound, and bounds that leave ever less of what fits in memory."""
        evaluations = [every_point(space)[1] for space in self.spaces()]
        latency = np.sort(np.concatenate([[], *(e.performance.latency[e.fits] for e in evaluations)]))
        if not len(latency):
            return [None]
        return [None, *(float(latency[int(share * (len(latency) - 1))]) for share in (0.7, 0.2, 0.02))]
