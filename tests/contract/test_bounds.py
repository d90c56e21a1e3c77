"""Directions and bounds that searches rest on: no point contradicts them, and where one would, it is caught."""

from __future__ import annotations

import numpy as np
import pytest

from tests.contract.scenarios import random_profile
from tests.contract.spaces import EVERY_KIND, FEW, KINDS, SEEDS, Spaces, every_point
from tests.rings import few
from xgpt.core.schema import Curve, RraSettings
from xscheduler.box_bounds import box_bounds
from xscheduler.lower_tables import lowered
from xscheduler.search import branch_and_bound, checked
from xscheduler.tolerances import TOLERANCES
from xsimulator.costs.curves import Grid, Line


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
def test_lower_tables_lie_below_and_are_monotone(seed: int) -> None:
    profile = random_profile(np.random.default_rng(seed), monotone=False)
    floor = lowered(profile)
    assert lowered(floor) is floor
    assert lowered(random_profile(np.random.default_rng(seed), monotone=True)) == random_profile(
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


def test_a_table_lowered_before_its_end_stays_below_beyond_it() -> None:
    measured = random_profile(np.random.default_rng(0), monotone=True)
    measured = measured.model_copy(update={"head": Curve(points=(1, 4, 16), seconds=(1.0, 8.0, 9.0))})
    floor = lowered(measured).head
    assert Line.of(floor)([1, 4, 16, 64, 1000]) == pytest.approx([1.0, 4.0, 9.0, 13.0, 91.0])


def test_fewer_iterations_a_phase_may_serve_less_on_stages() -> None:
    """Large decode steps before an encode phase pass stages one by one: rra's one broken direction, in its bound."""
    space = Spaces("rra", 14, monotone=True).spaces()[0]
    ends = {"encode_batch": np.asarray([4, 4]), "decode_iterations": np.asarray([1, 3])}
    figures = space.evaluate(ends)
    assert figures.throughput[1] > 1.1 * figures.throughput[0]
    assert figures.throughput[1] <= box_bounds(space, figures, space.evaluate_floor(ends, figures), 2, 0)[0]


@EVERY_KIND
@pytest.mark.parametrize("seed", few(range(24)))
@pytest.mark.parametrize("monotone", few([False, True]))
def test_bounds_that_hold_are_not_doubted(kind: str, seed: int, monotone: bool) -> None:
    spaces = Spaces(kind, seed, monotone=monotone)
    for bound in spaces.bounds():
        if not spaces.spaces(bound):
            continue
        found, trusted = checked.search(spaces.spaces(bound)), branch_and_bound.search(spaces.spaces(bound))
        assert (found.method, found.settings) == (trusted.method, trusted.settings)
        assert found.most == pytest.approx(trusted.most, rel=1e-9)


@pytest.mark.parametrize(("kind", "seed", "monotone"), [("waa", 19, False), ("rra", 14, True)])
def test_bounds_hold_where_they_once_did_not(kind: str, seed: int, monotone: bool) -> None:
    """Prompts beyond the profile's last point; large decode steps through two stages."""
    test_no_point_exceeds_the_bound_of_its_box(kind, seed, monotone)
    test_bounds_that_hold_are_not_doubted(kind, seed, monotone)


@pytest.mark.parametrize(
    ("kind", "swept", "method"),
    [*((kind, checked.SWEPT, "exhaustive") for kind in KINDS), *few([(kind, 0, "optuna") for kind in KINDS], 0)],
)
def test_a_bound_that_is_none_is_caught(monkeypatch: pytest.MonkeyPatch, kind: str, swept: int, method: str) -> None:
    """A placement promised less than it gives: small spaces are swept whole, larger ones searched in another way."""
    monkeypatch.setattr(checked, "SWEPT", swept)
    spaces = Spaces(kind, 1, monotone=True)
    tried = spaces.spaces()
    best = checked.exhaustive(spaces.spaces()).throughput
    for space in tried:
        space.bound = 0.5 * best
    found = checked.search(tried)
    assert (found.method, found.most) == (method, found.throughput if swept else None)
    assert found.throughput == best or not swept


def test_a_wrong_direction_loses_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agreement above would not survive a direction declared the wrong way round."""
    encode_batch, decode_iterations = RraSettings.variables
    wrong = (encode_batch._replace(throughput="falls", latency="falls"), decode_iterations)
    monkeypatch.setattr(RraSettings, "variables", wrong)
    losses = []
    for seed in FEW:
        spaces = Spaces("rra", seed, monotone=True)
        bound = spaces.bounds()[2]
        best = checked.exhaustive(spaces.spaces(bound))
        losses.append(1 - branch_and_bound.search(spaces.spaces(bound)).throughput / best.throughput)
    assert max(losses) > 10 * TOLERANCES.throughput


def test_a_wrong_direction_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    encode_batch, decode_iterations = RraSettings.variables
    wrong = (encode_batch._replace(throughput="falls", latency="falls"), decode_iterations)
    monkeypatch.setattr(RraSettings, "variables", wrong)
    for seed in FEW:
        spaces = Spaces("rra", seed, monotone=True)
        bound = spaces.bounds()[1]
        found = checked.search(spaces.spaces(bound))
        assert (found.method, found.most) == ("exhaustive", found.throughput)
        assert found.throughput >= branch_and_bound.search(spaces.spaces(bound)).throughput
