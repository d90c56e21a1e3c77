"""Profiles belong to what they were made for, and each plan finds its own again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import PROBLEM, Xgpt
from tests.rings import few
from xgpt.core.io import cache_dir, load_json, sha256
from xgpt.core.schema import Plan, Profile
from xprofiler import analytic
from xprofiler import store as profiles

OF = {
    "llama": ("llama-3.1-8b", "h200x1", "bfloat16"),
    "opt": ("opt-125m", "h200x1", "float16"),
    "70b": ("llama-3.1-70b", "h200x8", "bfloat16"),
    "8bit": ("llama-3.1-8b", "h200x1", "float8"),
    "a40": ("opt-125m", "a40x4", "float16"),
    "t5": ("t5-11b", "a40x8", "bfloat16"),
}
"""What profiles are made of: model, cluster, dtype."""


def arguments(key: str) -> list[str]:
    return [word for pair in zip(("--model", "--cluster", "--dtype"), OF[key], strict=True) for word in pair]


@pytest.mark.parametrize("theirs", OF)
@pytest.mark.parametrize("ours", few(OF, 2))
def test_a_profile_of_something_else_is_refused(xgpt: Xgpt, ours: str, theirs: str) -> None:
    assert xgpt("profile", *arguments(theirs), "-o", "profile.json").code == 0
    plan = ["plan", "--latency-bound", "inf", *arguments(ours), "--profile", "profile.json", "--policy", "orca"]
    if ours == theirs:
        assert xgpt(*plan).code == 0
        return
    line = xgpt.fails(2, *plan)
    at = next(i for i in range(3) if OF[ours][i] != OF[theirs][i])
    assert ("profile.model", "profile.device", "profile.dtype")[at] in line
    devices = {"h200x1": "h200", "h200x8": "h200", "a40x4": "a40", "a40x8": "a40"}
    for said in (OF[ours][at], devices.get(OF[theirs][at], OF[theirs][at])):
        assert said in line
    assert f"xgpt profile --model {OF[ours][0]} --cluster {OF[ours][1]}" in line


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.num_layers": 40}, "num_layers 32, not 40"),
        ({"model.num_kv_heads": 32}, "num_kv_heads 8, not 32"),
        ({"engine": "xgpt", "engine_version": "0.0.1"}, "profile.engine_version: '0.0.1'"),
        ({"schema_version": 1}, "profile.schema_version: 1"),
        ({"engine_of": "xgpt"}, "profile.engine_of"),
    ],
)
def test_one_size_of_a_profile_differs(xgpt: Xgpt, change: dict[str, Any], said: str) -> None:
    assert xgpt("profile", *PROBLEM[:4], "-o", "profile.json").code == 0
    document = json.loads(Path("profile.json").read_text())
    for path, value in change.items():
        *parents, name = path.split(".")
        inner = document
        for parent in parents:
            inner = inner[parent]
        inner[name] = value
    Path("profile.json").write_text(json.dumps(document))
    assert said in xgpt.fails(2, "plan", "--latency-bound", "4", *PROBLEM, "--profile", "profile.json")


def test_fewer_devices_are_refused_and_more_are_taken(xgpt: Xgpt) -> None:
    for name in ("h200x1", "h200x8"):
        assert xgpt("profile", "--model", "llama-3.1-8b", "--cluster", name, "-o", f"{name}.json").code == 0
    plan = ("plan", "--latency-bound", "inf", *PROBLEM[:2], "--policy", "orca", "--workload", "orca")
    line = xgpt.fails(2, *plan, "--cluster", "h200x8", "--profile", "h200x1.json")
    assert "profile.devices_per_node: 1" in line and "h200x8 has 8 devices per node" in line
    assert xgpt(*plan, "--cluster", "h200x1", "--profile", "h200x8.json").code == 0


@pytest.mark.parametrize(("engine_name", "run_by"), [("vllm", "xgpt"), ("xgpt", "vllm"), ("sglang", "xgpt")])
def test_a_plan_is_served_by_the_engine_of_its_profile(xgpt: Xgpt, plan: Path, engine_name: str, run_by: str) -> None:
    document = json.loads(plan.read_text())
    document["profile"]["engine"] = engine_name
    plan.write_text(json.dumps(document))
    line = xgpt.fails(2, "serve", str(plan), "--dry-run", "--engine", run_by)
    assert f"plan.profile.engine: '{engine_name}'" in line and f"xgpt profile --engine {run_by}" in line
    assert (f"--engine {engine_name}" in line) == (engine_name != "sglang")
    if engine_name == "sglang":
        assert "plan.profile.engine" in xgpt.fails(2, "export", str(plan), "--to", "shell", "-o", "out")


def test_an_old_plan_finds_its_profile_after_another_was_made(
    xgpt: Xgpt, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the datasheet's formulas have changed since: what was planned from is kept, not computed anew."""
    changed = analytic.profile
    monkeypatch.setattr(analytic, "profile", lambda *args: changed(*args).slowed(2))
    assert xgpt("plan", "--latency-bound", "20", *PROBLEM, "--policy", "orca", "-o", "new.json").code == 0
    old, new = (load_json(Path(name), Plan, "plan") for name in (plan, "new.json"))
    assert old.profile.sha256 != new.profile.sha256
    for path in (str(plan), "new.json"):
        assert xgpt("simulate", path, "--requests", "50").code == 0
        assert sha256(profiles.profile_of(load_json(Path(path), Plan, "plan"))) in (
            old.profile.sha256,
            new.profile.sha256,
        )


def test_a_profile_that_is_gone_or_changed_is_said(xgpt: Xgpt, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_of = load_json(plan, Plan, "plan")
    kept = cache_dir() / "profiles" / f"{plan_of.profile.sha256}.json"
    with monkeypatch.context() as patch:
        patch.setattr(analytic, "profile", lambda *args: pytest.fail("another one is not asked for"))
        assert xgpt("simulate", str(plan), "--requests", "50").code == 0
    kept.write_text(kept.read_text().replace("0.", "0.1", 1))
    assert xgpt("simulate", str(plan), "--requests", "50").code == 0, "the datasheet's is computed again"
    document = json.loads(plan.read_text())
    document["profile"]["source"] = "measured"
    plan.write_text(json.dumps(document))
    for command in ("simulate", "report"):
        line = xgpt.fails(2, command, str(plan))
        assert f"plan.profile.sha256: '{plan_of.profile.sha256[:12]}'" in line and "give it as --profile" in line


def test_a_cache_that_cannot_be_written_stops_no_plan(xgpt: Xgpt, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("file").absolute()))
    assert xgpt("plan", "--latency-bound", "4", *PROBLEM).code == 0
    assert xgpt("simulate", "plan.json", "--requests", "50").code == 0


def test_t5_is_not_planned_in_float16(xgpt: Xgpt) -> None:
    problem = ("--latency-bound", "inf", "--model", "t5-11b", "--cluster", "a40x8", "--workload", "translation")
    line = xgpt.fails(2, "plan", *problem, "--dtype", "float16")
    assert "dtype: 'float16'" in line and "bfloat16" in line
    assert xgpt("plan", *problem, "--policy", "rra").code == 0
    assert load_json(Path("plan.json"), Plan, "plan").dtype == "bfloat16"


@pytest.mark.long
def test_an_encoders_prompts_are_not_cut(xgpt: Xgpt) -> None:
    problem = ("--latency-bound", "inf", "--model", "t5-11b", "--cluster", "a40x8", "--workload", "translation")
    line = xgpt.fails(2, "plan", *problem, "--policy", "chunked")
    assert "--policy: 'chunked'" in line and "read" in line and "rra, orca, static, waa" in line
    ran = xgpt("plan", *problem, "--objective", "saturated", "--explain")
    assert ran.code == 0 and "no plan of chunked: an encoder reads a prompt whole" in ran.out


def test_measured_profiles_are_found_by_what_they_are_of(xgpt: Xgpt, monkeypatch: pytest.MonkeyPatch) -> None:
    """By shape, dtype and device; a plan of an earlier measurement keeps its own."""
    from xgpt.resolve import load_cluster, load_model
    from xprofiler import measure

    spec, _ = load_model("opt-125m")
    local = load_cluster("local")
    times: list[float] = []

    def measured(spec: Any, cluster: Any, dtype: Any, **_: Any) -> Profile:
        times.append(1 + len(times))
        built = analytic.profile(spec, load_cluster("h200x1"), "float16").slowed(times[-1])
        return built.model_copy(update={"source": "measured", "device": cluster.device.name, "dtype": dtype})

    monkeypatch.setattr(measure, "profile", measured)
    first = profiles.obtain_profile(spec, None, local)
    assert profiles.obtain_profile(spec, None, local) == first and len(times) == 1
    assert profiles.obtain_profile(spec.model_copy(update={"eos_token_ids": (9,)}), None, local) == first
    other = spec.model_copy(update={"num_layers": 3})
    assert profiles.obtain_profile(other, None, local) != first and len(times) == 2
    second = profiles.measured_profile(spec, None, local)
    assert profiles.obtain_profile(spec, None, local) == second != first
    assert xgpt("plan", "--latency-bound", "4", *PROBLEM).code == 0
    plan = load_json(Path("plan.json"), Plan, "plan")
    for name in (first, second):
        reference = plan.profile.model_copy(update={"sha256": sha256(name), "source": "measured"})
        assert profiles.profile_of(plan.model_copy(update={"profile": reference})) == name


@pytest.mark.parametrize("damaged", ["*.sha256", "*.json"])
def test_a_damaged_cache_is_mended(monkeypatch: pytest.MonkeyPatch, xgpt: Xgpt, damaged: str) -> None:
    from xgpt.resolve import load_cluster, load_model
    from xprofiler import measure

    spec, _ = load_model("opt-125m")
    local = load_cluster("local")
    built = analytic.profile(spec, load_cluster("h200x1"), "float16")
    built = built.model_copy(update={"source": "measured", "device": local.device.name, "dtype": "float32"})
    monkeypatch.setattr(measure, "profile", lambda *_, **__: built)
    profiles.obtain_profile(spec, None, local)
    for file in (cache_dir() / "profiles").glob(damaged):
        file.write_bytes(b"\xff\0")
    assert profiles.obtain_profile(spec, None, local) == built
    monkeypatch.setattr(measure, "profile", lambda *_, **__: pytest.fail("it is measured again"))
    assert profiles.obtain_profile(spec, None, local) == built


def test_a_measurement_outlives_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, xgpt: Xgpt) -> None:
    from xgpt.resolve import load_cluster, load_model
    from xprofiler import measure

    spec, _ = load_model("opt-125m")
    Path("file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("file").absolute()))
    built = analytic.profile(spec, load_cluster("h200x1"), "float16")
    monkeypatch.setattr(measure, "profile", lambda *_, **__: built)
    assert profiles.measured_profile(spec, None, load_cluster("local")) == built


def test_a_restless_profile_is_kept_for_minutes_only(monkeypatch: pytest.MonkeyPatch, xgpt: Xgpt) -> None:
    from xgpt.resolve import load_cluster, load_model
    from xprofiler import measure

    spec, _ = load_model("opt-125m")
    local = load_cluster("local")
    spreads = iter((0.63, 0.4, 0.02))

    def measured(spec: Any, cluster: Any, dtype: Any, **_: Any) -> Profile:
        built = analytic.profile(spec, load_cluster("h200x1"), "float16")
        changes = {"source": "measured", "device": cluster.device.name, "dtype": dtype, "spread": next(spreads)}
        return built.model_copy(update=changes)

    def later(seconds: float) -> float:
        for file in (cache_dir() / "profiles").glob("*.sha256"):
            os.utime(file, times=(file.stat().st_atime, file.stat().st_mtime - seconds))
        return profiles.obtain_profile(spec, None, local).spread

    monkeypatch.setattr(measure, "profile", measured)
    assert later(0) == later(300) == 0.63
    assert later(400) == 0.4
    assert later(700) == later(7e5) == 0.02


def test_times_too_short_to_measure_are_shown(xgpt: Xgpt, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model so small that attention, embedding and head take all of a step."""
    computed = analytic.profile

    def instant(*args: Any) -> Profile:
        profile = computed(*args)
        layers = tuple(layer.model_copy(update={"rest": layer.rest.times(0)}) for layer in profile.layers)
        return profile.model_copy(update={"layers": layers})

    monkeypatch.setattr(analytic, "profile", instant)
    ran = xgpt("profile", *PROBLEM[:4])
    assert ran.code == 0 and "tokens/s" in ran.out


@pytest.mark.parametrize(
    ("policy", "said"), [("orca", "vLLM reads weights from a directory"), ("static", "vLLM frees a slot")]
)
def test_what_serve_would_refuse_is_not_planned_for_this_machine(xgpt: Xgpt, policy: str, said: str) -> None:
    from xgpt.resolve import load_cluster

    assert (
        xgpt("profile", "--model", "opt-125m", "--cluster", "h200x1", "--dtype", "float32", "-o", "it.json").code == 0
    )
    document = json.loads(Path("it.json").read_text())
    document |= {"device": load_cluster("local").device.name, "engine": "vllm", "engine_version": "0.32.0"}
    Path("it.json").write_text(json.dumps(document))
    plan = (
        "plan",
        "--latency-bound",
        "inf",
        "--model",
        "opt-125m",
        "--profile",
        "it.json",
        "--dtype",
        "float32",
        "--workload",
        "translation",
    )
    assert said in xgpt.fails(2, *plan, "--policy", policy)
