"""Speculative decoding: planned, simulated, exported and refused; its speed-ups against published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.exports import export
from tests.unit.xgpt.checkpoints.test_planned import official, spec_like
from xgpt import api
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.schema import ModelSpec, Plan, Speculation
from xgpt.problems import from_metrics
from xgpt.resolve import load_cluster, load_engine, load_model
from xgpt.serving.checking import check_runs
from xprofiler.analytic import profile
from xsimulator.costs.speculating import speculating
from xsimulator.costs.step_cost import LaneCost, StepCounts
from xsimulator.lengths import decoded
from xsimulator.run import run_simulation
from xsimulator.stages import whole

# Against published speed-ups -------------------------------------------------------------------------------------


def speed_up(spec: ModelSpec, cluster: str, engine: str, speculation: Speculation) -> float:
    """Return how much less time a token takes one request of 600 tokens with a draft."""
    engine_spec = load_engine(engine)
    plain = profile(spec, load_cluster(cluster), "bfloat16", engine_spec)
    step = StepCounts((), 1, 600, 1, 1)
    alone, drafted = (
        LaneCost(spec, speculating(plain, spec, how), whole(spec), engine=engine_spec).step(step)[0]
        for how in (None, speculation)
    )
    return alone / drafted


def accepted(tokens_per_step: float, ahead: int) -> tuple[float, ...]:
    """Return an acceptance with this mean; only its sum matters to the time of a step."""
    return ((tokens_per_step - 1) / ahead,) * ahead


EAGLE = {2: (2.1, 4.37), 3: (2.29, 4.29), 4: (2.39, 4.48), 5: (2.43, 4.71), 6: (2.45, 4.94), 7: (2.47, 5.2)}
"""By tokens ahead: tokens a step and milliseconds a token of Llama-3.1-8B on an H100, one request, 7.07 ms without
(EAGLE-1 in vLLM 0.9, github vllm-project/vllm issue 20780)."""


@pytest.mark.parametrize("ahead", EAGLE)
def test_eagle_in_vllm(ahead: int) -> None:
    tokens, token_ms = EAGLE[ahead]
    spec, _ = load_model("llama-3.1-8b")
    draft = Speculation(method="eagle", tokens=ahead, acceptance=accepted(tokens, ahead))
    assert speed_up(spec, "h100x1", "vllm-0.10", draft) == pytest.approx(7.07 / token_ms, rel=0.1)


ANGELSLIM = {
    ("Qwen/Qwen3-1.7B", 2): [(2.17, 642.93 / 381.05)],
    ("Qwen/Qwen3-8B", 2): [(1.99, 257.52 / 151.81)],
    ("Qwen/Qwen3-14B", 2): [(1.79, 145.33 / 93.26)],
    ("Qwen/Qwen3-32B", 2): [(1.91, 74.1 / 43.32)],
    ("Qwen/Qwen3-30B-A3B", 2): [(2.04, 438.07 / 320.87)],
    ("Qwen/Qwen3-VL-2B-Instruct", 4): [(2.11, 511.52 / 348.55), (2.26, 560.55 / 350.9), (2.29, 555.22 / 346.31)],
    ("Qwen/Qwen3-VL-4B-Instruct", 4): [(2.57, 415.29 / 212.87), (2.26, 372.89 / 213.24), (2.82, 459.37 / 211.69)],
}
"""By model and tokens ahead: tokens a step and speed-up of EAGLE-3 in vLLM 0.11.2 and 0.12 on an H20, one request
(github Tencent/AngelSlim, README and docs/source/performance/speculative_decoding/benchmarks.md)."""


@pytest.mark.parametrize(("name", "ahead"), ANGELSLIM)
def test_eagle3_in_vllm(name: str, ahead: int) -> None:
    for tokens, published in ANGELSLIM[name, ahead]:
        draft = Speculation(method="eagle3", tokens=ahead, acceptance=accepted(tokens, ahead))
        assert speed_up(official(name), "h20x8", "vllm-0.10", draft) == pytest.approx(published, rel=0.1)


# What a step emits -------------------------------------------------------------------------------------------------

DRAFT = Speculation(method="eagle3", tokens=3, acceptance=(0.8, 0.5, 0.3, 0.1))


def test_a_step_emits_the_tokens_that_are_accepted_and_one_more() -> None:
    assert DRAFT.tokens_per_step == pytest.approx(2.6) and DRAFT.verified == 4
    assert DRAFT.shares == pytest.approx((0.2, 0.3, 0.2, 0.3))
    with pytest.raises(ValueError, match="must not rise"):
        Speculation(method="mtp", tokens=2, acceptance=(0.5, 0.6))
    with pytest.raises(ValueError, match="exceeds the number of shares in acceptance, 1"):
        Speculation(method="mtp", tokens=2, acceptance=(0.5,))


def test_requests_whose_drafts_are_accepted_less_decode_longer() -> None:
    outputs = np.full(4000, 101)
    drawn = decoded(outputs, DRAFT, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(101, abs=0.5)
    # 38.5 whole steps of variance 1.24: by renewal theory, a standard deviation of sqrt(100 * 1.24 / 2.6) tokens.
    assert drawn.std() == pytest.approx(np.sqrt(100 * 1.24 / 2.6), rel=0.1)
    assert (decoded(outputs, None, np.random.default_rng(0)) == outputs).all()


# Plans -------------------------------------------------------------------------------------------------------------

ASKED: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "cluster": "h100x1",
    "workload": "chat-short",
    "latency_bound_s": 6,
    "policy": "chunked",
    "engine": "vllm",
}


@pytest.fixture(scope="module")
def plan() -> Plan:
    fixed = {"token_budget": 2048, "max_batch": 64}
    return api.solve(**ASKED, fix=fixed, speculative="eagle3", acceptance=(0.75, 0.5, 0.3), speculative_tokens=2).best


def test_a_plan_keeps_its_draft(plan: Plan) -> None:
    assert plan.speculation is not None and plan.speculation.tokens == 2
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_the_schedule_alone_and_simulated_say_the_same(plan: Plan) -> None:
    from xprofiler.store import profile_of

    measured = run_simulation(plan, profile_of(plan, None), num_requests=1500).measured
    assert measured.throughput_rps == pytest.approx(plan.estimate.throughput_rps, rel=0.06)
    assert plan.estimate.capacity is not None and plan.estimate.capacity.share_kept >= 0.99


@pytest.mark.parametrize(("acceptance", "gains"), [(0.75, True), (0.02, False)])
def test_tokens_ahead_are_chosen_if_they_gain(acceptance: float, gains: bool) -> None:
    found = api.solve(
        **ASKED | {"objective": "saturated"}, speculative="eagle3", acceptance=(acceptance, acceptance / 2)
    )
    assert (found.best.speculation is not None) == gains
    assert max(found.ahead.values()) == pytest.approx(found.best.estimate.throughput_rps)


def test_the_draft_is_written_in_the_words_of_engines(plan: Plan) -> None:
    script = export(plan, "shell")["serve.sh"]
    config = json.loads(script.split("--speculative-config '")[1].split("'")[0])
    assert config == {"method": "eagle3", "num_speculative_tokens": 2}
    budget = int(script.split("--max-num-batched-tokens ")[1].split()[0])
    assert budget == plan.step_tokens(plan.policy.token_budget) > plan.policy.token_budget  # type: ignore[union-attr]
    drafted = plan.model_copy(
        update={"engine": load_engine("sglang"), "speculation": DRAFT.model_copy(update={"draft": "a/b"})}
    )
    words = export(drafted, "shell")["serve.sh"]
    assert "--speculative-algorithm EAGLE3 --speculative-num-draft-tokens 4 --speculative-num-steps 3" in words
    assert "--speculative-draft-model-path a/b" in words


def test_platforms_start_the_engine_with_the_draft(plan: Plan) -> None:
    files = export(plan.model_copy(update={"checkpoint": "hf://a/b"}), "llm-d")
    assert any("speculative-config" in text for name, text in files.items() if name != "plan.json")


@pytest.mark.usefixtures("short_simulations")
def test_a_draft_has_no_order_of_xgpts_scheduler() -> None:
    """With a bound on TTFT, in-time was chosen: the command was `xgpt serve`, which refuses drafts."""
    drafted = {"speculative": "eagle3", "acceptance": (0.7,), "draft_model": "a/b", "workload": "azure-code"}
    bounds = {"latency_bound_s": None, "ttft_s": 0.5, "tpot_s": 0.03, "engine": None, "speculative_tokens": 1}
    best = api.solve(**ASKED | drafted | bounds).best
    assert best.admission.order == "fcfs" and best.recommendation is not None
    assert best.recommendation.best.processes[0].command.startswith("vllm serve")


def test_our_engine_refuses_plans_with_a_draft(plan: Plan) -> None:
    with pytest.raises(InputError, match=r"plan.speculation: .*run the engine's command"):
        check_runs(plan)


METRICS = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 1000.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 3000.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1200.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 700.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 350.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 150.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m",position="2"} 1.7e9
"""


def test_acceptance_is_read_from_metrics(tmp_path: Path) -> None:
    file = tmp_path / "metrics.txt"
    file.write_text(METRICS)
    assert from_metrics(file) == (0.7, 0.35, 0.15)
    file.write_text('sglang:spec_accept_length{model_name="m"} 2.5\n')
    assert from_metrics(file)[:2] == pytest.approx((0.6, 0.36))
    file.write_text("up 1\n")
    with pytest.raises(InputError, match="it counts no drafts"):
        from_metrics(file)


def test_models_tell_their_layers_for_multi_token_prediction() -> None:
    assert load_model("deepseek-v3")[0].mtp_layers == 1
    layers = {"Qwen/Qwen3.5-27B": 1, "zai-org/GLM-5.2": 1, "XiaomiMiMo/MiMo-V2-Flash": 1, "Qwen/Qwen3-8B": 0}
    assert {name: official(name).mtp_layers for name in layers} == layers
    assert spec_like("qwen3_next")[0].mtp_layers == 1


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"acceptance": 0.5}, "acceptance: .*needs `speculative`"),
        ({"speculative": "eagle"}, "acceptance is missing; `speculative` needs it"),
        ({"among": {"h200x8": 20.0}, "speculative": "ngram", "acceptance": 0.5}, "among .*cannot be combined"),
        ({"speculative": "mtp", "acceptance": 0.5}, "speculative: .*no layer for multi-token prediction"),
        ({"speculative": "eagle", "acceptance": 1.5}, "acceptance: 1.5 .*from 0 to 1"),
        ({"speculative": "eagle", "acceptance": (0.5, 0.6)}, "acceptance .*do not rise"),
        (
            {"speculative": "eagle", "acceptance": (0.5,), "speculative_tokens": 2},
            "speculative_tokens: 2 .*`acceptance` covers 1 draft tokens",
        ),
        ({"speculative": "ngram", "acceptance": 0.5, "draft_model": "a/b"}, "draft_model: .*has no draft model"),
        (
            {"speculative": "eagle", "acceptance": 0.5, "model": "t5-11b", "engine": "xgpt"},
            "speculative: .*has an encoder",
        ),
        ({"speculative": "eagle", "acceptance": 0.5, "policy": "rra"}, "policy: .*drafts need chunked"),
        ({"speculative": "eagle", "acceptance": 0.5, "policy": "orca"}, "policy: .*drafts need chunked"),
        ({"speculative": "eagle", "acceptance": 0.5, "order": "sjf"}, "order: .*give `order=fcfs`"),
        ({"speculative": "eagle", "acceptance": 0.5, "engine": "xgpt-vllm"}, "speculative: .*needs vllm or sglang"),
        ({"speculative": "eagle", "acceptance": "no-such-file"}, "acceptance: .*cannot be read"),
    ],
)
def test_what_does_not_go_together_is_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InputError, match=says):
        patch.setattr("xgpt.solving.found_each", None)  # before any search
        api.solve(**ASKED | asked)


def test_a_refusal_names_the_draft_if_only_a_pipeline_holds_the_model() -> None:
    """The refusal for 7 devices said that 6 would do: a pipeline of 6, with which no draft is planned."""
    draft = {"speculative": "mtp", "speculative_tokens": 1, "acceptance": 0.8}
    asked = {"model": "deepseek-v3", "cluster": "h200x8", "latency_bound_s": 60}
    with pytest.raises(InfeasibleError, match="7 devices of h200 hold deepseek-v3 only as a pipeline") as refused:
        api.plan(**asked, **draft, devices=7)
    assert refused.value.binding == "speculative"
