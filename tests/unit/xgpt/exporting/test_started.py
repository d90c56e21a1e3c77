"""The engine that is started is the engine that was planned: flags of every way to start vLLM, against the plan."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser
from functools import cache
from typing import Any

import pytest
import yaml

import xgpt
from tests.exports import export
from xgpt.comparing.launched import read_current
from xgpt.comparing.other_engines import SGLANG
from xgpt.comparing.vllm_command import TABLE
from xgpt.core.documents import LOADER
from xgpt.core.errors import InputError
from xgpt.core.schema import Plan, Speculation
from xgpt.deciding.commands import engine_command, processes_of
from xgpt.deciding.recommend import by_itself
from xgpt.exporting.groups import Target
from xrunner.vllm.command import SCHEDULER, launch, launch_lane, step_tokens

PLANNED = {
    "by itself": ("vllm", "chunked"),
    "by itself, an older one": ("vllm-0.10", "chunked"),
    "with xgpt's scheduler": ("xgpt-vllm", "chunked"),
    "orca": ("vllm", "orca"),
    "rra": ("vllm", "rra"),
    "waa": ("vllm", "waa-c"),
    "by itself, in eight bits": ("vllm", "chunked"),
    "waa, in eight bits": ("vllm", "waa-c"),
}
pytestmark = pytest.mark.usefixtures("short_simulations_here")
TARGETS: tuple[Target, ...] = ("shell", "k8s", "dynamo", "llm-d")


@cache
def planned(case: str) -> Plan:
    engine, policy = PLANNED[case]
    devices = {"cluster": "h100x8", "devices": 2} if policy.startswith("waa") else {"cluster": "h100x1"}
    asked = {"model": "llama-3.1-8b", "workload": "chat-short", "latency_bound_s": 20, "objective": "saturated"}
    dtype = "float8" if case.endswith("in eight bits") else None
    fix = {"encode_batch": 4} if policy.startswith("waa") else None
    plan = xgpt.plan(**asked, **devices, engine=engine, policy=policy, dtype=dtype, fix=fix)
    return plan.model_copy(update={"checkpoint": "/weights", "replicas": 1})


def words_in(node: Any) -> list[list[str]]:
    """Return the commands of containers that start a vLLM."""
    if isinstance(node, list):
        return [words for each in node for words in words_in(each)]
    if not isinstance(node, dict):
        return []
    command = node.get("command") or []
    command_words = [command] if any(word in ("vllm", "dynamo.vllm", "xgpt") for word in command[:3]) else []
    return command_words + [words for value in node.values() for words in words_in(value)]


def started(plan: Plan, target: Target) -> list[list[str]]:
    """Return vLLM's arguments of each engine that exported files start."""
    files = export(plan, target)
    if target == "shell":
        line = next(line for line in files["serve.sh"].splitlines() if line.startswith("exec "))
        commands = [shlex.split(line.removeprefix("exec ").removesuffix('"$@"'))]
    else:
        texts = [text for name, text in files.items() if name.endswith(".yaml")]
        commands = words_in([document for text in texts for document in yaml.load_all(text, LOADER)])
    found = []
    for command in commands:
        if "xgpt" not in command[:3]:
            places = [at for at, word in enumerate(command) if word == "--disaggregation-mode"]  # Dynamo's
            cut = [word for at, word in enumerate(command) if at not in places and at - 1 not in places]
            found.append(cut[2:] if command[0] == "vllm" else cut[3:])
        elif len(plan.policy.lanes) == 1:
            found.append(["/weights", *launch(plan, plan_path="plan.json").arguments])
        else:
            found += [["/weights", *launch_lane(plan, lane, {}).arguments] for lane in ("encode", "decode")]
    return [words for words in found if words]


def check(plan: Plan, words: list[str], *, is_lane: bool) -> None:
    given, _ = TABLE.read(words)
    engine = plan.engine
    assert engine is not None
    assert (given.get("async-scheduling", "yes") == "yes") is engine.schedules_ahead
    assert (given.get("scheduler-cls") == SCHEDULER) is (engine.scheduler == "xgpt" and not is_lane)
    stages = {(stage.tp, stage.ep > 1) for stage in plan.stages}
    assert (int(given.get("tensor-parallel-size", 1)), "enable-expert-parallel" in given) in stages
    in_eight = plan.dtype == "float8"
    assert given.get("dtype", "bfloat16") == "bfloat16"  # vLLM's --dtype refuses float8
    assert (given.get("quantization"), given.get("kv-cache-dtype")) == (("fp8", "fp8") if in_eight else (None, None))
    assert float(given["gpu-memory-utilization"]) == plan.cluster.device.usable_memory
    if plan.policy.kind in ("chunked", "orca"):
        assert int(given["max-num-batched-tokens"]) == max(step_tokens(plan), int(given["max-num-seqs"]))
    if engine.scheduler == "own":
        assert int(given["max-num-seqs"]) == plan.policy.max_batch
        assert int(given["max-num-batched-tokens"]) == plan.policy.token_budget


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", PLANNED)
def test_what_is_started_is_what_was_planned(case: str, target: Target) -> None:
    plan = planned(case)
    assert plan.engine is not None
    assert plan.engine.scheduler == ("own" if case.startswith("by itself") else "xgpt")
    engines = started(plan, target)
    assert len(engines) == len(plan.policy.lanes)
    for words in engines:
        check(plan, words, is_lane=len(plan.policy.lanes) > 1)


@pytest.mark.parametrize("case", PLANNED)
def test_the_printed_command_is_of_plans_that_vllm_runs_by_itself(case: str) -> None:
    plan, command = planned(case), engine_command(planned(case))
    assert (command is not None) is case.startswith("by itself")
    if command is not None:
        given, _ = TABLE.read(shlex.split(command)[2:])
        sizes = [given[name] for name in ("max-num-seqs", "max-num-batched-tokens", "gpu-memory-utilization")]
        share = f"{plan.cluster.device.usable_memory:g}"
        assert sizes == [str(plan.policy.max_batch), str(plan.policy.token_budget), share]
        assert plan.engine is not None
        assert given.get("async-scheduling", "yes") == ("yes" if plan.engine.schedules_ahead else "no")
        with pytest.raises(InputError, match="the plan is for vLLM's own scheduler"):
            launch(plan, plan_path="plan.json")


def test_the_printed_command_starts_where_memory_holds_less_than_the_models_context() -> None:
    plan = planned("by itself")
    stages = (plan.stages[0].model_copy(update={"kv_blocks": 1000}),)
    for given, written in (("", "15200"), ("4096", "4096"), ("65536", "15200"), ("auto", "auto")):
        kept = {"max-model-len": given} if given else {}
        command = engine_command(plan.model_copy(update={"stages": stages}), kept)
        assert str(command).endswith(f" --max-model-len {written}")
    assert "--max-model-len" not in str(engine_command(plan))


def with_uneven_stages() -> Plan:
    plan = planned("by itself")
    ends = ((0, 18), (18, 32))
    stages = tuple(plan.stages[0].model_copy(update={"devices": (i,), "decode_layers": ends[i]}) for i in range(2))
    settings = plan.policy.model_copy(update={"microbatches": 2})
    changes = {"stages": stages, "policy": settings, "cluster": plan.cluster.model_copy(update={"devices_per_node": 2})}
    changes["estimate"] = plan.estimate.model_copy(update={"memory_bytes": 2 * plan.estimate.memory_bytes})
    return plan.model_copy(update=changes)


@pytest.mark.parametrize("target", ["dynamo", "llm-d"])
def test_pods_divide_the_layers_as_planned(target: Target) -> None:
    text = export(with_uneven_stages(), target)["xgpt.yaml"]
    assert text.count("VLLM_PP_LAYER_PARTITION") == 1 and "18,14" in text


def test_commands_divide_the_layers_as_planned() -> None:
    plan = with_uneven_stages()
    words = ["env", "VLLM_PP_LAYER_PARTITION=18,14", "vllm", "serve"]
    assert str(engine_command(plan)).startswith(" ".join(words))
    own = export(plan.model_copy(update={"checkpoint": "/model/here"}), "compose")["compose.yaml"]
    replica = yaml.load(own, LOADER)["services"]["replica-0"]
    assert replica["entrypoint"][:3] == ["vllm", "serve", "/model"]
    assert replica["environment"]["VLLM_PP_LAYER_PARTITION"] == "18,14"


def test_dynamo_caches_prefixes_only_if_the_rule_does() -> None:
    """The rule's pool cannot follow vLLM's cache of a model with several kinds of K/V blocks, so it is off there."""
    plan = planned("orca")
    windows = plan.model.model_copy(update={"sliding_window": 1024})
    for model, says in ((plan.model, "yes"), (windows, "no")):
        [words] = started(plan.model_copy(update={"model": model}), "dynamo")
        given, _ = TABLE.read(words)
        assert given["enable-prefix-caching"] == says


def test_all_commands_start_at_most_one_request_for_each_token_of_a_step() -> None:
    """`--fix` may ask for more; the export once started more tokens instead."""
    plan = planned("by itself")
    plan = plan.model_copy(update={"policy": plan.policy.model_copy(update={"token_budget": 32, "max_batch": 64})})
    for words in (shlex.split(str(engine_command(plan)))[2:], *started(plan, "llm-d")):
        given, _ = TABLE.read(words)
        assert (given["max-num-seqs"], given["max-num-batched-tokens"]) == ("32", "32")


CHANGED: dict[str, dict[str, Any]] = {
    "one device": {},
    "two stages in eight bits": {"stages": [(1, 1), (1, 1)], "dtype": "float8", "kv_dtype": "float8"},
    "experts among the devices of a replica": {"stages": [(8, 8)]},
    "experts among replicas": {"stages": [(2, 8)], "replicas": 4},
    "with a draft": {"speculation": Speculation(method="eagle3", tokens=2, acceptance=(0.7, 0.5), draft="some/draft")},
}
"""Plans for other engines that differ from the one for a device: (tp, ep) of their stages, and other fields."""


def for_engine(framework: str, change: str) -> Plan:
    """Return a plan for another engine than vLLM; devices and figures stay those of one device."""
    plan, changes = planned("by itself"), dict(CHANGED[change])
    assert plan.engine is not None
    degrees = changes.pop("stages", [(1, 1)])
    stages = tuple(plan.stages[0].model_copy(update={"tp": tp, "ep": ep}) for tp, ep in degrees)
    sizes = {"token_budget": 4096 * len(stages), "max_batch": 96, "microbatches": len(stages)}
    changes |= {"policy": plan.policy.model_copy(update=sizes), "checkpoint": "some/model", "stages": stages}
    changes |= {"engine": plan.engine.model_copy(update={"framework": framework})}
    return plan.model_copy(update=changes)


@pytest.mark.parametrize("change", CHANGED)
@pytest.mark.parametrize("framework", ["sglang", "tensorrt-llm"])
def test_another_engine_is_started_as_planned(framework: str, change: str) -> None:
    """The written command, read as `xgpt compare --current` reads an operator's."""
    plan = for_engine(framework, change)
    command = engine_command(plan)
    if framework == "tensorrt-llm" and (plan.speculation is not None or plan.dtype == "float8"):
        assert command is None
        return
    assert command is not None
    if framework == "sglang" and "stages" not in CHANGED[change]:  # a file is written only of a plan that fits together
        assert command in export(plan, "shell")["serve.sh"]
    found, stage = read_current(command, plan.cluster), plan.stages[0]
    assert (found.framework, found.model) == (framework, "some/model")
    assert (found.tp_degree, found.num_stages, found.ep_degree) == (stage.tp, len(plan.stages), stage.ep)
    assert found.max_num_seqs == 96
    assert found.max_num_batched_tokens == plan.step_tokens(4096 * len(plan.stages)) // len(plan.stages)
    if framework == "sglang":
        assert found.replicas == plan.sharing_replicas
        assert found.usable_memory == plan.cluster.device.usable_memory
        in_eight = plan.dtype == "float8"
        assert (found.dtype, found.kv_dtype) == (("float8", "float8") if in_eight else (None, None))
        drafts = None if plan.speculation is None else ("eagle3", 2, "some/draft")
        assert found.drafts == drafts


@pytest.mark.long
def test_sglang_itself_takes_the_words() -> None:
    """SGLang's parser, if it is installed: names and values of each command, and the names that `compare` knows."""
    server_args = pytest.importorskip("sglang.srt.server_args", exc_type=ImportError)
    parser = ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    for change in CHANGED:
        plan = for_engine("sglang", change)
        given = parser.parse_args(shlex.split(str(engine_command(plan)))[3:])
        assert given.tp_size == plan.stages[0].tp * plan.sharing_replicas
        assert given.max_running_requests == 96 * plan.sharing_replicas
        assert given.mem_fraction_static == plan.cluster.device.usable_memory
    names = {word for action in parser._actions for word in action.option_strings if word.startswith("--")}
    assert {f"--{name}" for name in SGLANG.takes} | SGLANG.aliases.keys() <= names


def test_tensorrt_llm_takes_float8_from_the_checkpoint_only() -> None:
    """A plan in float8 of a checkpoint in bfloat16 would have been started in bfloat16."""
    plan = planned("by itself")
    assert plan.engine is not None
    plan = plan.model_copy(update={"engine": plan.engine.model_copy(update={"framework": "tensorrt-llm"})})
    assert "--kv_cache_dtype" not in str(engine_command(plan))
    in_eight = plan.model_copy(update={"kv_dtype": "float8"})
    assert "--kv_cache_dtype fp8" in str(engine_command(in_eight))
    assert engine_command(in_eight.model_copy(update={"dtype": "float8"})) is None


def test_no_command_starts_another_engine_than_the_plans() -> None:
    """An engine described by a user's file has no command that xgpt knows: `xgpt serve` was printed, which refuses."""
    plan = planned("by itself")
    assert plan.engine is not None and by_itself(plan) and processes_of(plan)
    other = plan.model_copy(update={"engine": plan.engine.but(framework="mine", name="mine-1")})
    assert processes_of(other) == () and by_itself(other), "nor is it said to run xgpt's scheduler"


def test_a_loop_that_waits_costs_what_it_costs() -> None:
    """The same settings under xgpt's scheduler: each step is decided after the one before."""
    ahead, waits = planned("by itself"), planned("with xgpt's scheduler")
    assert waits.estimate.throughput_rps < ahead.estimate.throughput_rps
    fixed = {"max_batch": ahead.policy.max_batch, "token_budget": ahead.policy.token_budget}
    asked = {"model": "llama-3.1-8b", "workload": "chat-short", "latency_bound_s": None, "objective": "saturated"}
    same = xgpt.plan(**asked, cluster="h100x1", engine="xgpt-vllm", policy="chunked", fix=fixed, kv="quantile")
    engine_spec = ahead.engine
    assert engine_spec is not None
    more = same.estimate.tpot_s - ahead.estimate.tpot_s
    assert more > 0.8 * (engine_spec.waiting_step_s + engine_spec.waiting_request_s * ahead.policy.max_batch / 2)
