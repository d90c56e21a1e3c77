"""Plans that are served elsewhere than where they were made say what they lack; seeded weights are said everywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.commands import PROBLEM, Xgpt
from tests.fakes import FakeExecutor, fake_app, fake_engine, fake_plan, running
from xgpt.core.errors import InputError
from xgpt.core.io import cache_dir, load_json
from xgpt.core.schema import Plan, Profile
from xgpt.core.schema.tuning import DrivenLoad
from xgpt.resolve import load_cluster
from xprofiler import analytic
from xrunner.server.observe.watch import Watch

SIZES = {"hidden_size": 32, "num_attention_heads": 2, "ffn_dim": 64, "num_hidden_layers": 2, "vocab_size": 97}
SEEDED = "no checkpoint: weights are random (seed 0), so the output tokens mean nothing"


@pytest.fixture
def local_plan(xgpt: Xgpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a small checkpoint, named by a relative path, for this machine; its profile is made up."""
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    from xprofiler import measure

    torch.manual_seed(0)
    OPTForCausalLM(OPTConfig(**SIZES, word_embed_proj_dim=32, max_position_embeddings=512)).save_pretrained("model")

    def measured(spec: Any, cluster: Any, dtype: Any, **_: Any) -> Profile:
        profile = analytic.profile(spec, load_cluster("h200x1"), "float16")
        return profile.model_copy(update={"source": "measured", "device": cluster.device.name, "dtype": dtype})

    monkeypatch.setattr(measure, "profile", measured)
    lengths = Path("lengths.csv")
    lengths.write_text("input,output\n" + "20,10\n30,20\n" * 10)
    asked = ("--model", "model", "--workload", "lengths.csv", "--policy", "orca", "--objective", "saturated")
    ran = xgpt("plan", "--latency-bound", "inf", *asked)
    assert ran.code == 0 and "warning" not in ran.out
    return Path("plan.json").absolute()


def test_a_plan_is_served_from_another_directory(
    xgpt: Xgpt, local_plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = xgpt("serve", str(local_plan), "--dry-run", "--port", "0")
    assert ran.code == 0
    assert f"{local_plan.parent / 'model'} has no tokenizer.json" in ran.err
    assert ran.err.count("\n") == 2, "nothing else is missing"


def test_an_edited_plan_that_needs_more_memory_is_refused(xgpt: Xgpt, local_plan: Path) -> None:
    """A dry run accepted it, and the server ended with ENOMEM."""
    plan = load_json(local_plan, Plan, "plan")
    stage = plan.stages[0].model_copy(update={"kv_blocks": 10**9})
    local_plan.write_text(plan.model_copy(update={"stages": (stage,)}).model_dump_json())
    assert "the plan needs" in xgpt.fails(3, "serve", str(local_plan), "--dry-run")


def test_what_another_machine_lacks_is_said(xgpt: Xgpt, local_plan: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    shutil.move("model", there)
    for command in (("serve", "--dry-run"), ("serve", "--port", "0"), ("serve", "--dry-run", "--engine", "vllm")):
        line = xgpt.fails(2, *command, str(local_plan))
        assert f"plan.checkpoint: '{local_plan.parent / 'model'}'" in line and "directory as --checkpoint" in line
    assert "--checkpoint: 'nowhere'" in xgpt.fails(2, "serve", str(local_plan), "--checkpoint", "nowhere")
    shutil.rmtree(cache_dir())
    document = json.loads(local_plan.read_text())
    document["cluster"]["device"]["name"] = "another"
    local_plan.write_text(json.dumps(document))
    ran = xgpt("serve", str(local_plan), "--dry-run", "--checkpoint", str(there))
    assert ran.code == 0 and "re-planning is off: plan.profile.sha256" in ran.err
    assert "the plan's figures are for another, but this machine has " in ran.err
    config = json.loads((there / "config.json").read_text())
    (there / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    for start in (["--dry-run"], ["--port", "0"]):
        line = xgpt.fails(2, "serve", str(local_plan), *start, "--checkpoint", str(there))
        assert "plan.checkpoint" in line and "its num_layers is 1, but the plan's is 2" in line
    (there / "config.json").write_text(json.dumps(config))
    (there / "tokenizer.json").write_text("[" * 500_000)
    line = xgpt.fails(2, "serve", str(local_plan), "--dry-run", "--checkpoint", str(there))
    assert "tokenizer.json" in line and "nests too deeply" in line


def test_a_weight_that_is_missing_is_said_by_a_dry_run_and_by_the_engine(xgpt: Xgpt, local_plan: Path) -> None:
    from safetensors.torch import load_file, save_file

    from xgpt.serving.engine_process import EngineOrder, _build

    (weights,) = Path("model").glob("*.safetensors")
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("fc1.weight"))
    save_file({other: tensor for other, tensor in tensors.items() if other != name}, weights)
    missing = f"its safetensors must contain {name}"
    assert missing in xgpt.fails(2, "serve", str(local_plan), "--dry-run")
    plan = load_json(local_plan, Plan, "plan")
    stages = tuple(stage.but(tp=2, devices=(0, 1)) for stage in plan.stages)
    cluster = plan.cluster.but(devices_per_node=2)
    for each in (plan, plan.model_copy(update={"stages": stages, "cluster": cluster})):
        order = EngineOrder(plan=each, batching="flat", reuse=True, log_level="info")
        with pytest.raises(InputError, match=missing):
            _build(order, lambda record: None)


def test_seeded_weights_are_said(xgpt: Xgpt) -> None:
    xgpt("plan", "--latency-bound", "4", *PROBLEM)
    plan = load_json(Path("plan.json"), Plan, "plan")
    for checkpoint in (None, "/weights"):
        watch = Watch(fake_plan(checkpoint=checkpoint, workload=plan.workload))
        with running(fake_app(fake_engine(FakeExecutor()), watch)) as url:
            model = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]
            page = httpx.get(url, trust_env=False).text
        assert model.get("warning") == (SEEDED if checkpoint is None else None)
        assert (SEEDED in page) == (checkpoint is None)


def test_a_seeded_plan_says_so_when_it_is_served(xgpt: Xgpt, local_plan: Path) -> None:
    document = json.loads(local_plan.read_text())
    local_plan.write_text(json.dumps(document | {"checkpoint": None}))
    ran = xgpt("serve", str(local_plan), "--dry-run")
    assert ran.code == 0 and SEEDED in ran.err


def test_a_dry_run_checks_where_logs_and_traces_go(xgpt: Xgpt, local_plan: Path) -> None:
    dry = ("serve", str(local_plan), "--dry-run")
    assert "--otlp-endpoint: 'nope' is not accepted; give a URL" in xgpt.fails(2, *dry, "--otlp-endpoint", "nope")
    assert "--allowed-host: '' is not accepted; it must" in xgpt.fails(2, *dry, "--allowed-host", "")
    assert "cannot write .: it is a directory" in xgpt.fails(3, *dry, "--step-log", ".")
    Path("empty").mkdir()
    assert "the directory must contain a config.json" in xgpt.fails(2, *dry, "--checkpoint", "empty")


@pytest.mark.long
@pytest.mark.usefixtures("local_plan")
def test_tune_serves_plans_in_the_own_engine(xgpt: Xgpt, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Plan] = []

    def drive(url: str, *_: object, **__: object) -> DrivenLoad:
        served.append(Plan(**httpx.get(f"{url}/plan").json()["plan"]))
        times = dict.fromkeys((name for name in DrivenLoad.model_fields if name.endswith("_s")), 1.0)
        return DrivenLoad(**times, num_requests=100, num_failed=0, share_kept=1.0, kept=True, seconds=1.0)  # type: ignore[arg-type]

    monkeypatch.setattr("xgpt.tuning.tune.drive", drive)
    monkeypatch.setattr("xgpt.tuning.driving.MOST_LOADS", 1)
    monkeypatch.setattr("xgpt.tuning.tune.MOST_RUNS", 1)
    monkeypatch.setattr("xgpt.tuning.journal.cache_dir", lambda: Path("lock"))
    for name, value in (("DESIGN", 16), ("SAMPLES", 512), ("REQUESTS", 60)):
        monkeypatch.setattr(f"xscheduler.tuning.model.{name}", value)
    problem = ("--engine", "xgpt", "--model", "model", "--workload", "lengths.csv", "--ttft", "20", "--quantile", "0.9")
    ran = xgpt("tune", *problem, "--budget", "100s", "--json")
    assert ran.code == 0, ran.err
    (run,) = json.loads(ran.out)["runs"]
    path = run["command"].removeprefix("xgpt serve ").removesuffix(" --no-replan")
    assert served == [load_json(Path(path), Plan, "plan")]
    assert (served[0].policy.token_budget, served[0].policy.max_batch) == (run["token_budget"], run["max_batch"])
