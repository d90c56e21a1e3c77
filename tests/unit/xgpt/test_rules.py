"""A scheduling rule of one's own: its contract is checked, and one object runs on both clocks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import xgpt
from tests.rings import examples
from xgpt.core.errors import InputError
from xgpt.core.policies import MicroBatch, Pool, Request, Step
from xgpt.rules import load_rule, name_of
from xgpt.testing import _usual_plan, check_rule

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xgpt.testing.NUM_REQUESTS", examples(400, 100))


class LongestFirst(xgpt.Rule):
    def key(self, request: Request) -> float:
        return -request.input_length


class Lucky(xgpt.Rule):
    def next_step(self, pool: Pool, batch: MicroBatch, *, may_encode: bool = True) -> Step | None:
        if batch.num_running and random.random() < 0.1:
            return None
        return super().next_step(pool, batch, may_encode=may_encode)


class Lazy(xgpt.Rule):
    """Never lets the last request decode."""

    def next_step(self, pool: Pool, batch: MicroBatch, *, may_encode: bool = True) -> Step | None:
        if not pool.num_waiting and batch.num_running == 1:
            return None
        return super().next_step(pool, batch, may_encode=may_encode)


class Greedy(xgpt.Rule):
    """Decodes each request twice in a step."""

    def next_step(self, pool: Pool, batch: MicroBatch, *, may_encode: bool = True) -> Step | None:
        step = super().next_step(pool, batch, may_encode=may_encode)
        return None if step is None else step._replace(decode=step.decode * 2)


class Forgetful(xgpt.Rule):
    """Admits a request and returns no step."""

    def next_step(self, pool: Pool, batch: MicroBatch, *, may_encode: bool = True) -> Step | None:
        return None if pool.admit(batch) else super().next_step(pool, batch, may_encode=may_encode)


OURS = xgpt.Rule()


def test_rules_that_keep_the_contract() -> None:
    check_rule(LongestFirst)
    check_rule(OURS)


@pytest.mark.parametrize(
    ("rule", "why"),
    [(Lucky, "runs of the same"), (Lazy, "never end"), (Greedy, "twice"), (Forgetful, "admitted a request")],
)
def test_what_a_rule_breaks_is_said(rule: type[xgpt.Rule], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        check_rule(rule)


def test_the_inherited_rule_is_the_plan_s_and_another_order_is_another_schedule() -> None:
    plan = _usual_plan()
    own, inherited, longest = (
        xgpt.simulate(plan, num_requests=300, arrival_rate_per_s=40, rule=rule).steps
        for rule in (None, OURS, LongestFirst())
    )
    assert own == inherited != longest


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("LongestFirst", "MODULE:NAME"),
        ("no_such_module:X", "ModuleNotFoundError"),
        (f"{__name__}:NoSuch", "AttributeError"),
        (f"{__name__}:ROOT", r"no xgpt\.Rule"),
    ],
)
def test_what_is_no_rule_is_refused(name: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        load_rule(name)


def test_a_rule_is_found_by_its_name() -> None:
    for rule in (LongestFirst(), OURS):
        assert type(load_rule(name_of(rule))) is type(rule)
    changed = LongestFirst()
    changed.factor = 2.0  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="module of its own"):
        name_of(changed)


def test_two_lanes_have_no_rule_of_one_s_own() -> None:
    asked = {"model": "opt-13b", "cluster": "a40x4", "latency_bound_s": 8, "objective": "saturated"}
    plan = xgpt.plan(**asked, policy="waa", fix={"encode_batch": 2})
    with pytest.raises(InputError, match="waa has two lanes"):
        xgpt.simulate(plan, num_requests=10, rule=OURS)


@pytest.mark.long  # profiles this machine
def test_the_same_object_runs_on_the_real_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples")
    from xgpt.core.schema import Histogram, Workload
    from xgpt.resolve import load_model

    spec, _ = load_model("opt-125m")
    shape = {"num_layers": 1, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "ffn_size": 64}
    tiny = spec.model_copy(update={"name": "tiny", "vocab_size": 256, **shape})
    lengths = Workload(
        name="short",
        input=Histogram(lengths=(8, 32), probabilities=(0.5, 0.5)),
        output=Histogram(lengths=(4, 16), probabilities=(0.5, 0.5)),
    )
    plan = xgpt.plan(model=tiny, workload=lengths, latency_bound_s=None, policy="orca", headroom=0.1)
    found = xgpt.bench(plan, num_requests=60, rule="own_rule:ShortestFirst")
    assert not found.report.num_failed
    assert found.report.pace is not None  # every step of the log was replayed with the rule
