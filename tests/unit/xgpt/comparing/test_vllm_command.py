"""What a vLLM command says about its schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.scenarios import problem
from xgpt.comparing.flags import verdicts
from xgpt.comparing.launched import read_current
from xgpt.comparing.scoring import check_current, score_current
from xgpt.comparing.vllm_command import TABLE
from xgpt.core.errors import InputError
from xgpt.core.schema import Constraint
from xgpt.problems import resolve
from xgpt.requests import plan_request
from xgpt.resolve import load_cluster
from xscheduler.problem import Problem
from xsimulator.capacity import Trial

SCORED = {
    *("disable-hybrid-kv-cache-manager", "spec-method", "spec-model", "spec-tokens", "speculative-config"),
    *(
        "api-server-count",
        "async-scheduling",
        "block-size",
        "config",
        "data-parallel-size",
        "dtype",
        "enable-chunked-prefill",
    ),
    *(
        "enable-prefix-caching",
        "enforce-eager",
        "language-model-only",
        "gpu-memory-utilization",
        "kv-cache-dtype",
        "max-model-len",
        "performance-mode",
    ),
    *("max-num-batched-tokens", "max-num-seqs", "pipeline-parallel-size", "quantization", "tensor-parallel-size"),
}


@pytest.mark.parametrize(
    ("command", "devices", "seqs", "tokens"),
    [
        ("vllm serve m -tp 2 -pp 2 --max-num-seqs 64 --max-num-batched-tokens 512", (2, 2, 1), 64, 512),
        ("vllm serve m --tensor-parallel-size=4 --max_num_seqs=8 --port 80", (4, 1, 1), 8, 2048),
        ("python -m vllm.entrypoints.openai.api_server --model m --data-parallel-size 2", (1, 1, 2), 256, 2048),
        ("VLLM_X=1 vllm serve 'a b' --enable-chunked-prefill --gpu-memory-utilization 0.9", (1, 1, 1), 256, 2048),
        ("vllm serve m -dp 2 --max-num-batched-tokens 1.5k --api-key a b --no-use-tqdm-on-load", (1, 1, 2), 256, 1500),
        ("vllm serve m --max-num-batched-tokens 1K --max-num-seqs=7 -O 2 --generation-config vllm", (1, 1, 1), 7, 1024),
        ("vllm serve m --max-num-batched-tokens 128", (1, 1, 1), 128, 128),
        ("vllm serve m --limit-mm-per-prompt.image 2 --seed -1 --headless --async-scheduling", (1, 1, 1), 256, 2048),
    ],
)
def test_flags_are_read(command: str, devices: tuple[int, int, int], seqs: int, tokens: int) -> None:
    found = read_current(command, load_cluster("a40x4"))
    assert (found.tp_degree, found.num_stages, found.replicas) == devices
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (seqs, tokens)


def test_options_that_a_plan_keeps_start_it_elsewhere() -> None:
    drafts = "--spec-method eagle3 --spec-model d --spec-tokens 3"  # refused beside --speculative-config
    placed = "-dp 2 --headless --data-parallel-start-rank 1 --data-parallel-rpc-port 9 --master-addr h"
    found = read_current(
        f"vllm serve m {drafts} {placed} --served-model-name a b --max-model-len 9k", load_cluster("a40x4")
    )
    assert TABLE.words(found.kept) == ["--served-model-name", "a", "b", "--max-model-len", "9000"]


@pytest.mark.parametrize(
    ("cluster", "seqs", "tokens"),
    [
        ("h200x1", 1024, 8192),
        ("b200x8", 1024, 16384),
        ("a100x16", 256, 2048),
        ("a40x4", 256, 2048),
        ("local", 128, 2048),
    ],
)
def test_defaults_follow_the_device_and_are_said(cluster: str, seqs: int, tokens: int) -> None:
    found = read_current("vllm serve m", load_cluster(cluster))
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (seqs, tokens)
    assert len(found.notes) == 2 + (cluster == "local")
    flags = "--max-num-seqs 4 --max-num-batched-tokens 64 --no-enable-prefix-caching --dtype float32"
    assert not read_current(f"vllm serve m {flags}", load_cluster(cluster)).notes


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("other serve m", "vllm serve"),
        ("vllm", "vllm serve"),
        ("vllm serve 'm", "quot"),
        ("vllm serve m --max-num-seqs many", "max-num-seqs"),
        ("vllm serve m --max-num-seqs", "max-num-seqs: '' is not accepted; give a value"),
        ("vllm serve m -tp 0", "tensor-parallel-size: '0'"),
        (
            "vllm serve m --no-enable-chunked-prefill --max-model-len 9k --max-num-batched-tokens 8k",
            "without chunked prefill, vLLM requires at least the value of --max-model-len, 9000",
        ),
        ("vllm serve m --max-num-sequences 8", "did you mean --max-num-seqs?"),
        ("vllm serve m --tp 8", "did you mean -tp?"),
        ("vllm serve m --no-enable-prefix-cache", "did you mean --no-enable-prefix-caching?"),
        ("vllm serve m --zzz", "'--zzz' is not accepted; vLLM 0.32.0 has no such flag; correct it, or leave it out$"),
        ("vllm serve m more", "'more' is not accepted; only flags and their values may follow the model"),
        ("vllm serve m & vllm serve n", "it starts 2 different engines: give the command of one"),
        ("vllm serve m -tp $TP", "it is a shell variable: write its value"),
        ("vllm serve m --max-num 8", "it may mean one of --max-num-active-seqs, --max-num-batched-tokens,"),
        ("vllm serve m --disable-log-request-ids", "no such flag: did you mean --disable-log-requests"),
        ("vllm serve m --omni", "serves images, sound or video"),
        ("vllm serve m --enforce-eager=yes", "enforce-eager: 'yes' is not accepted; it is a switch and takes no value"),
        ("vllm serve m --quantization int3", "quantization: 'int3'"),
        ("vllm serve m --kv-cache-dtype fp7", "--kv-cache-dtype: 'fp7'"),
        ("vllm serve m --dtype bf16", "--dtype: 'bf16'"),
        (
            'vllm serve m --speculative-config \'{"method": "medusa"}\'',
            "scores only eagle, eagle3, ngram, mtp; leave drafts out",
        ),
        ("vllm serve m -sc.num_speculative_tokens 3", "speculative-config"),
        (
            'vllm serve m -sc \'{"method": "mtp", "num_speculative_tokens": $N}\'',
            "speculative-config: .* a shell variable",
        ),
        ("vllm serve m -O=0", "optimization-level: '0'"),
        ("vllm serve m --enforce-eager", "captured CUDA graphs"),
        ("vllm serve m --block-size big", "block-size: 'big'"),
        ("vllm serve m --gpu-memory-utilization 1.2", "gpu-memory-utilization: '1.2'"),
        ("vllm serve m --gpu-memory-utilization nan", "gpu-memory-utilization: 'nan'"),
        ("vllm serve m --max-model-len 8.5K", "max-model-len: '8.5K'"),
        ("vllm serve m --max-num-seqs 512 --max-num-batched-tokens 256", "at least the value of --max-num-seqs, 512"),
        ("vllm serve m --config nowhere.yaml", "there is no such file"),
        ("vllm serve m --config $FLAGS", "--config: .* it is a shell variable"),
        ("vllm serve m --kv-cache-dtype $KV", "--kv-cache-dtype: .* it is a shell variable"),
        ("vllm serve m $FLAGS --port 80", "current: '.FLAGS' .* it is a shell variable"),
        ("vllm serve m -dp $((NODES * LOCAL))", "data-parallel-size: .* it is a shell variable"),
        ("vllm serve m --enforce_eager true", "'true' is not accepted; only flags and their values may follow"),
        ("vllm serve m --quantization torchao", "has no step times for it; xgpt scores only fp8"),
        ("vllm serve m --runner pooling", "xgpt scores only models that generate tokens"),
        ("vllm serve m --attention-config.use_fp4_indexer_cache True", "the kernels that vLLM chooses by default"),
        ("vllm serve m --max-cudagraph-capture-size 16", "of --max-num-seqs requests at least: give 256"),
        ("vllm serve m --kv-transfer-config.kv_connector NixlConnector", "transfer of K/V between engines"),
        ("vllm serve m --enable-lora", "step times with adapters"),
        ("vllm serve m --hf-overrides '{\"num_hidden_layers\": 2}'", "it changes the model: give its config.json"),
        ('vllm serve m -cc \'{"mode": 0, "cudagraph_mode": "NONE"}\'', "own compilation settings"),
    ],
)
def test_what_cannot_be_read_is_refused(command: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_current(command, load_cluster("a40x4"))


@pytest.mark.parametrize(
    "flags",
    [
        """--hf-overrides '{"text_config": {"rope_parameters": {"factor": 4.0, "rope_type": "yarn"}}}'""",
        "--hf-overrides.max_position_embeddings 1010000",
        """--rope-scaling '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'""",
        """-cc '{"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"}'""",
        "--compilation-config 3",
    ],
)
def test_json_that_changes_nothing_is_passed_over(flags: str) -> None:
    a40 = load_cluster("a40x4")
    assert read_current(f"vllm serve m {flags}", a40) == read_current("vllm serve m", a40)


def test_each_flag_is_scored_noted_refused_or_changes_nothing() -> None:
    takes, refused, noted = {**TABLE.earlier, **TABLE.takes}, verdicts("vllm", "refused"), verdicts("vllm", "noted")
    assert set(takes) >= SCORED | set(refused) | set(noted)
    assert not SCORED & (set(refused) | set(noted))
    a40 = load_cluster("a40x4")
    plain = read_current("vllm serve m", a40)
    for name, (why, neutral) in {**noted, **refused}.items():
        flag, off = (f"--{name}", f"--no-{name}") if takes[name] == "switch" else (f"--{name} 777", "")
        words = off if neutral in (["yes"], ("yes",)) else flag
        if name in refused:
            with pytest.raises(InputError, match=f"current: --{name}"):
                read_current(f"vllm serve m {words}", a40)
        else:
            found = read_current(f"vllm serve m {words}", a40)
            assert any(note.endswith(why) for note in found.notes)
            assert replace(found, notes=plain.notes) == plain
        for value in neutral:
            words = {"yes": f"--{name}", "no": f"--no-{name}"}.get(value, f"--{name} '{value}'")
            assert read_current(f"vllm serve m {words}", a40) == plain
    for name in set(takes) - SCORED - set(refused) - set(noted):
        words = f"--{name}" if takes[name] in ("nothing", "switch") else f"--{name} 7"
        assert read_current(f"vllm serve m {words}", a40) == plain


@pytest.mark.parametrize(
    ("command", "note"),
    [
        ("vllm serve m --moe-backend triton --attention-backend FLASHINFER", "vLLM chooses by default"),
        ("vllm serve m --kernel-config.enable_flashinfer_autotune=False", "vLLM chooses by default"),
        ("vllm serve m --attention-config '{\"use_prefill_query_quantization\":true}'", "vLLM chooses by default"),
        ('vllm serve m -cc \'{"mode":3,"pass_config":{"fuse_minimax_qk_norm":true}}\'', "own compilation settings"),
        ("vllm serve m -cc.pass_config.fuse_allreduce_rms true", "own compilation settings"),
        ('vllm serve m -cc \'{"cudagraph_mode":"FULL_AND_PIECEWISE","custom_ops":["all"]}\'', "compilation settings"),
        ("vllm serve m --max-cudagraph-capture-size 2048", "own compilation settings"),
        (
            'vllm serve m --kv-transfer-config \'{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}\'',
            "the host's",
        ),
        ("vllm serve m --stream-interval 20", "each token were sent when it is made"),
        ("python -m sglang.launch_server --model m --enable-hierarchical-cache", "the host's memory"),
        ("python -m sglang.launch_server --model m --enable-torch-compile --attention-backend fa3", "SGLang chooses"),
    ],
)
def test_kernels_and_fusions_are_scored_as_the_defaults_and_noted(command: str, note: str) -> None:
    (said,) = [each for each in read_current(command, load_cluster("a40x4")).notes if "scored " in each]
    assert note in said


def test_throughput_mode_doubles_the_default_sizes() -> None:
    a40 = load_cluster("a40x4")
    found = read_current("vllm serve m --performance-mode throughput --max-num-seqs 64", a40)
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (64, 4096)


def test_a_config_file_gives_way_to_flags(tmp_path: Path) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text("tensor-parallel-size: 4\nmax_num_seqs: 32\nheadless: true\nenable-prefix-caching: false\n")
    found = read_current(f"vllm serve m --config {path} -tp 2", load_cluster("a40x4"))
    assert (found.tp_degree, found.max_num_seqs) == (2, 32)
    assert not any("prefix" in note for note in found.notes)
    for text, says in (
        ("tensor-paralel-size: 4\n", "did you mean --tensor-parallel-size"),
        ("speculative-config:\n  method: ngram\n", "speculative-config"),
        ("- 1\n", "must contain flags"),
        ("a: [\n", "it is not YAML"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=says):
            read_current(f"vllm serve m --config {path}", load_cluster("a40x4"))


@pytest.fixture(scope="module")
def subject() -> Problem:
    return resolve(plan_request(model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", objective="saturated"))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("-tp 2", "2 devices"),
        ("--dtype half", "the step times are for bfloat16: compare with `dtype=float16` and `kv_dtype=float16`"),
        ("--quantization fp8", "compare with `dtype=float8` and `kv_dtype=bfloat16`"),
        ("--quantization awq", "--quantization: 'awq' is not accepted; the weights of llama-3.1-8b are in bfloat16"),
        ("--max-model-len 1k", "--max-model-len: 1000 is not accepted; azure-conv has requests of"),
    ],
)
def test_what_cannot_be_compared_is_refused(subject: Problem, flags: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        score_current(subject, read_current(f"vllm serve m {flags}", subject.cluster))


def test_eight_bits_are_compared_with_eight_bits() -> None:
    subject = resolve(plan_request(model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", dtype="float8"))
    check_current(subject, read_current("vllm serve m -q fp8 --kv-cache-dtype fp8", subject.cluster))
    with pytest.raises(InputError, match="compare with `dtype=bfloat16`"):
        check_current(subject, read_current("vllm serve m", subject.cluster))


def test_memory_for_k_and_v_follows_the_share(subject: Problem) -> None:
    """Where requests are many, less memory holds fewer."""
    command = "vllm serve m --max-num-seqs 4096 --gpu-memory-utilization {} --max-num-batched-tokens 8192"
    plans = [score_current(subject, read_current(command.format(share), subject.cluster)) for share in (0.3, 0.5, 0.92)]
    blocks = [plan.stages[0].kv_blocks for plan in plans]
    assert blocks == sorted(blocks) and blocks[0] < 0.7 * blocks[1] < 0.7 * blocks[2]
    batches = [plan.policy.max_batch for plan in plans if plan.policy.kind == "chunked"]
    assert batches == sorted(set(batches))
    default = read_current("vllm serve m", subject.cluster)
    assert score_current(subject, replace(default, usable_memory=0.92)) == score_current(subject, default)


@pytest.mark.parametrize(("workload", "share"), [("azure-conv", 0.27), ("summarization", 0.24)])
def test_a_deployment_runs_as_many_requests_as_its_own_admission_lets_in(workload: str, share: float) -> None:
    """It admits while blocks are free, and preempts. The rule of plans (fits 99.9% of the time) gave 22%, 5% less."""
    asked = {"model": "llama-3.1-8b", "cluster": "h100x1", "workload": workload, "engine": "vllm-0.24"}
    subject = resolve(plan_request(**asked, objective="saturated"))
    limits = "--max-model-len 16384 --max-num-seqs 256 --max-num-batched-tokens 2048"
    command = f"vllm serve m --gpu-memory-utilization {share} {limits}"
    plan = score_current(subject, read_current(command, subject.cluster))
    own = plan.but(policy=plan.policy.but(max_batch=1024))
    served = Trial(own, subject.profile).saturated()
    assert Trial(plan, subject.profile).saturated() == pytest.approx(served, rel=0.01)
    assert plan.estimate.throughput_rps == pytest.approx(served, rel=0.01)


def test_the_share_without_the_flag_is_that_of_the_version() -> None:
    """It was 0.92, vLLM 0.32's, for all versions."""
    request = plan_request(model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", engine="vllm-0.15")
    subject = resolve(request)
    default = read_current("docker run vllm/vllm-openai:v0.15.1 --model m", subject.cluster)
    assert score_current(subject, replace(default, usable_memory=0.9)) == score_current(subject, default)
    assert score_current(subject, default).cluster.device.usable_memory == 0.9


def test_a_budget_that_no_plan_would_try_is_scored() -> None:
    """vLLM's default on a B200 lies beyond the budgets of the search."""
    asked = problem("llama-3.1-8b", "b200x8", "azure-conv", 6.0)
    subject = asked
    current = read_current("vllm serve m -tp 8", asked.cluster)
    plan = score_current(subject.under(Constraint(latency_bound_s=6.0, objective="arrivals")), current)
    assert plan.policy.token_budget == current.max_num_batched_tokens  # type: ignore[union-attr]
    assert plan.estimate.capacity is not None and plan.estimate.capacity.rate_per_s > 0
