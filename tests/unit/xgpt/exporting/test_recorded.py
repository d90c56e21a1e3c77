"""Rules and dashboard against what Prometheus read of two replicas of vLLM 0.32, both of which ended after a while.

tests/load/test_replicas.py wrote the recording.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import chain
from pathlib import Path

import pytest

from tests.exports import export, expressions
from tests.unit.xgpt.exporting.test_exports import by_itself

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())
NAMES = {each["series"].partition("{")[0] for each in RECORDED}


def files_of(ttft_s: float) -> dict[str, str]:
    plan = by_itself()
    constraint = plan.constraint.model_copy(update={"ttft_s": ttft_s, "tpot_s": 0.5, "latency_bound_s": None})
    model = plan.model.model_copy(update={"name": "model"})
    return export(plan.model_copy(update={"model": model, "constraint": constraint, "checkpoint": "/model"}), "shell")


def test_every_metric_that_rules_and_dashboard_read_is_one_of_vllms() -> None:
    read = set(re.findall(r"vllm:\w+", " ".join(chain(*expressions(files_of(1.0))))))
    assert {name.removesuffix("_bucket") for name in read} > {"vllm:time_to_first_token_seconds"}
    assert read <= NAMES


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")
@pytest.mark.parametrize(("ttft_s", "is_broken"), [(60.0, False), (0.001, True)])
def test_alerts_fire_if_a_bound_is_broken_and_if_no_replica_is_left(
    ttft_s: float, is_broken: bool, tmp_path: Path
) -> None:
    (tmp_path / "rules.yaml").write_text(files_of(ttft_s)["monitoring/rules.yaml"])
    expected = {
        "TTFTAboveBound": ("warning", [f"The p99 of ttft is above the plan's bound of {ttft_s:g} s."] * is_broken),
        "NoReplica": ("critical", ["No replica of xgpt-model answers."]),
    }
    alerts = [
        {
            "eval_time": "13m",
            "alertname": name,
            "exp_alerts": [
                {
                    "exp_labels": {"severity": severity, "replicas": "xgpt-model"},
                    "exp_annotations": {"summary": summary},
                }
                for summary in summaries
            ],
        }
        for name, (severity, summaries) in expected.items()
    ]
    one = {"interval": "15s", "input_series": RECORDED, "alert_rule_test": alerts}
    (tmp_path / "test.yaml").write_text(json.dumps({"rule_files": ["rules.yaml"], "tests": [one]}))
    words = ["promtool", "test", "rules", "test.yaml"]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
