"""What holds of every search: it agrees with the exhaustive one, keeps the bound, and proves what it says."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tests.contract.scenarios import BLOCK_SIZE, problem, random_profile
from xgpt.errors import InfeasibleError
from xgpt.io import dump_json
from xgpt.resolve import load_model
from xgpt.schema import Constraint, Histogram, Plan, RraSettings, Uniform, Workload
from xgpt.workload import histogram
from xscheduler.bound import UnitCostBound, interval_bound
from xscheduler.minorant import minorant
from xscheduler.schedule import Problem, Scheduler
from xscheduler.search import branch_and_bound, exhaustive, optuna_search
from xscheduler.search.branch_and_bound import THROUGHPUT_TOLERANCE
from xscheduler.space import POLICIES, Limits, Space
from xsimulator.analytic import OneLaneModel
from xsimulator.cost import CostModel
from xsimulator.lengths import Lengths

KINDS = tuple(POLICIES)
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
SEEDS = range(8)


def random_workload(rng: np.random.Generator) -> Workload:
    def lengths(longest: int) -> Histogram:
        low = int(rng.integers(1, longest))
        return histogram(Uniform(min=low, max=int(rng.integers(low, longest + 1))))

    return Workload(name="random", input=lengths(200), output=lengths(40))


class Spaces:
    """Small random spaces of one policy that differ in nothing but the bound."""

    def __init__(self, kind: str, seed: int, *, monotone: bool) -> None:
        rng = np.random.default_rng(seed)
        spec, _ = load_model("opt-125m")
        profile = random_profile(rng, monotone=monotone)
        lengths = Lengths(random_workload(rng))
        self.kind = kind
        self.model = OneLaneModel(CostModel(spec, profile), lengths)
        self.floor = OneLaneModel(CostModel(spec, minorant(profile)), lengths)
        longest = -(-(lengths.max_input + lengths.max_output) // BLOCK_SIZE)
        self.limits = Limits(
            blocks=longest * int(rng.integers(4, 60)), block_size=BLOCK_SIZE, max_batch=int(rng.integers(6, 25))
        )

    def space(self, latency_bound_s: float | None = None) -> Space:
        return Space(self.kind, self.model, Constraint(latency_bound_s=latency_bound_s), self.limits, self.floor)

    def bounds(self) -> list[float | None]:
        """No bound, and bounds that leave ever less of what fits in memory."""
        space = self.space()
        evaluation = space.evaluate(space.all_points())
        latency = np.sort(evaluation.performance.latency[evaluation.fits])
        return [None, *(float(latency[int(share * (len(latency) - 1))]) for share in (0.7, 0.2, 0.02))]


@EVERY_KIND
@pytest.mark.parametrize("seed", SEEDS)
def test_branch_and_bound_agrees_with_exhaustive(kind: str, seed: int) -> None:
    """Where tables are even and directions hold, to within the tolerance with which blocks are dropped."""
    spaces = Spaces(kind, seed, monotone=True)
    for bound in spaces.bounds():
        best = exhaustive.search([spaces.space(bound)])
        found = branch_and_bound.search([spaces.space(bound)])
        assert (found.settings is None) == (best.settings is None)
        assert found.throughput <= best.throughput
        assert found.throughput >= best.throughput / (1 + THROUGHPUT_TOLERANCE), (found.settings, best.settings)


@EVERY_KIND
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("monotone", [True, False])
def test_certificate_holds(kind: str, seed: int, monotone: bool) -> None:
    """However uneven the tables: no point has over (1 + gap) times the throughput found."""
    spaces = Spaces(kind, seed, monotone=monotone)
    for bound in spaces.bounds():
        space = spaces.space(bound)
        found = branch_and_bound.search([space])
        best = exhaustive.search([spaces.space(bound)])
        if found.settings is None:
            continue
        assert found.gap is not None
        assert best.throughput <= found.throughput * (1 + found.gap) * (1 + 1e-9)
        chosen = space.evaluate(
            {v.name: np.asarray([getattr(found.settings, v.name)]) for v in found.settings.variables}
        )
        assert chosen.fits.all()
        # To within rounding: a bound that is some point's own latency is met or missed by the last bit.
        assert chosen.excess.max() <= 1e-9


@EVERY_KIND
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("monotone", [True, False])
def test_unit_cost_bound_holds_for_every_point(kind: str, seed: int, monotone: bool) -> None:
    spaces = Spaces(kind, seed, monotone=monotone)
    space = spaces.space()
    points = space.all_points()
    evaluation = space.evaluate(points)
    bound = UnitCostBound(spaces.model, spaces.limits.max_batch)
    for i in np.flatnonzero(evaluation.fits):
        corner = {name: int(column[i]) for name, column in points.items()}
        assert evaluation.performance.throughput[i] <= bound.of(space, corner) * (1 + 1e-9), corner


@EVERY_KIND
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("monotone", [True, False])
def test_interval_bound_holds_in_every_box(kind: str, seed: int, monotone: bool) -> None:
    spaces = Spaces(kind, seed, monotone=monotone)
    space = spaces.space()
    points = space.all_points()
    evaluation = space.evaluate(points)
    rng = np.random.default_rng(seed)
    names = [axis.variable.name for axis in space.searched]
    for _ in range(20):
        branch = space.branches()[int(rng.integers(len(space.branches())))]
        ends = {axis.variable.name: np.sort(rng.choice(axis.values, 2)) for axis in space.searched}
        corners = {name: np.asarray([ends[name][0], ends[name][1]]) for name in names}
        corners |= {name: np.asarray([value, value]) for name, value in branch.items()}
        most = space.evaluate(corners)
        least = space.evaluate_floor(corners, most)
        bound = interval_bound(space, most, least, slice(0, 1), slice(1, 2))[0]
        inside = np.ones(len(evaluation.fits), bool)
        for name, column in corners.items():
            inside &= (points[name] >= column[0]) & (points[name] <= column[1])
        throughput = evaluation.performance.throughput[inside & evaluation.fits]
        assert throughput.max(initial=0.0) <= bound * (1 + 1e-9), (ends, branch)


@pytest.mark.parametrize("seed", SEEDS)
def test_minorant_lies_below_and_is_monotone(seed: int) -> None:
    profile = random_profile(np.random.default_rng(seed), monotone=False)
    floor = minorant(profile)
    assert minorant(floor) is floor
    assert minorant(random_profile(np.random.default_rng(seed), monotone=True)) == random_profile(
        np.random.default_rng(seed), monotone=True
    )
    for ours, theirs in ((floor.head, profile.head), (floor.layers[0].rest, profile.layers[0].rest)):
        seconds, points = np.asarray(ours.seconds), np.asarray(ours.points)
        assert (seconds <= np.asarray(theirs.seconds)).all()
        assert (np.diff(seconds) >= 0).all()
        assert (np.diff(seconds / points) <= 1e-15).all()
    surface, above = floor.layers[0].decode_attention, profile.layers[0].decode_attention
    table = np.asarray(surface.seconds)
    assert (table <= np.asarray(above.seconds)).all()
    assert (np.diff(table, axis=0) >= 0).all()
    assert (np.diff(table, axis=1) >= 0).all()


@EVERY_KIND
@pytest.mark.parametrize("seed", SEEDS)
def test_a_tighter_bound_never_gives_more(kind: str, seed: int) -> None:
    spaces = Spaces(kind, seed, monotone=True)
    best = [branch_and_bound.search([spaces.space(bound)]).throughput for bound in spaces.bounds()]
    for looser, tighter in pairwise(best):
        assert tighter <= looser * (1 + THROUGHPUT_TOLERANCE)


@EVERY_KIND
def test_optuna_is_repeatable_and_never_beats_exhaustive(kind: str) -> None:
    spaces = Spaces(kind, 5, monotone=True)
    bound = spaces.bounds()[2]
    first, second = (optuna_search.search([spaces.space(bound)], num_trials=40, seed=7) for _ in range(2))
    best = exhaustive.search([spaces.space(bound)])
    assert first == second
    assert first.gap is None
    assert 0 < first.throughput <= best.throughput


def test_a_wrong_direction_loses_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agreement above would not survive a direction declared the wrong way round."""
    encode_batch, decode_iterations = RraSettings.variables
    wrong = (encode_batch._replace(throughput="falls"), decode_iterations)
    monkeypatch.setattr(RraSettings, "variables", wrong)
    losses = []
    for seed in SEEDS:
        spaces = Spaces("rra", seed, monotone=True)
        bound = spaces.bounds()[2]
        best = exhaustive.search([spaces.space(bound)])
        losses.append(1 - branch_and_bound.search([spaces.space(bound)]).throughput / best.throughput)
    assert max(losses) > 10 * THROUGHPUT_TOLERANCE


@pytest.mark.parametrize("kinds", [KINDS, *((kind,) for kind in KINDS)])
def test_the_nearest_bound_can_be_asked_for(kinds: tuple[str, ...]) -> None:
    def plan(constraint: Constraint) -> Plan:
        of = problem("llama-3.1-8b", "h200x1", "orca")
        return Scheduler(
            Problem(of.model, None, of.cluster, of.workload, of.profile, constraint),
        ).best(kinds)

    with pytest.raises(InfeasibleError, match=r"latency_bound_s: no schedule of .* keeps 0\.001 s") as failure:
        plan(Constraint(latency_bound_s=0.001))
    nearest = failure.value.nearest_bound_s
    assert nearest is not None
    assert failure.value.binding == "latency_bound_s"
    assert plan(Constraint(latency_bound_s=nearest)).estimate.latency_s <= nearest
    with pytest.raises(InfeasibleError):
        plan(Constraint(latency_bound_s=nearest * 0.98))


@pytest.mark.parametrize("headroom", [0.0, 0.2])
@pytest.mark.parametrize("name", ["latency_bound_s", "ttft_s", "tpot_s"])
def test_what_binds_is_named_with_a_value_that_works(name: str, headroom: float) -> None:
    of = problem("llama-3.1-8b", "h200x1", "orca")

    def best(value: float) -> Plan:
        constraint = Constraint.model_validate({name: value, "headroom": headroom})
        return Scheduler(Problem(of.model, None, of.cluster, of.workload, of.profile, constraint)).best()

    with pytest.raises(InfeasibleError, match=f"^{name}: ") as failure:
        best(1e-4)
    assert failure.value.binding == name
    nearest = float(str(failure.value).rpartition(" is ")[2].removesuffix(" s"))
    best(nearest)


def test_same_input_same_plan() -> None:
    def text() -> str:
        plan = Scheduler(problem("opt-13b", "a40x4", "summarization", 20.0)).best()
        return dump_json(plan.model_copy(update={"search": plan.search.model_copy(update={"seconds": 0.0})}))

    assert text() == text()
