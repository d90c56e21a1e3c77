"""Plans of models with experts: how a group of devices divides them is searched, and certificates hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.contract.scenarios import problem
from tests.rings import examples, few
from xgpt.core.schema import Experts, Plan, Precision, Profile
from xgpt.resolve import load_model
from xprofiler import analytic, ranks
from xprofiler.experts import Routing, chances
from xscheduler.box_bounds import breach
from xscheduler.candidates import Candidates
from xscheduler.lower_tables import lowered
from xscheduler.placement import Placement
from xscheduler.problem import Problem
from xscheduler.schedule import Scheduler
from xscheduler.tolerances import TOLERANCES
from xsimulator.memory import WORKSPACE_BYTES, LaneMemory
from xsimulator.stages import lane


def with_faster_parts(profile: Profile, factor: float) -> Profile:
    """Everything but attention takes less where experts are divided among devices."""
    layers = (each.but(rest=each.rest.times(factor)) if each.ep_degree > 1 else each for each in profile.layers)
    return profile.but(layers=tuple(layers))


def small(model: str, bound_s: float | None, factor: float = 1.0) -> Problem:
    subject = problem(model, "h200x8", "chat-short", bound_s)
    return replace(subject, max_devices=2, profile=with_faster_parts(subject.profile, factor))


@pytest.mark.parametrize(
    ("model", "factor", "kind"),
    [
        ("gpt-oss-20b", 0.9, "orca"),
        ("gpt-oss-20b", 0.9, "static"),
        ("qwen3-30b-a3b", 1.0, "orca"),
        *few([(*of, kind) for of in (("gpt-oss-20b", 0.9), ("qwen3-30b-a3b", 1.0)) for kind in ("rra", "waa")], 0),
    ],
)
def test_the_search_finds_what_trying_everything_finds(model: str, factor: float, kind: str) -> None:
    subject = small(model, 12.0, factor)
    best = Scheduler(subject, "exhaustive").best((kind,))
    found = Scheduler(subject).best((kind,))
    assert found.search.gap is not None
    ratio = best.estimate.throughput_rps / found.estimate.throughput_rps
    assert 1 - 1e-9 <= ratio <= 1 + min(TOLERANCES.throughput, found.search.gap) + 1e-9


@pytest.mark.parametrize("kind", few(["orca", "chunked", "waa"]))
def test_a_search_of_many_devices_opens_few_placements(kind: str) -> None:
    """Bounds from the convex floor of experts' times left 280 to 600 of them open, and 100,000 predictions too few."""
    found = Scheduler(problem("deepseek-v3", "h200x32", "chat-long", 30.0)).best((kind,))
    assert found.search.gap is not None and found.search.gap < 0.005
    assert found.search.evaluations < 30_000  # small boxes are swept


@pytest.mark.parametrize("kind", few(["orca", "waa", "chunked", "rra", "static"]))
def test_no_setting_of_a_placement_beats_its_bound(kind: str) -> None:
    """Random settings of random placements of many devices, on curves of experts, with a latency bound and without."""
    rng = np.random.default_rng(5)
    for bound_s in (None, 30.0):
        spaces = Candidates(problem("qwen3-235b-a22b", "h200x32", "chat-long", bound_s)).spaces(kind)
        for i in rng.choice(len(spaces), examples(25, 4), replace=False):
            space, branches = spaces[i], spaces[i].branches()
            branch = [branches[b] for b in rng.integers(len(branches), size=200)]
            columns = {name: np.asarray([settings[name] for settings in branch]) for name in branch[0]}
            for axis in space.searched:
                columns[axis.variable.name] = axis.values[(len(axis.values) ** rng.random(200)).astype(int) - 1]
            evaluation = space.evaluate(columns)
            best = evaluation.throughput[evaluation.feasible].max(initial=0.0)
            assert best <= space.bound * (1 + 1e-9), space.placement


@pytest.mark.parametrize("kind", ["orca", "rra", "chunked", "static", "waa"])
def test_no_setting_beats_the_bound_of_a_box_around_it(kind: str) -> None:
    """On curves that rise steeply while few tokens meet few experts."""
    rng = np.random.default_rng(3)
    scheduler = Scheduler(small("mixtral-8x7b", 30.0))
    spaces = scheduler.candidates.spaces(kind)
    assert spaces
    for space in spaces:
        assert breach(space, 60, rng) <= 1e-9


def test_times_of_few_tokens_are_lowered_where_they_rise_faster_than_their_number() -> None:
    profile = problem("mixtral-8x7b", "h200x8", "chat-short").profile
    floor = lowered(profile)
    for layer, low in zip(profile.layers, floor.layers, strict=True):
        per_token = np.asarray(low.rest.seconds) / np.asarray(low.rest.points)
        assert (np.diff(per_token) <= 1e-15).all()
        at = np.interp(layer.rest.points, low.rest.points, low.rest.seconds)
        assert (at <= np.asarray(layer.rest.seconds) * (1 + 1e-9)).all()


@pytest.mark.parametrize(("factor", "ep_degree"), [(0.8, 2), (1.2, 1)])
def test_a_plan_divides_experts_where_that_is_faster(factor: float, ep_degree: int) -> None:
    subject = small("mixtral-8x7b", None, factor)
    plan = Scheduler(subject).best(("orca",))
    assert {stage.ep for stage in plan.stages} == {ep_degree}
    assert plan.policy.ep_degree == ep_degree  # type: ignore[union-attr]
    assert Placement.of(plan).decode_lane[0].group == (plan.stages[0].tp, ep_degree)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_a_stage_divides_its_experts_evenly() -> None:
    plan = Scheduler(small("mixtral-8x7b", None)).best(("orca",))
    first, *others = plan.stages
    for ep in (3, 4):
        with pytest.raises(ValueError, match=r"must divide the tp of its stage|one stage and form groups of"):
            Plan.model_validate(plan.model_dump() | {"stages": [first.model_copy(update={"ep": ep}), *others]})


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-120b", "qwen3-235b-a22b", "gemma-3-27b"])
@pytest.mark.parametrize(("tps", "layers"), [((8,), None), ((4, 4), 3), ((1,) * 16, 2)])
def test_devices_hold_the_model_together(name: str, tps: tuple[int, ...], layers: int | None) -> None:
    """All weights stand once, but for what each device of a group holds as a whole and a tied head of another stage."""
    subject = problem(name, "h200x32", "chat-short")
    spec, num = subject.model, subject.model.num_layers
    split = [num] if layers is None else [layers] * (len(tps) - 1) + [num - layers * (len(tps) - 1)]
    cluster = subject.cluster.but(device=subject.cluster.device.but(memory_bytes=10**13))
    memory = LaneMemory(spec, cluster, Precision.of("bfloat16", "gpu"), lane(tps, split), 16)
    total_bytes = sum(memory.weight_bytes * tps)
    copies = sum((tp - 1) * n * spec.unshared_bytes("bfloat16", 0, 1) for tp, n in zip(tps, split, strict=True))
    head = 2 * spec.vocab_size * spec.hidden_size * (spec.tie_embeddings and len(tps) > 1)
    assert total_bytes == pytest.approx(spec.weight_bytes("bfloat16") + copies + head, rel=1e-9)
    assert (memory.fixed_bytes >= memory.weight_bytes + WORKSPACE_BYTES).all()


def test_latent_keys_and_values_are_held_by_every_device_of_a_group() -> None:
    subject = problem("deepseek-v3", "h200x8", "chat-short")
    memory = LaneMemory(subject.model, subject.cluster, Precision.of("bfloat16", "gpu"), lane((8,), (61,)), 16)
    block_bytes = memory.device_bytes(1, 0)[0] - memory.device_bytes(0, 0)[0]
    assert block_bytes == 16 * 61 * (512 + 64) * 2


@pytest.mark.parametrize("skew", [0.0, 1.0, 1.2])
@pytest.mark.parametrize(("number", "active"), [(8, 2), (128, 8), (32, 4), (5, 5)])
def test_each_token_has_its_experts(number: int, active: int, skew: float) -> None:
    found = chances(Experts(number=number, active=active, ffn_size=8, skew=skew))
    assert found.sum() == pytest.approx(active)
    assert (found <= 1 + 1e-9).all() and (np.diff(found) <= 1e-12).all()


def test_experts_that_are_met_are_those_of_a_simulation() -> None:
    experts = Experts(number=128, active=8, ffn_size=8)
    rng = np.random.default_rng(0)
    for tokens in (1, 4, 32, 200):
        loads = np.zeros((400, 128))
        for row in loads:
            for _ in range(tokens):
                row[rng.choice(128, 8, replace=False)] += 1
        expected, hit = Routing(experts).expected(tokens)
        assert hit.sum() == pytest.approx((loads > 0).sum(1).mean(), rel=0.02)
        assert expected.sum() == 8 * tokens
        busiest = loads.reshape(400, 8, 16).sum(2).max(1).mean()
        assert Routing(experts, 8).expected(tokens)[0].sum() == pytest.approx(busiest, rel=0.25)


def test_a_token_reads_its_experts_alone() -> None:
    """One decode of Mixtral reads two of eight experts; many read all of them and are bound by products. Experts read
    at a share of the rate of other weights.
    """
    subject = problem("mixtral-8x7b", "h200x8", "chat-short")
    rest = subject.profile.layer(1).rest
    seconds = dict(zip(rest.points, rest.seconds, strict=True))
    efficiency = subject.cluster.device.efficiency
    assert efficiency is not None
    bandwidth = 4.8e12 * efficiency.weights
    attention, expert = subject.model.attention_params, subject.model.sizes.expert(subject.model.kinds[0])
    assert efficiency.experts < 0.9
    of_one, of_many = (2 * (attention + number * expert / efficiency.experts) / bandwidth for number in (2, 8))
    assert of_one < seconds[1] < of_one + 60e-6
    assert of_many < seconds[64] < of_many + 60e-6
    assert seconds[8192] == pytest.approx(2 * seconds[4096], rel=0.05)


def test_a_layer_with_a_window_costs_no_more_beyond_it() -> None:
    subject = problem("gpt-oss-20b", "h200x1", "chat-short")
    layer, lengths = subject.profile.layer(1), subject.profile.layer(1).decode_attention.lengths
    decode = np.asarray(layer.decode_attention.seconds)[-1]
    at = {length: decode[i] for i, length in enumerate(lengths)}
    without = subject.model.but(sliding_window=None, full_attention_layers=())
    full = analytic.profile(without, subject.cluster, "bfloat16").layer(1)
    assert at[16384] == pytest.approx((at[128] + full.decode_attention.seconds[-1][-1]) / 2, rel=0.1)
    assert layer.encode_attention.seconds[0][-1] < 0.6 * full.encode_attention.seconds[0][-1]


def test_experts_are_only_divided_evenly() -> None:
    """A profile of groups that no plan may use made plans that were refused."""
    spec, _ = load_model("mixtral-8x7b")
    assert spec.experts is not None
    odd = spec.model_copy(update={"experts": spec.experts.model_copy(update={"number": 3, "active": 1})})
    assert ranks.groups(spec, 2) == ((1, 1), (2, 1), (2, 2))
    assert ranks.groups(odd, 2) == ((1, 1), (2, 1))
    assert ranks.groups(load_model("llama-3.1-8b")[0], 2) == ((1, 1), (2, 1))
