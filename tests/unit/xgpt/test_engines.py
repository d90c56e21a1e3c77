"""What an engine does besides its steps: each figure with its source, read wherever a plan is made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import xgpt
from tests.planned import CPU, SHORT
from tests.rings import few
from xgpt.checkpoints.files import read_spec
from xgpt.cli import cli
from xgpt.core.errors import InputError
from xgpt.core.machine import detect
from xgpt.core.schema import EngineSpec, Plan
from xgpt.core.schema.engine import TIMED, UNSOURCED
from xgpt.deciding.commands import engine_command
from xgpt.reporting.plan_text import TIMED_WORDS, engine_in_words, mixing_in_words
from xgpt.resolve import engine_of, load_engine
from xprofiler import analytic

pytestmark = pytest.mark.usefixtures("short_simulations")

PROBLEM = {"model": "llama-3.1-8b", "cluster": "h100x1", "workload": "azure-conv", "latency_bound_s": 16.0}


SHIPPED = [*(f"vllm-0.{minor}" for minor in range(10, 33)), "sglang-0.5", "tensorrt-llm-1.0", "xgpt"]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_engine_says_where_its_figures_come_from(name: str) -> None:
    engine = load_engine(name)
    assert engine.name == name
    assert set(engine.sources) == engine.model_fields_set - UNSOURCED
    assert all(engine.sources.values())


def test_a_frameworks_name_stands_for_its_newest_version() -> None:
    assert load_engine("vllm").name == "vllm-0.32"
    assert load_engine("trtllm") == load_engine("tensorrt-llm")
    with pytest.raises(InputError, match=r"engine: 'vlm' is not accepted.*vllm"):
        load_engine("vlm")


def test_figures_hold_from_a_version_on_until_a_later_one_states_others() -> None:
    assert [load_engine(f"vllm-0.{minor}").schedules_ahead for minor in (10, 13, 14, 32)] == [False, False, True, True]
    assert [load_engine(f"vllm-0.{minor}").graph_bytes > 0 for minor in (10, 20, 21, 24)] == [False, False, True, True]
    assert load_engine("vllm-0.24.1").name == "vllm-0.24"
    with pytest.raises(InputError, match=r"vllm is known from vllm-0\.10 to vllm-0\.32"):
        load_engine("vllm-0.9")


def test_a_figure_without_a_source_is_refused() -> None:
    with pytest.raises(ValueError, match="add the source of step_s"):
        EngineSpec(name="a-1", framework="a", version="1", step_s=1e-3)
    with pytest.raises(ValueError, match="pace is not a figure of an engine"):
        EngineSpec(name="a-1", framework="a", version="1", sources={"pace": "guessed"})


def test_figures_of_other_engines_are_said_to_be_borrowed() -> None:
    borrowed = set(load_engine("sglang-0.5").borrowed)
    assert {"step_s", "tokenise_s"} <= borrowed and "layer_s" not in borrowed
    assert "mixing" in load_engine("vllm").borrowed and "mixing" not in load_engine("vllm-0.15").borrowed
    borrowed_line = "not measured on vllm-0.32 but taken from another engine or version"
    (line,) = [line for line in engine_in_words(planned("vllm")) if line.startswith(borrowed_line)]
    assert "the engine loop's time for each step" in line and "the slow-down of decodes in steps with prompts" in line
    assert set(TIMED) == set(TIMED_WORDS)


def planned(engine: str | None, **asked: object) -> Plan:
    return xgpt.plan(**PROBLEM | {"engine": engine, "objective": "saturated", "policy": "chunked"} | asked)


def test_plans_name_the_engine_that_they_are_for() -> None:
    anyone, vllm = planned(None), planned("vllm-0.15")
    assert anyone.engine is None
    assert vllm.engine == load_engine("vllm-0.15")
    assert (vllm.profile.engine, vllm.profile.engine_version) == ("vllm", "0.15")
    assert vllm.cluster.device.usable_memory == vllm.engine.memory_share
    assert xgpt.simulate(vllm, num_requests=50).plan == vllm, "its profile is computed again for the same engine"


@pytest.mark.parametrize("name", few(["vllm-0.15", "sglang-0.5", "tensorrt-llm-1.0"], 2))
@pytest.mark.parametrize("policy", few(["chunked", "orca"]))
def test_plans_schedule_as_their_engine_does(name: str, policy: str, tmp_path: Path) -> None:
    """What is simulated of the plan that the command line makes: whether steps mix, cut prompts, and how large."""
    path, engine_spec = tmp_path / "plan.json", load_engine(name)
    asked = "--model llama-3.1-8b --cluster h100x1 --workload azure-conv --latency-bound 8 --objective saturated"
    found = CliRunner().invoke(
        cli, ["plan", *asked.split(), "--engine", name, "--policy", policy, "--explain", "-o", str(path)]
    )
    assert found.exit_code == 0, found.output
    said = " ".join(found.output.split())
    assert ("prompts run in separate steps" in said) is not engine_spec.mixes
    assert ("chosen: " + policy + ": every step decodes" in said) is engine_spec.mixes
    assert ("a prompt waits for a step" in said) is not engine_spec.cuts_prompts
    simulated = xgpt.simulate(path, num_requests=300)
    plan, steps = simulated.plan, simulated.steps
    mixed = [step for step in steps if step.encode and step.decode]
    assert bool(mixed) is engine_spec.mixes
    whole = {request.id: request.input_length for step in steps for request in step.arrivals}
    sizes = [sum(length for *_, length in step.encode) + len(step.decode) for step in steps]
    limit = engine_spec.token_budget or 0
    assert max(sizes) <= limit * plan.policy.microbatches
    if not engine_spec.cuts_prompts:
        pieces = [length == whole[id_] for step in steps for id_, _, length in step.encode]
        assert all(pieces)
    assert plan.policy.max_batch <= (engine_spec.max_batch or plan.policy.max_batch)


def test_an_engines_limits_hold_unless_a_variable_is_held() -> None:
    small = load_engine("vllm-0.15").model_copy(update={"max_batch": 16, "token_budget": 512})
    within, beyond = planned(small), planned(small, fix={"max_batch": 64, "token_budget": 2048})
    assert within.policy.max_batch <= 16 and within.policy.token_budget <= 512
    assert (beyond.policy.max_batch, beyond.policy.token_budget) == (64, 2048)


def test_the_loops_cost_is_in_the_profile() -> None:
    plain, vllm = planned(None), planned("vllm-0.15")
    slow = load_engine("vllm-0.15").model_copy(update={"step_s": 20e-3})
    assert (
        planned(slow, latency_bound_s=None).estimate.tpot_s > max(plain.estimate.tpot_s, vllm.estimate.tpot_s) + 15e-3
    )


def test_an_engine_of_another_framework_than_the_profiles_is_refused() -> None:
    profile = xgpt.profile(model="llama-3.1-8b", cluster="h100x8").model_copy(update={"engine": "sglang"})
    with pytest.raises(InputError, match="the profile is for sglang"):
        planned("vllm-0.15", profile=profile)


def test_a_profile_of_vllm_on_this_machine_is_planned_for_vllms_own_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command starts vLLM with the threads with which it was profiled."""
    monkeypatch.setattr("xrunner.vllm.command.num_cores", lambda: 4)
    here = detect()
    known = CPU.but(name=here.device.name, memory_bytes=2**36)
    monkeypatch.setattr("xgpt.core.machine._detect_gpus", lambda num_devices: None)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", **sizes, **heads}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path)
    cluster = here.but(device=known)
    profile = analytic.profile(spec, cluster, "bfloat16").but(source="measured", engine="vllm", num_threads=3)
    asked = {"model": str(tmp_path), "workload": SHORT, "latency_bound_s": 5.0, "policy": "chunked"}
    plan = xgpt.plan(**asked, profile=profile, engine="vllm")
    assert plan.engine is not None and (plan.engine.scheduler, plan.engine.block_size) == ("own", 32)
    command = engine_command(plan)
    assert command is not None
    assert command.startswith(f"env VLLM_CPU_NUM_OF_RESERVED_CPU=1 vllm serve {tmp_path}")
    assert f"--max-num-batched-tokens {plan.policy.token_budget}" in command
    assert "--dtype bfloat16" in command, "as vLLM runs a checkpoint in float32 if nothing is said"
    with pytest.raises(InputError, match="make one with `xgpt profile --engine vllm"):
        xgpt.plan(**asked, engine="vllm")
    slow = analytic.profile(spec, cluster, "float32").but(source="measured", engine="vllm", num_threads=3)
    with pytest.raises(InputError, match="plan with `dtype=float32`"):
        xgpt.plan(**asked, profile=slow)
    # The plan in float32 was compared with what ran in bfloat16 as if both took as long. It took 1.6 times as long.
    asked = {**asked, "profile": slow, "dtype": "float32"}
    del asked["policy"]
    with pytest.raises(InputError, match="the profile is for float32: measure what runs with `xgpt profile --engine"):
        xgpt.compare(**asked, current=f"vllm serve {tmp_path}")
    assert xgpt.compare(**asked, current=f"vllm serve {tmp_path} --dtype float32").current is not None


def test_profiles_tell_their_engine() -> None:
    profile = xgpt.profile(model="llama-3.1-8b", cluster="h100x8")
    assert engine_of(profile) is None
    of_vllm = profile.model_copy(update={"source": "imported", "engine": "vllm", "engine_version": "0.15"})
    assert engine_of(of_vllm) == load_engine("vllm-0.15")
    measured = of_vllm.model_copy(update={"source": "measured"})
    assert engine_of(measured) is None, "it ran under xgpt's own schedule"
    assert engine_of(measured.model_copy(update={"engine": "xgpt"})) == load_engine("xgpt")


@pytest.mark.long
def test_what_a_request_takes_outside_of_the_loop_counts_from_its_arrival() -> None:
    slow = load_engine("vllm-0.15").model_copy(update={"before_admission_s": 0.5})
    plans = [planned(engine, objective="arrivals", cluster="h100x1", ttft_s=0.8) for engine in ("vllm-0.15", slow)]
    rates = [plan.estimate.capacity.rate_per_s for plan in plans if plan.estimate.capacity]
    assert rates[1] < 0.98 * rates[0]
    fast, late = (
        xgpt.simulate(plans[1].model_copy(update={"engine": engine}), num_requests=200, arrival_rate_per_s=2)
        for engine in (plans[0].engine, slow)
    )
    assert late.figures["ttft_mean_s"] - fast.figures["ttft_mean_s"] == pytest.approx(0.5 - 3.2e-3, abs=1e-6)


@pytest.mark.long
def test_a_plan_says_where_its_choice_changes_with_the_cost_of_mixed_steps() -> None:
    asked = {"model": "qwen3-32b", "cluster": "h200x8", "workload": "azure-conv", "latency_bound_s": 20.0}
    plan = xgpt.plan(**asked, objective="saturated")
    edge = plan.estimate.mixing_edge
    assert plan.policy.kind == "chunked" and edge is not None and 0 < edge.mixing < 0.4
    (line,) = mixing_in_words(plan)
    assert f"by more than {100 * edge.mixing:.0f}%, {edge.policy} is better" in line
    engine_spec = load_engine("xgpt")
    sources = engine_spec.sources | {"mixing": "assumed"}
    dear = engine_spec.model_copy(update={"mixing": min(1.5 * edge.mixing, 0.4), "sources": sources})
    assert xgpt.plan(**asked, objective="saturated", engine=dear).policy.kind != "chunked"
