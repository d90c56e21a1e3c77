"""A class of predictions that fewer than ten published rows check is never without its label."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product

import pytest

import xgpt
from xgpt.core.io import configs_dir
from xgpt.core.schema import Plan
from xgpt.core.schema.recommendation import AtLoad, Gain, OfferedCluster, Ranged
from xgpt.deciding import words
from xgpt.deciding.verified import unverified
from xgpt.resolve import load_cluster, load_engine, load_model

MODELS = {"dense": "llama-3.1-8b", "experts": "qwen3-30b-a3b", "hybrid": "qwen3-next-80b-a3b"}
ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt-llm"}
CLUSTERS = {"NVIDIA": "h100x1", "AMD": "mi300x-x8"}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return xgpt.plan(
        model="llama-3.1-8b",
        cluster="h100x1",
        engine="vllm",
        latency_bound_s=20,
        objective="saturated",
        policy="chunked",
    )


@pytest.fixture(scope="module")
def rows() -> Counter[tuple[str, ...]]:
    """Published rows behind each class, counted from the shipped file and not by the code under test."""
    found = Counter[tuple[str, ...]]()
    for _, engine, family, device, profile, _, _, quantity, ratios in json.loads(
        (configs_dir() / "errors.json").read_text()
    ):
        if quantity == "throughput":
            vendor = "AMD" if device.startswith("mi3") else "NVIDIA"
            found[family, engine] += len(ratios)
            found[family, vendor, profile] += len(ratios)
    return found


@pytest.mark.parametrize(("family", "engine", "vendor"), list(product(MODELS, ENGINES, CLUSTERS)))
def test_classes_with_few_rows_are_labelled(
    plan: Plan, rows: Counter[tuple[str, ...]], family: str, engine: str, vendor: str
) -> None:
    for profile in ("analytic", "imported"):
        draft = plan.but(
            model=load_model(MODELS[family])[0],
            engine=load_engine(ENGINES[engine]),
            cluster=load_cluster(CLUSTERS[vendor]),
            profile=plan.profile.but(source=profile),
        )
        few = min(rows[family, engine], rows[family, vendor, profile]) < 10
        said = unverified(draft)
        assert bool(said) == (few or vendor == "AMD"), (profile, said)


def test_a_derived_efficiency_is_named_last(plan: Plan) -> None:
    """ "l4, whose efficiency is derived from that of l40s and pipelines" read as if it were derived from pipelines."""
    draft = plan.but(cluster=load_cluster("l4x8"), stages=(plan.stages[0], plan.stages[0]), engine=load_engine("vllm"))
    assert unverified(draft) == ("pipelines", "l4, whose efficiency is derived from that of l40s")


@pytest.mark.parametrize("engine", [None, "xgpt"])
@pytest.mark.parametrize("cluster", ["h100x1", "h100x8"])
def test_no_published_row_is_of_plans_without_an_engines_own_times(
    plan: Plan, rows: Counter[tuple[str, ...]], engine: str | None, cluster: str
) -> None:
    named = None if engine is None else load_engine(engine)
    assert rows["dense", "xgpt"] == 0
    assert unverified(plan.but(engine=named, cluster=load_cluster(cluster))) == ("plans without an engine's own times",)


@pytest.mark.parametrize(
    ("engine", "policy", "said"),
    [
        ("vllm", "chunked", "vLLM 0.32"),
        ("xgpt", "chunked", "xgpt's engine"),
        (None, "orca", "xgpt's engine"),
        (None, "chunked", "vLLM without its own times"),  # whose `vllm serve` is printed
    ],
)
def test_the_answer_names_the_engine_whose_times_it_has(engine: str | None, policy: str, said: str) -> None:
    found = xgpt.solve(
        model="llama-3.1-8b", cluster="h100x1", latency_bound_s=20, objective="saturated", policy=policy, engine=engine
    ).recommendation
    assert f" on 1 x h100-80gb-hbm3, {said}" in words.lines(found, 1000)[0]
    assert found.best.processes[0].command.startswith("xgpt" if "xgpt" in said else "vllm")


def test_what_both_plans_lack_does_not_verify_either() -> None:
    found = xgpt.solve(model="llama-3.1-8b", cluster="h100x1", latency_bound_s=20, objective="saturated").recommendation
    for first, other, said in (
        (("pipelines",), (), "Best that measurements verify: "),
        (("pipelines", "a"), ("a",), "Next best: "),
        (("a",), ("pipelines", "a"), "Higher (not verified by measurements: pipelines): "),
    ):
        offer = found.best.but(unverified=other, rate_per_s=Ranged(value=2 * found.best.rate_per_s.value))
        told = found.but(best=found.best.but(unverified=first), runner_up=offer)
        assert any(line.startswith(said) for line in words.lines(told, 1000))
        lost = told.but(best=told.best.but(at_load=AtLoad(rate_per_s=9, share_kept=0.9, holds=False)))
        assert not any(line.startswith("Higher") for line in words.lines(lost, 1000)), "what is kept of a log decides"


def test_no_label_where_steps_were_measured(plan: Plan) -> None:
    draft = plan.but(model=load_model(MODELS["hybrid"])[0], profile=plan.profile.but(source="measured"))
    assert unverified(draft) == ()


def test_a_gain_and_a_price_stand_beside_their_label() -> None:
    found = xgpt.solve(model="llama-3.1-8b", cluster="h100x1", latency_bound_s=20, objective="saturated").recommendation
    gain = Gain(then=2.0, now=1.0, unit="requests/s", factor=Ranged(value=2.0))
    best = found.best.but(unverified=("drafts",))
    for now, is_said in ((found.best, True), (best, False)):
        text = words.gain_in_words(found.but(best=best, now=now, gain=gain))
        assert ("Gain (not verified):" in text) == is_said
    cluster = OfferedCluster(name="a", num_devices=1, price_per_device_hour=2, cost_per_hour=2, unverified=("drafts",))
    assert "2 an hour (not verified): chosen." in words._cluster(cluster)


def test_a_range_above_its_ceiling_says_for_which_steps_the_ceiling_holds() -> None:
    found = xgpt.solve(model="llama-3.1-8b", cluster="h100x1", latency_bound_s=20).recommendation
    for high, is_said in ((3.0, True), (1.0, False)):
        best = found.best.but(rate_per_s=Ranged(value=1.0, low=0.5, high=high))
        told = found.but(best=best, limit_per_s=1.1, limit_gap=0.1, saturated_per_s=None, with_more_work=None)
        assert ("exceeds 1.1/s at the predicted step times." in " ".join(words.lines(told, 1000))) == is_said
