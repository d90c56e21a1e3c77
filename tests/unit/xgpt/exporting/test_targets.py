"""Which targets take a plan for which engine, and the Compose file."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
import yaml

import xgpt
from xgpt.core.errors import InputError
from xgpt.core.io import configs_dir
from xgpt.core.schema import Plan
from xgpt.core.schema.speculation import Speculation
from xgpt.exporting.export import FRAMEWORKS, Target, check_target, export
from xgpt.resolve import load_engine

ENGINES = (None, "xgpt", "vllm", "sglang", "tensorrt-llm")


@cache
def planned() -> Plan:
    asked = {"model": "llama-3.1-8b", "workload": "chat-short", "latency_bound_s": 20, "objective": "saturated"}
    return xgpt.plan(**asked, cluster="h100x1", engine="vllm", policy="chunked")


def plan_for(engine: str | None) -> Plan:
    return planned().model_copy(update={"engine": None if engine is None else load_engine(engine)})


def test_a_target_takes_only_plans_for_the_engine_that_it_starts() -> None:
    accepted = {target: {e for e in ENGINES if _is_taken(plan_for(e), target)} for target in get_args(Target)}
    of_vllm = {None, "vllm"}
    assert accepted == {
        "vllm": of_vllm, "compose": of_vllm, "dynamo": of_vllm, "llm-d": of_vllm,
        "k8s": {None, "vllm", "xgpt"}, "script": {None, "xgpt"}, "sglang": {"sglang"},
    }  # fmt: skip
    assert accepted.keys() == FRAMEWORKS.keys()


def _is_taken(plan: Plan, target: Target) -> bool:
    try:
        check_target(plan, target)
    except InputError:
        return False
    return True


def test_a_plan_for_another_engine_is_refused_with_the_engine_to_plan_for() -> None:
    with pytest.raises(InputError, match=r"the plan is for vllm-0\.32: plan with `xgpt plan --engine sglang-0\.5`"):
        export(planned(), "sglang")
    with pytest.raises(InputError, match=r"for tensorrt-llm-1\.0: .*, or run the command that `xgpt plan` prints"):
        export(plan_for("tensorrt-llm"), "vllm")


def test_kubernetes_is_not_offered_for_a_plan_without_gpus() -> None:
    plan = plan_for("xgpt")
    with pytest.raises(InputError, match=r"or export to k8s or script$"):
        check_target(plan, "vllm")
    cluster = plan.cluster.model_copy(update={"device": plan.cluster.device.model_copy(update={"type": "cpu"})})
    with pytest.raises(InputError, match=r"or export to script$"):
        check_target(plan.model_copy(update={"cluster": cluster}), "vllm")


def test_the_engine_to_plan_for_is_the_newest_version_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned()
    engines = shutil.copytree(configs_dir() / "engines", tmp_path / "engines")
    file = engines / "sglang.yaml"
    file.write_text(file.read_text().replace('newest: "0.5"', 'newest: "0.10"'))
    monkeypatch.setattr("xgpt.core.io.configs_dir", lambda: tmp_path)
    with pytest.raises(InputError, match=r"plan with `xgpt plan --engine sglang-0\.10`"):
        check_target(plan, "sglang")


def test_compose_starts_the_planned_command_on_the_plans_devices_for_each_replica() -> None:
    plan = planned().model_copy(update={"checkpoint": "hf://meta-llama/Llama-3.1-8B-Instruct", "replicas": 2})
    cluster = plan.cluster.model_copy(update={"devices_per_node": 4})
    plan = plan.model_copy(update={"cluster": cluster})
    document = yaml.safe_load(export(plan, "compose")["compose.yaml"])
    assert list(document["services"]) == ["vllm-0", "vllm-1"] and document["volumes"] == {"hub": {}}
    second = document["services"]["vllm-1"]
    assert second["entrypoint"][:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct"]
    assert "--max-num-seqs" in second["entrypoint"] and second["ports"] == ["127.0.0.1:8001:8000"]
    assert second["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] == ["1"]
    own = yaml.safe_load(export(plan.model_copy(update={"checkpoint": "/w/$HOME"}), "compose")["compose.yaml"])
    mounted = own["services"]["vllm-0"]["volumes"][0]
    assert (mounted["source"], mounted["target"]) == ("/w/$$HOME", "/model") and "volumes" not in own
    with pytest.raises(InputError, match="needs 2 devices, but a machine has only 1: export `to=llm-d`"):
        export(plan.model_copy(update={"cluster": planned().cluster}), "compose")


@pytest.mark.parametrize(
    ("checkpoint", "draft", "is_mounted"),
    [("hf://a/b", "a/draft", False), ("hf://a/b", "/w/draft", True), ("/w/b", "a/draft", True), ("/w/b", "/w/d", True)],
)
def test_a_draft_is_mounted_where_it_cannot_be_downloaded(checkpoint: str, draft: str, is_mounted: bool) -> None:
    """A directory of a draft was named in the command and mounted nowhere."""
    drafting = Speculation(method="eagle3", tokens=2, acceptance=(0.7, 0.5), draft=draft)
    plan = planned().model_copy(update={"checkpoint": checkpoint, "speculation": drafting})
    for target, name in (("llm-d", "llm-d.yaml"), ("dynamo", "dynamo.yaml")):
        text = export(plan, target)[name]  # type: ignore[arg-type]
        assert text.count('"model": "/draft"') == text.count("mountPath: /draft") == is_mounted
        assert (f'"model": "{draft}"' in text) is not is_mounted
        assert ("claimName: xgpt-llama-3-1-8b-draft" in text) is is_mounted
    service = yaml.safe_load(export(plan, "compose")["compose.yaml"])["services"]["vllm-0"]
    is_local = draft.startswith("/")
    assert [volume["source"] for volume in service["volumes"][1:]] == [draft] * is_local
    assert any(f'"model": "{"/draft" if is_local else draft}"' in word for word in service["entrypoint"])


def test_pods_of_vllms_own_scheduler_carry_no_plan_and_keep_the_models_id_as_its_name() -> None:
    plan = planned().model_copy(update={"checkpoint": "hf://meta-llama/Llama-3.1-8B-Instruct"})
    for target, name in (("llm-d", "llm-d.yaml"), ("dynamo", "dynamo.yaml")):
        text = export(plan, target)[name]  # type: ignore[arg-type]
        assert "ConfigMap" not in text and "configMap" not in text and len(text.splitlines()) < 400
        assert "--served-model-name\n" in text and text.count("meta-llama/Llama-3.1-8B-Instruct") >= 2
