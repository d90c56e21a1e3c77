"""What holds of every search: it agrees with the exhaustive one, keeps the bound, and proves what it says."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.contract.scenarios import BLOCK_SIZE, problem, random_profile
from xgpt.errors import InfeasibleError
from xgpt.io import dump_json
from xgpt.resolve import load_cluster, load_model
from xgpt.schema import Constraint, Curve, Histogram, Plan, Profile, RraSettings, Uniform, Workload
from xgpt.workload import histogram
from xscheduler.bound import box_bounds
from xscheduler.minorant import minorant
from xscheduler.placement import Placement, Placements
from xscheduler.schedule import Problem, Scheduler
from xscheduler.screen import Screen
from xscheduler.search import branch_and_bound, checked, exhaustive, optuna_search
from xscheduler.search.branch_and_bound import THROUGHPUT_TOLERANCE
from xscheduler.space import POLICIES, Evaluation, Ints, Limits, Models, Space, Wish
from xsimulator.analytic import OneLaneModel, TwoLaneModel
from xsimulator.cost import Grid, Line
from xsimulator.lane import LaneCost
from xsimulator.lengths import Lengths
from xsimulator.placement import Lane

KINDS = tuple(POLICIES)
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
FEW = range(4)
SEEDS = [*FEW, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 24))]


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

        return Models(build(self.profile), build(minorant(self.profile)))

    def spaces(self, latency_bound_s: float | None = None) -> list[Space]:
        constraint = Constraint(latency_bound_s=latency_bound_s)
        spaces = []
        for placement in self.placements:
            memories = [Blocks(self.blocks, layout.lane) for layout in placement.layouts]
            limits = Limits(
                memories[-1],  # type: ignore[arg-type]
                BLOCK_SIZE,
                max_batch=self.max_batch,
                encode_memory=memories[0] if len(memories) == 2 else None,  # type: ignore[arg-type]
            )
            models = self.models[placement.layouts]
            space = Space(self.kind, placement, self.lengths, lambda models=models: models, constraint, limits)
            if space.capacity >= space.least_requests:
                spaces.append(space)
        screen = Screen(
            self.spec,
            minorant(self.profile),
            self.lengths,
            self.lengths.decodes_at(constraint.quantile),
            constraint,
            self.max_batch,
        )
        bounds = screen.bounds(self.kind, [s.placement for s in spaces], [s.capacity for s in spaces])
        for space, bound in zip(spaces, bounds, strict=True):
            space.bound = float(bound)
        return spaces

    def bounds(self) -> list[float | None]:
        """No bound, and bounds that leave ever less of what fits in memory."""
        evaluations = [every_point(space)[1] for space in self.spaces()]
        latency = np.sort(np.concatenate([[], *(e.performance.latency[e.fits] for e in evaluations)]))
        if not len(latency):
            return [None]
        return [None, *(float(latency[int(share * (len(latency) - 1))]) for share in (0.7, 0.2, 0.02))]


@EVERY_KIND
@pytest.mark.parametrize("seed", SEEDS)
def test_every_setting_that_fits_has_a_number(kind: str, seed: int) -> None:
    for space in Spaces(kind, seed, monotone=True).spaces():
        numbered = space.points(np.arange(space.num_points))
        names = sorted(numbered)
        grids = np.meshgrid(*(axis.values for axis in space.axes), indexing="ij")
        whole = {axis.variable.name: grid.ravel() for axis, grid in zip(space.axes, grids, strict=True)}
        fits = space.evaluate(whole).fits
        fitting = set(zip(*(whole[name][fits].tolist() for name in names), strict=True))
        seen = list(zip(*(numbered[name].tolist() for name in names), strict=True))
        assert len(seen) == len(set(seen))
        assert fitting <= set(seen)


@EVERY_KIND
@pytest.mark.parametrize("seed", SEEDS)
def test_a_box_within_memory_keeps_all_that_fits(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for space in Spaces(kind, seed, monotone=True).spaces():
        points = space.points(np.arange(space.num_points))
        axes = space.searched
        at = np.stack([axis.values.searchsorted(points[axis.variable.name]) for axis in axes])
        for _ in range(20):
            low, high = np.sort([rng.integers(len(axis.values), size=2) for axis in axes], axis=1).T
            inside = at[:, ((at >= low[:, None]) & (at <= high[:, None])).all(axis=0)]
            shrunk = space.within_memory(tuple(low.tolist()), tuple(high.tolist()))
            assert (shrunk is not None) == (inside.size > 0)
            if shrunk is not None and len(axes) > 1:
                assert shrunk == (tuple(inside.min(axis=1).tolist()), tuple(inside.max(axis=1).tolist()))


@EVERY_KIND
@pytest.mark.parametrize("seed", SEEDS)
def test_branch_and_bound_agrees_with_exhaustive(kind: str, seed: int) -> None:
    """Where tables are even and directions hold, to within the tolerance with which blocks are dropped."""
    spaces = Spaces(kind, seed, monotone=True)
    for bound in spaces.bounds():
        best = exhaustive.search(spaces.spaces(bound))
        found = branch_and_bound.search(spaces.spaces(bound))
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
        found = branch_and_bound.search(spaces.spaces(bound))
        best = exhaustive.search(spaces.spaces(bound))
        if found.settings is None or found.space is None:
            continue
        assert found.gap is not None
        assert best.throughput <= found.throughput * (1 + found.gap) * (1 + 1e-9)
        chosen = found.space.evaluate(
            {v.name: np.asarray([getattr(found.settings, v.name)]) for v in found.settings.variables}
        )
        assert chosen.fits.all()
        # To within rounding: a bound that is some point's own latency is met or missed by the last bit.
        assert chosen.excess.max() <= 1e-9


@EVERY_KIND
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("monotone", [True, False])
def test_no_point_exceeds_the_bound_of_its_placement(kind: str, seed: int, monotone: bool) -> None:
    spaces = Spaces(kind, seed, monotone=monotone)
    for latency_bound_s in spaces.bounds():
        for space in spaces.spaces(latency_bound_s):
            evaluation = every_point(space)[1]
            best = evaluation.throughput[evaluation.feasible].max(initial=0.0)
            assert best <= space.bound * (1 + 1e-9), (space.placement, latency_bound_s)


@EVERY_KIND
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("monotone", [True, False])
def test_no_point_exceeds_the_bound_of_its_box(kind: str, seed: int, monotone: bool) -> None:
    rng = np.random.default_rng(seed)
    for space in Spaces(kind, seed, monotone=monotone).spaces():
        points, evaluation = every_point(space)
        names = [axis.variable.name for axis in space.searched]
        rises = [axis.variable.throughput != "falls" for axis in space.searched]
        fast = None if any(axis.variable.throughput == "none" for axis in space.searched) else 1
        for _ in range(12):
            branch = space.branches()[int(rng.integers(len(space.branches())))]
            ends = {axis.variable.name: np.sort(rng.choice(axis.values, 2)) for axis in space.searched}
            # Lowest, fast, highest.
            corners = {
                name: np.asarray([low, high if up else low, high])
                for (name, (low, high)), up in zip(ends.items(), rises, strict=True)
            }
            corners |= {name: np.full(3, value) for name, value in branch.items()}
            most = space.evaluate(corners)
            bound = box_bounds(space, most, space.evaluate_floor(corners, most), 3, fast)[0]
            inside = evaluation.fits.copy()
            for name in names:
                inside &= (points[name] >= ends[name][0]) & (points[name] <= ends[name][1])
            for name, value in branch.items():
                inside &= points[name] == value
            assert evaluation.throughput[inside].max(initial=0.0) <= bound * (1 + 1e-9), (ends, branch)


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
        # Also where predictions go on beyond what was measured.
        beyond = np.concatenate([theirs.points, np.geomspace(1, 100, 40) * theirs.points[-1]])
        below = Line.of(ours)(beyond)
        assert (below <= Line.of(theirs)(beyond) * (1 + 1e-12)).all()
        assert (np.diff(below) >= 0).all()
        assert (np.diff(below / beyond) <= 1e-15).all()
        assert (np.diff(seconds) >= 0).all()
        assert (np.diff(seconds / points) <= 1e-15).all()
    for surface, above in (
        (floor.layers[0].decode_attention, profile.layers[0].decode_attention),
        (floor.layers[0].encode_attention, profile.layers[0].encode_attention),
    ):
        batches = np.concatenate([above.batches, np.geomspace(1, 50, 20)[1:] * above.batches[-1]])
        lengths = np.concatenate([above.lengths, np.geomspace(1, 50, 20)[1:] * above.lengths[-1]])
        table = Grid(surface)(batches[:, None], lengths)
        assert (table <= Grid(above)(batches[:, None], lengths) * (1 + 1e-12)).all()
        assert (np.diff(table, axis=0) >= -1e-12 * table[1:]).all()
        assert (np.diff(table, axis=1) >= -1e-12 * table[:, 1:]).all()
        each = table / batches[:, None]
        assert (np.diff(each, axis=0) <= 1e-12 * each[1:]).all()


@EVERY_KIND
@pytest.mark.parametrize("seed", SEEDS)
def test_a_tighter_bound_never_gives_more(kind: str, seed: int) -> None:
    spaces = Spaces(kind, seed, monotone=True)
    best = [branch_and_bound.search(spaces.spaces(bound)).throughput for bound in spaces.bounds()]
    for looser, tighter in pairwise(best):
        assert tighter <= looser * (1 + THROUGHPUT_TOLERANCE)


def test_a_wish_of_the_users_own_is_searched_by_optuna() -> None:
    """Least time to first token, at no less than 10 requests a second: neither has a bound."""
    of = problem("llama-3.1-8b", "h200x1", "orca", 4.0)
    wish = Wish(objective=lambda p: -p.ttft, accepts=lambda p: p.throughput >= 10)
    plan = Scheduler(replace(of, wish=wish)).best(("orca",))
    assert plan.search.method == "optuna"
    assert plan.search.gap is None
    assert plan.estimate.throughput_rps >= 10
    assert plan.estimate.ttft_s < Scheduler(of).best(("orca",)).estimate.ttft_s


@EVERY_KIND
@pytest.mark.parametrize(
    ("model", "cluster", "workload", "bound_s", "sizes"),
    [
        ("opt-13b", "a40x4", "summarization", 6.0, range(2, 5)),
        pytest.param("t5-11b", "a40x8", "translation", 12.0, range(2, 9), marks=pytest.mark.long),
        pytest.param("llama-3.1-8b", "h100x8", "azure-conv", 20.0, range(2, 9), marks=pytest.mark.long),
        pytest.param("gpt3-39b", "a40x16", "chat-short", None, range(8, 17), marks=pytest.mark.long),
    ],
)
def test_one_more_device_never_gives_less(
    kind: str, model: str, cluster: str, workload: str, bound_s: float | None, sizes: range
) -> None:
    of = problem(model, cluster, workload, bound_s)
    best = [Scheduler(replace(of, max_devices=n)).best((kind,)).estimate.throughput_rps for n in sizes]
    for fewer, more in pairwise(best):
        assert more >= fewer / (1 + THROUGHPUT_TOLERANCE)


@EVERY_KIND
def test_optuna_is_repeatable_and_never_beats_exhaustive(kind: str) -> None:
    spaces = Spaces(kind, 5, monotone=True)
    bound = spaces.bounds()[2]
    first, second = (optuna_search.search(spaces.spaces(bound), num_trials=40, seed=7) for _ in range(2))
    best = exhaustive.search(spaces.spaces(bound))
    assert first == second
    assert first.gap is None
    assert 0 < first.throughput <= best.throughput


def test_a_wrong_direction_loses_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agreement above would not survive a direction declared the wrong way round."""
    encode_batch, decode_iterations = RraSettings.variables
    wrong = (encode_batch._replace(throughput="falls", latency="falls"), decode_iterations)
    monkeypatch.setattr(RraSettings, "variables", wrong)
    losses = []
    for seed in FEW:
        spaces = Spaces("rra", seed, monotone=True)
        bound = spaces.bounds()[2]
        best = exhaustive.search(spaces.spaces(bound))
        losses.append(1 - branch_and_bound.search(spaces.spaces(bound)).throughput / best.throughput)
    assert max(losses) > 10 * THROUGHPUT_TOLERANCE


def test_a_wrong_direction_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    encode_batch, decode_iterations = RraSettings.variables
    wrong = (encode_batch._replace(throughput="falls", latency="falls"), decode_iterations)
    monkeypatch.setattr(RraSettings, "variables", wrong)
    for seed in FEW:
        spaces = Spaces("rra", seed, monotone=True)
        bound = spaces.bounds()[1]
        found = checked.search(spaces.spaces(bound))
        assert (found.method, found.gap) == ("optuna", None)
        assert found.throughput >= branch_and_bound.search(spaces.spaces(bound)).throughput


@EVERY_KIND
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("monotone", [True, False])
def test_bounds_that_hold_are_not_doubted(kind: str, seed: int, monotone: bool) -> None:
    spaces = Spaces(kind, seed, monotone=monotone)
    for bound in spaces.bounds():
        if not spaces.spaces(bound):
            continue
        found, trusted = checked.search(spaces.spaces(bound)), branch_and_bound.search(spaces.spaces(bound))
        assert (found.method, found.settings) == (trusted.method, trusted.settings)
        assert found.gap == pytest.approx(trusted.gap, abs=1e-9)


def test_fewer_iterations_a_phase_may_serve_less_on_stages() -> None:
    """Large decode steps before an encode phase pass stages one by one: rra's one broken direction, in its bound."""
    space = Spaces("rra", 14, monotone=True).spaces()[0]
    ends = {"encode_batch": np.asarray([4, 4]), "decode_iterations": np.asarray([1, 3])}
    of = space.evaluate(ends)
    assert of.throughput[1] > 1.1 * of.throughput[0]
    assert of.throughput[1] <= box_bounds(space, of, space.evaluate_floor(ends, of), 2, 0)[0]


def test_a_table_lowered_before_its_end_stays_below_beyond_it() -> None:
    measured = random_profile(np.random.default_rng(0), monotone=True)
    measured = measured.model_copy(update={"head": Curve(points=(1, 4, 16), seconds=(1.0, 8.0, 9.0))})
    floor = minorant(measured).head
    assert Line.of(floor)([1, 4, 16, 64, 1000]) == pytest.approx([1.0, 4.0, 9.0, 13.0, 91.0])


@pytest.mark.parametrize(("kind", "seed", "monotone"), [("waa", 19, False), ("rra", 14, True)])
def test_bounds_hold_where_they_once_did_not(kind: str, seed: int, monotone: bool) -> None:
    """Prompts beyond the profile's last point; large decode steps through two stages."""
    test_no_point_exceeds_the_bound_of_its_box(kind, seed, monotone)
    test_bounds_that_hold_are_not_doubted(kind, seed, monotone)


@EVERY_KIND
def test_a_bound_that_is_none_is_caught(kind: str) -> None:
    """A placement promised less than it gives."""
    spaces = Spaces(kind, 1, monotone=True)
    tried = spaces.spaces()
    best = exhaustive.search(spaces.spaces()).throughput
    for space in tried:
        space.bound = 0.5 * best
    found = checked.search(tried)
    assert (found.method, found.gap) == ("optuna", None)


@pytest.mark.parametrize("kinds", [KINDS, *((kind,) for kind in KINDS if kind != "waa")])
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
