"""What people run: shells, containers, manifests, and engines other than vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.rings import few
from xgpt.comparing.compare import Compared, compare, in_engine_of
from xgpt.comparing.current import CurrentEngine, is_model
from xgpt.comparing.launched import find_engine, read_current
from xgpt.comparing.other_engines import SGLANG
from xgpt.comparing.scoring import engine_name
from xgpt.comparing.vllm_command import TABLE
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.deciding.commands import engine_command
from xgpt.requests import plan_request
from xgpt.resolve import load_cluster, load_engine, load_model
from xprofiler import analytic

pytestmark = pytest.mark.usefixtures("short_simulations_here")

SAME = CurrentEngine(
    tp_degree=2, num_stages=1, replicas=1, ep_degree=1, max_num_seqs=64, max_num_batched_tokens=4096, usable_memory=0.9,
    max_model_len=8192, model="Qwen/Qwen3-8B", api_servers=1, caches_prompts=True,
)  # fmt: skip
FLAGS = "--tensor-parallel-size 2 --max-num-seqs 64 --max-num-batched-tokens 4096 --gpu-memory-utilization 0.9 "
FLAGS += "--max-model-len 8192"
COMPOSE = f"""
services:
  web: {{image: nginx, command: [nginx]}}
  llm:
    image: vllm/vllm-openai:v0.15.1
    environment: [MODEL=Qwen/Qwen3-8B]
    command: >
      --model ${{MODEL}} {FLAGS}
"""
POD = {
    "kind": "Deployment",
    "spec": {
        "template": {
            "spec": {
                "containers": [
                    {
                        "image": "vllm/vllm-openai:v0.15.1",
                        "command": ["/bin/sh", "-c"],
                        "args": [f"exec vllm serve $(MODEL) {FLAGS} | tee /var/log/vllm"],
                        "env": [{"name": "MODEL", "value": "Qwen/Qwen3-8B"}],
                        "resources": {"limits": {"nvidia.com/gpu": 4}},
                    }
                ]
            }
        }
    },
}
VALUES = {
    "servingEngineSpec": {
        "modelSpec": [
            {
                "name": "qwen", "repository": "vllm/vllm-openai", "tag": "v0.15.1", "modelURL": "Qwen/Qwen3-8B",
                "requestGPU": 2,
                "vllmConfig": {
                    "tensorParallelSize": 2, "maxModelLen": 8192, "enablePrefixCaching": True,
                    "gpuMemoryUtilization": 0.9,
                    "extraArgs": ["--max-num-seqs", "64", "--max-num-batched-tokens", "4096", "--disable-log-requests"],
                },
            }
        ]
    }
}  # fmt: skip
WAYS = {
    "shell": f"VLLM_USE_V1=1 vllm serve Qwen/Qwen3-8B \\\n  {FLAGS} 2>&1 | tee log  # today",
    "underscores": f"vllm serve Qwen/Qwen3-8B {FLAGS.replace('-len', '_len')} --port <port>",
    "prefixes": "vllm serve Qwen/Qwen3-8B --tensor 2 --max-num-seq 64 --max-num-batched 4096 "
    "--gpu-mem=.9 --max-model 8192",
    "flags first": f"vllm serve {FLAGS} Qwen/Qwen3-8B &",
    "earlier": f"vllm serve Qwen/Qwen3-8B {FLAGS} --disable-log-requests --swap-space 16 --device cuda --block-size 64",
    "module": f"nohup python3 -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-8B {FLAGS} > out.log 2>&1 &",
    "quoted lines": f"> vllm serve Qwen/Qwen3-8B {FLAGS} \\ \n --override-generation-config '{{\n  \"top_k\": 20\n}}'",
    "docker": "docker run -it --rm --gpus all --ipc=host -v ~/.cache:/root/.cache -p 8000:8000 -e HF_TOKEN=$HF_TOKEN "
    f"vllm/vllm-openai:v0.15.1 --model Qwen/Qwen3-8B {FLAGS}",
    "entrypoint": f"sudo docker run --entrypoint vllm registry.local/vllm:main serve Qwen/Qwen3-8B {FLAGS}",
    "bash": f"docker run --gpus all vllm/vllm-openai:v0.15.1 bash -c 'pip list && vllm serve Qwen/Qwen3-8B {FLAGS}'",
    "compose": COMPOSE,
    "pod": yaml.safe_dump(POD),
    "helm": yaml.safe_dump(VALUES),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_file", [False, True], ids=["", "file"])
def test_one_deployment_in_many_ways(way: str, in_file: bool, tmp_path: Path) -> None:
    text = WAYS[way]
    if in_file:
        (tmp_path / "it.yaml").write_text(text)
        text = str(tmp_path / "it.yaml")
    found = read_current(text, load_cluster("h100x8"))
    assert (found.version == "0.15.1") == ("0.15.1" in WAYS[way])
    assert ("the manifest requests 4 devices, but its engine uses 2; these are scored" in found.notes) == (way == "pod")
    ignored: dict[str, Any] = {"notes": (), "version": None}
    if way == "helm":  # it asks for what is the default
        assert found.state_copies == 2
        ignored["state_copies"] = None
    assert CurrentEngine(**{**vars(found), **ignored}) == SAME


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "python3 -m sglang.launch_server --model-path m --tp 8 --dp 2 --chunked-prefill-size 4096 "
            "--mem-fraction-static 0.8 --max-running-requests 100 --context-length 9000 --host 0.0.0.0",
            ("sglang", 8, 2, 100, 4096, 0.8, 9000),
        ),
        ("sglang serve m --tp-size 2 --enable-metrics", ("sglang", 2, 1, 2048, 8192, None, None)),
        (
            "trtllm-serve m --tp_size 4 --max_batch_size 256 --max_num_tokens 4096 --max_seq_len 9000 "
            "--kv_cache_free_gpu_memory_fraction 0.8",
            ("tensorrt-llm", 4, 1, 256, 4096, 0.8, 9000),
        ),
        ("trtllm-serve serve m", ("tensorrt-llm", 1, 1, 2048, 8192, None, None)),
        (
            "docker run lmsysorg/sglang:v0.5.9 python3 -m sglang.launch_server --model m --tp 2",
            ("sglang", 2, 1, 2048, 8192, None, None),
        ),
    ],
)
def test_other_engines(text: str, expected: tuple[object, ...]) -> None:
    found = read_current(text, load_cluster("h100x8"))
    assert expected == (
        found.framework,
        found.tp_degree,
        found.replicas,
        found.max_num_seqs,
        found.max_num_batched_tokens,
        found.usable_memory,
        found.max_model_len,
    )
    assert found.model == "m"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sglang serve m --speculative-algorithm STANDALONE", "scores only NEXTN, EAGLE, EAGLE3; leave drafts out"),
        ("sglang serve m --enable-dp-attention --tp 8 --dp 3", "give a --dp that divides 8"),
        ("sglang serve m --tpp 8", "SGLang .* has no such flag"),
        ("trtllm-serve m --config extra.yaml", "may contain any setting"),
        ("trtllm-serve m --tp 2", "TensorRT-LLM .* has no such flag"),
        ("docker run nginx -g off", "give a command that starts with vllm serve"),
        ("services: {a: {image: nginx, command: [x]}}", "give a command that starts with vllm serve"),
    ],
)
def test_what_is_not_scored_is_said(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_current(text, load_cluster("h100x8"))


@pytest.mark.parametrize(
    "command", ["vllm serve m -tp 2 -dp 4 -ep", "sglang serve m --tp 8 --dp 4 --ep 8 --enable-dp-attention"]
)
def test_replicas_may_share_the_experts(command: str) -> None:
    found = read_current(command, load_cluster("h100x8"))
    assert (found.tp_degree, found.replicas, found.ep_degree) == (2, 4, 8)


def test_sglang_divides_its_sizes_among_replicas_that_share_the_experts() -> None:
    shared = "sglang serve m --tp 8 --dp 4 --ep 8 --enable-dp-attention"
    found = read_current(f"{shared} --max-running-requests 400 --chunked-prefill-size 4096", load_cluster("h100x8"))
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (100, 1024)


def test_flags_that_were_removed_take_what_they_took() -> None:
    assert TABLE.earlier["disable-log-requests"] == "nothing" and TABLE.earlier["swap-space"] == "value"
    assert not set(TABLE.earlier) & set(TABLE.takes)
    assert SGLANG.takes["chunked-prefill-size"] == "value"
    assert SGLANG.aliases["--tensor-parallel-size"] == "tp-size"


def test_engines_are_the_nearest_known_ones() -> None:
    def of(version: str | None, framework: str = "vllm") -> str:
        return engine_name(CurrentEngine(1, 1, 1, 1, 1, 1, version=version, framework=framework))

    assert of(None) == "vllm-0.32" and of("0.15.1") == "vllm-0.15" and of("0.24.0") == "vllm-0.24"
    assert of("0.8") == "vllm-0.10" and of("0.40.1") == "vllm-0.32"
    assert of("0.20.0") == "vllm-0.20" and of("0.20.2") == "vllm-0.21"
    assert of(None, "sglang") == "sglang-0.5" and of("1.2.0", "tensorrt-llm") == "tensorrt-llm-1.0"


@pytest.mark.parametrize(
    ("served", "name", "same"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b", True),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8", "llama-3.1-8b", True),
        ("meta-llama/Llama-3.1-70B", "llama-3.1-8b", False),
        ("Qwen/Qwen3-14B", "qwen3-4b", False),
        ("Qwen/Qwen3-235B-A22B", "qwen3-30b-a3b", False),
    ],
)
def test_models_are_compared_by_the_parts_of_their_names(served: str, name: str, same: bool) -> None:
    assert is_model(served, name) == same


def compared(current: str, **asked: Any) -> Compared:
    asked = {"model": "llama-3.1-8b", "cluster": "h100x1", "workload": "orca", "policy": "chunked"} | asked
    return compare(plan_request(objective="saturated", **asked), current)


@pytest.mark.parametrize(
    ("flags", "weights", "kv"),
    [("--kv-cache-dtype fp8", "bfloat16", "float8"), ("--quantization fp8", "float8", "bfloat16")],
)
def test_types_are_those_that_run(flags: str, weights: str, kv: str) -> None:
    found = compared(f"vllm serve m {flags} --max-model-len 8192")
    assert found.current is not None and (found.current.dtype, found.current.kv_dtype) == (weights, kv)
    assert any(f"weights in {weights} and K/V in {kv}" in note for note in found.notes)
    assert found.notes[0].startswith("the plans are for vllm-0.32, the engine that the command starts")
    assert (found.best.dtype, found.best.kv_dtype) == (weights, kv), "`xgpt replan` plans in these types, too"
    stated = compared(f"vllm serve m {flags} --max-model-len 8192", dtype="bfloat16")
    assert stated.best.dtype == "bfloat16" and any("only the current deployment" in note for note in stated.notes)


@pytest.mark.parametrize(
    ("command", "error", "says"),
    [
        ("vllm serve other/Model-70B", InputError, "the plans are for llama-3.1-8b: give `model=other/Model-70B`"),
        ("vllm serve m --gpu-memory-utilization 0.3", InfeasibleError, "would not start: its K/V memory holds"),
    ],
)
def test_what_would_not_start_or_is_another_model(command: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        compared(command)
    if error is InfeasibleError:
        assert compared(f"{command} --max-model-len auto").current is not None


def test_a_server_starts_if_one_longest_request_fits(tmp_path: Path) -> None:
    """States of linear layers, and K/V within windows, are those of this request, not of all that may come."""
    config = {"model_type": "qwen3_next", "dtype": "bfloat16", "max_position_embeddings": 600_000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked: dict[str, Any] = {"cluster": "h200x8", "workload": "orca", "policy": "chunked", "objective": "saturated"}
    request = plan_request(config=str(tmp_path / "config.json"), **asked)
    found = compare(request, "vllm serve m -tp 2 --max-num-seqs 4096 --max-num-batched-tokens 8192").current
    assert found is not None and min(stage.kv_blocks for stage in found.stages) * found.block_size < 600_000


@pytest.mark.parametrize("flags", ["", "--api-server-count 2", "-asc 99"])
def test_a_deployment_with_too_few_api_servers_is_told_how_many_it_needs(flags: str) -> None:
    found = compared(f"vllm serve m {flags}", model="opt-125m", engine="vllm")
    says = [note for note in found.notes if note.startswith("API servers: ")]
    command = str(engine_command(found.best, found.kept))
    assert f"--api-server-count {found.best.api_servers}" in command and found.best.api_servers > 2
    assert len(says) == ("99" not in flags)
    if says:
        assert f"{2 if flags else 1} in the current deployment" in says[0] and "needs --api-server-count" in says[0]


def test_the_port_of_the_host_and_the_cost_are_those_of_what_runs() -> None:
    """A container published port 8010, and was to be checked at 8000; its tokens cost 1% more than their price."""
    docker = "docker run --gpus all -p 8010:8000 -v /m:/m vllm/vllm-openai:v0.15.0 --model m"
    assert find_engine(docker).published == 8010
    assert find_engine("podman run --publish=127.0.0.1:9:8000 image vllm serve m").published == 9
    assert find_engine("vllm serve m -tp 8").published is None
    now = compared("vllm serve m --max-model-len 24000", price=3.0).current
    assert now is not None and now.estimate.cost_per_million_tokens == pytest.approx(
        3e6 / 3600 / now.estimate.output_tokens_per_s * now.num_devices
    )


def test_a_model_that_a_shell_would_fill_in_is_asked_for() -> None:
    with pytest.raises(InputError, match=r"current: '.MODEL' .* it is a shell variable: write its value"):
        compare(plan_request(cluster="h100x1", workload="orca", objective="saturated"), "vllm serve $MODEL")


def test_layers_with_windows_keep_the_window_and_the_steps_in_flight() -> None:
    """A request of 65,536 tokens of Gemma 3 27B takes 11.9 GiB by vLLM 0.32's `SlidingWindowSpec`: 5 in 10 layers, and
    6.9 in 52 with a window of 1,024 and two steps of 8,192 tokens in flight; 31 GiB if windows keep every token."""
    command, asked = "vllm serve m --max-model-len 65536", {"model": "gemma-3-27b", "cluster": "h100x1"}
    assert compared(command, **asked).current is not None
    with pytest.raises(InfeasibleError, match="would not start"):
        compared(f"{command} --disable-hybrid-kv-cache-manager", **asked)


@pytest.mark.long
def test_engines_that_shorten_their_context_start_with_less() -> None:
    """SGLang and TensorRT-LLM take shorter requests then, where vLLM does not start."""
    assert compared("sglang serve m --mem-fraction-static 0.3").current is not None
    with pytest.raises(InfeasibleError, match="would refuse requests: its K/V memory holds"):
        compared("sglang serve m --mem-fraction-static 0.21", workload="azure-conv")
    assert read_current("trtllm-serve m", load_cluster("h100x1")).shortens


DRAFTED = "vllm serve m --max-model-len 8192 --speculative-config.method eagle3 --speculative-config.model d "
DRAFTED += "--speculative-config.num_speculative_tokens 2"


def test_drafts_are_scored_with_an_acceptance_that_is_stated() -> None:
    assumed, given = compared(DRAFTED), compared(DRAFTED, acceptance=(0.9, 0.85))
    assert "the plans use eagle3 with 2 draft tokens a step; assumed acceptance 0.6" in assumed.notes[0]
    assert "given acceptance (0.9, 0.85)" in given.notes[0]
    rates = []
    for found in (assumed, given):
        assert found.current is not None and found.current.speculation is not None
        assert found.best.speculation == found.current.speculation and found.current.speculation.tokens == 2
        rates.append(found.current.estimate.throughput_rps)
    assert rates[0] < rates[1]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ('vllm serve m -sc \'{"model": "small", "num_speculative_tokens": 4}\'', "only eagle, eagle3"),
        ("vllm serve m --spec-method mtp", "no layer for multi-token prediction"),
        ("vllm serve m --spec-method eagle", "give num_speculative_tokens"),
        ("vllm serve m --spec-method ngram --spec-tokens 3", "acceptance is missing; .* depends on the text"),
        ("vllm serve m -pp 2 --spec-method eagle --spec-tokens 3 --max-model-len 8192", "without pipeline stages"),
        ("vllm serve m -sc '{model: x}'", "write a JSON object"),
        ('vllm serve m -sc \'{"method": "mtp", "parallel_drafting": true}\'', "parallel_drafting"),
        ("sglang serve m --speculative-algorithm EAGLE", "--speculative-eagle-topk 1"),
    ],
)
def test_drafts_that_are_not_scored(flags: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        compared(flags, cluster="h100x8")


def test_encoders_that_are_left_out_leave_room() -> None:
    """What a server sets aside for the largest image is not known, so a plan for it says so."""
    model = load_model("llama-3.1-8b")[0].model_copy(update={"tower_params": 2 * 10**9})
    command = "vllm serve m --max-model-len 8192"
    both, text = (compared(command + flag, model=model).current for flag in ("", " --language-model-only"))
    assert both is not None and text is not None
    assert text.stages[0].kv_blocks > both.stages[0].kv_blocks + 1_800
    assert any("reads images or sound" in warning for warning in both.estimate.warnings)
    assert not any("reads images or sound" in warning for warning in text.estimate.warnings)


def test_the_model_is_the_command_s_if_none_is_given() -> None:
    asked: dict[str, Any] = {"cluster": "h100x1", "workload": "orca", "policy": "chunked", "latency_bound_s": 30}
    request = plan_request(objective="saturated", **asked)
    found = compare(request, "vllm serve meta-llama/Llama-3.1-8B --max-model-len 8192")
    assert found.best.model.num_layers == 32 and found.best.checkpoint == "hf://meta-llama/Llama-3.1-8B"
    rates = [plan.estimate.throughput_rps for plan in (found.best, *found.relaxed.values())]
    assert len(rates) == 5 and rates == sorted(rates)


@pytest.mark.parametrize(("cluster", "devices"), few([("h200x8", 4), ("h200x8", 8), ("h200x32", 16)]))
def test_shared_experts_are_scored_on_the_devices_of_the_command(cluster: str, devices: int) -> None:
    found = compared(f"vllm serve m -dp {devices} -ep -q fp8", model="qwen3-235b-a22b", cluster=cluster).current
    assert found is not None and found.num_devices == found.replicas == devices
    assert {stage.ep for stage in found.stages} == {devices}


def test_replicas_of_vllm_that_cut_experts_are_refused() -> None:
    """Without expert parallelism vLLM cuts each expert across all data-parallel replicas."""
    with pytest.raises(InputError, match=r"divides each expert among all of them, .* add --enable-expert-parallel"):
        compared("vllm serve m -dp 2", model="qwen3-30b-a3b", cluster="h200x8")


@pytest.mark.long
def test_windows_take_room_if_nothing_leaves_them() -> None:
    command, asked = "vllm serve m -tp 2 --max-model-len 32768", {"model": "gpt-oss-120b", "cluster": "h200x8"}
    flags = ("", " --disable-hybrid-kv-cache-manager")
    frees, keeps = (compared(command + flag, workload="azure-conv", **asked).current for flag in flags)
    assert frees is not None and keeps is not None
    assert keeps.stages[0].kv_blocks < 0.7 * frees.stages[0].kv_blocks


def test_the_loop_is_the_one_of_the_command() -> None:
    """Without scheduling ahead, and with whole prompts, a server is slower; the plans' engine stays as it is."""
    rates, command = {}, "vllm serve m --max-model-len 8192"
    for flags in ("", " --async-scheduling", " --no-async-scheduling", " --no-enable-chunked-prefill"):
        found = compared(command + flags)
        assert found.current is not None and found.best.engine is not None and found.best.engine.schedules_ahead
        rates[flags] = found.current.estimate.throughput_rps
    assert rates[" --async-scheduling"] == rates[""] > rates[" --no-async-scheduling"] > 0.7 * rates[""]
    assert 0.8 * rates[""] < rates[" --no-enable-chunked-prefill"] <= rates[""]


def test_known_pairs_count(tmp_path: Path) -> None:
    """The longest input and the longest output are of different requests."""
    (tmp_path / "day.csv").write_text("input,output\n" + "900,10\n20,300\n" * 200)
    workload = str(tmp_path / "day.csv")
    assert compared("vllm serve m --max-model-len 1000", workload=workload).current is not None
    with pytest.raises(InputError, match="day has requests of 910 tokens, which the engine would reject"):
        compared("vllm serve m --max-model-len 909", workload=workload)


@pytest.mark.parametrize(
    "command",
    [
        "TP=2 MODEL=Qwen/Qwen3-8B; vllm serve $MODEL --tensor-parallel-size ${TP}",
        "export TP=2\nMODEL=Qwen/Qwen3-8B\nvllm serve $MODEL --tensor-parallel-size $TP",
        "vllm serve ${MODEL:-Qwen/Qwen3-8B} --tensor-parallel-size ${TP:-2}",
        "A=1 bash -c 'vllm serve Qwen/Qwen3-8B --tensor-parallel-size 2'",
    ],
)
def test_variables_of_a_script_have_their_values(command: str) -> None:
    """`$TP` was refused although the script sets it."""
    current = read_current(command, load_cluster("h100x8"))
    assert (current.model, current.tp_degree) == ("Qwen/Qwen3-8B", 2)


@pytest.mark.parametrize(
    "command",
    [
        "VLLM_USE_V1=0 VLLM_API_KEY=k CUDA_VISIBLE_DEVICES=0 vllm serve m",
        "export VLLM_USE_V1=0\nvllm serve m",
        "env VLLM_USE_V1=0 vllm serve m",
        "docker run -e HF_TOKEN -e VLLM_USE_V1=0 -e VLLM_LOGGING_LEVEL=DEBUG vllm/vllm-openai:v0.15.0 --model m",
        "services: {llm: {image: 'vllm/vllm-openai:v0.15.1', environment: [VLLM_USE_V1=0], command: --model m}}",
    ],
)
def test_what_the_environment_sets_is_named(command: str) -> None:
    """A command with VLLM_USE_V1=0 was scored without a word about it."""
    notes = read_current(command, load_cluster("h100x8")).notes
    assert "environment variables are not scored: VLLM_USE_V1" in notes


def test_a_printed_command_has_only_flags_of_its_version() -> None:
    """`--disable-log-requests` and `--swap-space` are flags that 0.32 does not have."""
    flags = "--model m --disable-log-requests --swap-space 16 --max-model-len 8192"
    newest, older = (compared(f"docker run vllm/vllm-openai:{tag} {flags}") for tag in ("v0.32.0", "v0.15.1"))
    assert newest.kept == {"max-model-len": "8192"}
    assert older.kept == {"max-model-len": "8192", "disable-log-requests": "yes", "swap-space": "16"}
    assert not [note for note in newest.notes + older.notes if "which is scored as" in note]
    unknown = compared(f"docker run vllm/vllm-openai:v0.40.0 {flags}")
    assert "the command starts version 0.40.0, which is scored as vllm-0.32" in unknown.notes
    assert any(note.startswith("K/V memory: vllm-0.32 should log") for note in unknown.notes)


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        ("vllm serve $MODEL --tensor-parallel-size ${TP:-2} --max-num-seqs ${SEQS}", {"MODEL": "a/b", "SEQS": "64"}),
        ("vllm serve a/b --tensor-parallel-size ${TP:=2} --max-num-seqs ${SEQS:?set it}", {"SEQS": "64"}),
        ("TP=2\nvllm serve a/b -tp $TP --max-num-seqs $(SEQS)", {"SEQS": "64"}),
    ],
)
def test_shell_variables_have_defaults_and_values(command: str, variables: dict[str, str]) -> None:
    found = read_current(command, load_cluster("h100x8"), variables)
    assert (found.model, found.tp_degree, found.max_num_seqs) == ("a/b", 2, 64)
    with pytest.raises(InputError, match="--set NAME=VALUE"):
        read_current("vllm serve a/b --max-num-seqs $SEQS", load_cluster("h100x8"), {"OTHER": "1"})


@pytest.mark.parametrize(
    "script",
    [
        'SIZES="--tensor-parallel-size 2 --max-num-seqs 64"\nvllm serve m $SIZES',
        'SIZES=(\n  --tensor-parallel-size 2\n  # requests\n  --max-num-seqs "64"\n)\nvllm serve m "${SIZES[@]}"',
        "local SIZES=(-tp 2)\nSIZES+=(--max-num-seqs 64)\nvllm serve m ${SIZES[@]}",
        'N=64\nSIZES=(-tp 2 --max-num-seqs "$N")\nNONE=""\nvllm serve m $NONE "${SIZES[@]}"',
    ],
)
def test_values_between_no_quotes_and_arrays_are_several_words(script: str) -> None:
    found = read_current(script, load_cluster("a40x4"))
    assert (found.tp_degree, found.max_num_seqs, found.model) == (2, 64, "m")


@pytest.mark.parametrize(
    ("script", "variables"),
    [
        ("N=3\nvllm serve m --max-num-seqs $((N * 20 + 4))", {}),
        ("vllm serve m --max-num-seqs $((CONC / 2))", {"CONC": "128"}),
        ('N="$(( CONC * 2 > 8 ? CONC * 2 : 8 ))"\nvllm serve m --max-num-seqs "$N"', {"CONC": "32"}),
        ("vllm serve m --max-num-seqs $((CONC > 64 ? CONC : 64))", {"CONC": "4"}),
    ],
)
def test_sums_and_products_of_numbers_are_computed(script: str, variables: dict[str, str]) -> None:
    assert read_current(script, load_cluster("a40x4"), variables).max_num_seqs == 64


def test_values_between_quotes_are_one_word() -> None:
    found = read_current('M="a b"\nvllm serve "$M" --api-key "$M"', load_cluster("a40x4"))
    assert found.model == "a b"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--cuda-graph-max-bs 512", ""),
        ("--nsa-prefill-backend flashmla_auto --nsa-decode-backend fa3", ""),
        ("--dp 8 --enable-dp-attention", "each expert is scored as if it were whole on a device"),
    ],
)
def test_flags_of_earlier_sglang_are_read(flags: str, says: str) -> None:
    command = f"python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3.2 --tp 8 {flags}"
    assert says in " ".join(read_current(command, load_cluster("h200x8")).notes)


DRAFTS = "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1"


@pytest.mark.parametrize(
    ("flags", "parts", "requests"),
    [
        ("", 1, 2048),
        ("--ep 4", 8, 2048),
        ("--ep 2", 1, 2048),
        (DRAFTS, 1, 48),
        (f"{DRAFTS} --max-running-requests 96", 1, 96),
    ],
)
def test_defaults_of_sglang_follow_its_other_flags(flags: str, parts: int, requests: int) -> None:
    found = read_current(f"sglang serve deepseek-ai/DeepSeek-R1 --tp 8 {flags}", load_cluster("h200x8"))
    assert (found.ep_degree, found.max_num_seqs) == (parts, requests)
    assert ("--ep" in flags) == any("the nearest way" in note for note in found.notes)


@pytest.mark.parametrize(
    ("flags", "ahead", "mixes", "copies"),
    [
        ("", True, False, 5),
        ("--mamba-scheduler-strategy no_buffer", False, False, 3),
        ("--mamba-scheduler-strategy extra_buffer", True, False, 5),
        ("--mamba-radix-cache-strategy extra_buffer --disable-overlap-schedule", False, False, 4),
        ("--mamba-radix-cache-strategy no_buffer --disable-radix-cache", True, False, 1),
        ("--disable-overlap-schedule --enable-mixed-chunk", False, True, 3),
        (f"--enable-mixed-chunk {DRAFTS}", True, False, 5),
    ],
)
def test_flags_of_sglang_change_its_loop(flags: str, ahead: bool, mixes: bool, copies: int) -> None:
    found = read_current(f"sglang serve Qwen/Qwen3-Next-80B-A3B-Instruct --tp 4 {flags}", load_cluster("h200x8"))
    started = found.as_started(load_engine("sglang"))
    assert (started.schedules_ahead, started.mixes, started.state_copies) == (ahead, mixes, copies)


def test_parts_of_experts_that_do_not_divide_the_devices_are_refused() -> None:
    with pytest.raises(InputError, match="ep-size: 3 is not accepted; give one that divides 8"):
        read_current("sglang serve deepseek-ai/DeepSeek-R1 --tp 8 --ep 3", load_cluster("h200x8"))


@pytest.mark.parametrize(("timed", "planned"), [("vllm", "vllm-0.32"), ("xgpt", None)])
def test_a_profile_of_the_running_engine_on_this_machine_plans_for_its_own_scheduler(
    timed: str, planned: str | None
) -> None:
    """The best plan needed xgpt's scheduler, and the one that a flag gives stood second."""
    profile = analytic.profile(load_model("llama-3.1-8b")[0], load_cluster("h200x1"), "bfloat16").but(engine=timed)
    request, here = plan_request(model="llama-3.1-8b", profile=profile, ttft_s=1.0), load_cluster("local")
    running = read_current("vllm serve meta-llama/Llama-3.1-8B", here)
    assert in_engine_of(request, running, here).engine == planned
