"""What holds of every search: it agrees with the exhaustive one, keeps the bound, and proves what it says."""

from __future__ import annotations

import gc
import re
import weakref
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.contract.scenarios import problem
from tests.contract.spaces import EVERY_KIND, KINDS, SEEDS, Spaces
from tests.rings import few
from xgpt.core.errors import InfeasibleError
from xgpt.core.io import dump_json
from xgpt.core.schema import Constraint, Plan, StaticSettings
from xscheduler.problem import Problem
from xscheduler.schedule import Scheduler
from xscheduler.search import branch_and_bound, checked, optuna_search
from xscheduler.tolerances import TOLERANCES

ROUNDING = 1e-9
"""A point's prediction differs in its last bit with how many others are predicted along with it."""


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
        best = checked.exhaustive(spaces.spaces(bound))
        found = branch_and_bound.search(spaces.spaces(bound))
        assert (found.settings is None) == (best.settings is None)
        assert found.throughput <= best.throughput * (1 + ROUNDING)
        assert found.throughput >= best.throughput / (1 + TOLERANCES.throughput), (found.settings, best.settings)


@EVERY_KIND
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("monotone", few([False, True]))
def test_certificate_holds(kind: str, seed: int, monotone: bool) -> None:
    """However uneven the tables: no point has over (1 + gap) times the throughput found."""
    spaces = Spaces(kind, seed, monotone=monotone)
    for bound in spaces.bounds():
        found = branch_and_bound.search(spaces.spaces(bound))
        best = checked.exhaustive(spaces.spaces(bound))
        if found.settings is None or found.space is None:
            continue
        assert found.most is not None
        assert best.throughput <= found.most * (1 + ROUNDING)
        chosen = found.space.evaluate(
            {v.name: np.asarray([getattr(found.settings, v.name)]) for v in found.settings.variables}
        )
        assert chosen.fits.all()
        # To within rounding: a bound that is some point's own latency is met or missed by the last bit.
        assert chosen.excess.max() <= ROUNDING


@EVERY_KIND
@pytest.mark.parametrize("seed", SEEDS)
def test_a_tighter_bound_never_gives_more(kind: str, seed: int) -> None:
    spaces = Spaces(kind, seed, monotone=True)
    best = [branch_and_bound.search(spaces.spaces(bound)).throughput for bound in spaces.bounds()]
    for looser, tighter in pairwise(best):
        assert tighter <= looser * (1 + TOLERANCES.throughput)


@pytest.mark.long
def test_an_objective_of_the_users_own_is_searched_by_optuna() -> None:
    """Least time to first token, at no less than 10 requests a second: neither has a bound."""
    subject = problem("llama-3.1-8b", "h200x1", "orca", 4.0)
    constraint = subject.constraint.model_copy(update={"maximise": "-ttft if throughput >= 10 else -1e9"})
    plan = Scheduler(subject.under(constraint)).best(("orca",))
    assert plan.search.method == "optuna"
    assert plan.search.gap is None
    assert plan.estimate.throughput_rps >= 10
    assert plan.estimate.ttft_s < Scheduler(subject).best(("orca",)).estimate.ttft_s


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
    subject = problem(model, cluster, workload, bound_s)
    best = [Scheduler(replace(subject, max_devices=n)).best((kind,)).estimate.throughput_rps for n in sizes]
    for fewer, more in pairwise(best):
        assert more >= fewer / (1 + TOLERANCES.throughput)


@pytest.mark.parametrize("kind", few(KINDS, 2))
def test_optuna_is_repeatable_and_never_beats_exhaustive(kind: str) -> None:
    spaces = Spaces(kind, 5, monotone=True)
    bound = spaces.bounds()[2]
    first, second = (optuna_search.search(spaces.spaces(bound), num_trials=40) for _ in range(2))
    best = checked.exhaustive(spaces.spaces(bound))
    assert first == second
    assert first.most is None
    assert 0 < first.throughput <= best.throughput * (1 + ROUNDING)


@pytest.mark.parametrize("kinds", [KINDS, *((kind,) for kind in KINDS if kind != "waa")])
def test_the_nearest_bound_can_be_asked_for(kinds: tuple[str, ...]) -> None:
    def plan(constraint: Constraint) -> Plan:
        subject = problem("llama-3.1-8b", "h200x1", "orca")
        return Scheduler(
            Problem(subject.model, None, subject.cluster, subject.workload, subject.profile, constraint)
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
    subject = problem("llama-3.1-8b", "h200x1", "orca")

    def best(value: float) -> Plan:
        constraint = Constraint.model_validate({name: value, "headroom": headroom})
        return Scheduler(
            Problem(subject.model, None, subject.cluster, subject.workload, subject.profile, constraint)
        ).best()

    with pytest.raises(InfeasibleError, match=f"^{name}: ") as failure:
        best(1e-4)
    assert failure.value.binding == name
    nearest = float(re.findall(r" is ([\d.]+) s", str(failure.value))[0])
    best(nearest)


@pytest.mark.long
def test_same_input_same_plan() -> None:
    def text() -> str:
        plan = Scheduler(problem("opt-13b", "a40x4", "summarization", 20.0)).best()
        return dump_json(plan.model_copy(update={"search": plan.search.model_copy(update={"seconds": 0.0})}))

    assert text() == text()


def test_a_search_leaves_nothing_to_the_garbage_collector() -> None:
    """Tens of thousands of objects: looking through them took up to a third of a later search's time."""
    scheduler = Scheduler(problem("opt-13b", "a40x4", "summarization", 20.0))
    gc.disable()
    try:
        scheduler.best(("chunked",))
        dead = weakref.ref(scheduler)
        del scheduler
        assert dead() is None
    finally:
        gc.enable()


def test_a_plan_warns_of_steps_beyond_the_profile() -> None:
    subject = problem("opt-13b", "h200x1", "summarization")
    scheduler = Scheduler(subject)
    placement = scheduler.candidates.uniform_placement("static", tp_degree=1, num_stages=1, replicas=1)
    small, large = (scheduler.score(StaticSettings(batch=n), placement).estimate.warnings for n in (10, 100))
    last = subject.profile.layers[0].rest.points[-1]
    assert small == ()
    assert large == (f"times of a step of 25735 tokens are extrapolated (profile: {last})",)
