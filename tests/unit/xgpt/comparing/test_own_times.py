"""What `xgpt compare` says about a deployment at a log's own times, and prints before it tries looser bounds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from xgpt import plan
from xgpt.cli import main
from xgpt.comparing import compare as comparing
from xgpt.comparing.compare import Compared, compare
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.schema import Plan
from xgpt.requests import plan_request

CURRENT = "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 16384 --served-model-name chat --port 9000"
ASKED = {"cluster": "h100x1", "objective": "saturated", "policy": "chunked"}


def log(path: Path, long_outputs: int) -> str:
    rows = [f"{2 * i},500,{1500 if i < long_outputs else 100}" for i in range(300)]
    path.write_text("\n".join(["timestamp_s,input,output", *rows]) + "\n")
    return str(path)


@pytest.fixture(autouse=True)
def not_relaxed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "relax", lambda *_: {})


def compared(workload: str, bound_s: float) -> Compared:
    return compare(plan_request(**ASKED, workload=workload, latency_bound_s=bound_s), CURRENT)


def test_outputs_that_no_setting_makes_fast_enough_are_counted(tmp_path: Path) -> None:
    share, others = compared(log(tmp_path / "log.csv", 2), 9).answer
    assert (
        "your log, replayed at its own times (300 requests in 9.97 min): with the current deployment, 99.33% of the "
        "requests keep 9 s from arrival to the last token (p99 from arrival to the last token: "
    ) in share and share.endswith(", as required")
    found = re.fullmatch(
        r"of the 2 late requests, 2 have outputs of more than ([\d,]+) tokens, .* takes ([\d.]+) ms .*", others
    )
    assert found is not None
    most, each_ms = int(found[1].replace(",", "")), float(found[2])
    assert most * each_ms / 1e3 == pytest.approx(9, rel=0.02)


def test_settings_that_keep_the_bound_for_all_are_not_to_blame(tmp_path: Path) -> None:
    assert compared(log(tmp_path / "log.csv", 0), 9).answer[1].endswith("so the log gives no reason for other settings")


def test_the_printed_command_keeps_the_users_own_options(tmp_path: Path) -> None:
    kept = {"max-model-len": "16384", "served-model-name": "chat", "port": "9000"}
    assert compared(log(tmp_path / "log.csv", 0), 9).kept == kept


def test_a_deployment_is_scored_with_its_own_engine_beside_plans_for_another(tmp_path: Path) -> None:
    asked = ASKED | {"workload": "orca", "latency_bound_s": 9}
    usual, other = (compare(plan_request(**asked, **engine), CURRENT) for engine in ({}, {"engine": "sglang"}))
    assert usual.current == other.current and other.best.engine.framework == "sglang"
    names = other.current.engine.name, other.best.engine.name
    assert "the current deployment is scored with {}, the plans with {}".format(*names) in other.notes
    assert usual.kept and not other.kept


def test_the_answer_is_printed_and_written_even_if_looser_bounds_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise IndexError("index 76 is out of bounds")

    monkeypatch.setattr(comparing, "relax", fails)
    words = [
        "compare",
        "--cluster",
        "h100x1",
        "--objective",
        "saturated",
        "--workload",
        log(tmp_path / "log.csv", 0),
        "--latency-bound",
        "9",
    ]
    with pytest.raises(SystemExit) as end:
        main([*words, "--current", CURRENT, "-o", str(tmp_path / "current.json")])
    out = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and Plan.model_validate_json((tmp_path / "current.json").read_text())
    assert "gains from a looser bound could not be computed: IndexError: index 76" in out
    assert re.search(r"run in vLLM itself: vllm serve meta-llama/Llama-3.1-8B-Instruct .*--max-model-len 16384", out)


def test_a_current_deployment_without_a_model_or_on_too_few_devices_is_named() -> None:
    asked = {"workload": "orca", "latency_bound_s": 9, "objective": "saturated", "policy": "chunked"}
    with pytest.raises(InputError, match="names no model"):
        compare(plan_request(**asked, cluster="h100x8"), "vllm serve --tensor-parallel-size 8")
    with pytest.raises(InfeasibleError, match="the current deployment uses 1 of the 8 devices"):
        compare(plan_request(**asked, cluster="h100x8"), "vllm serve meta-llama/Llama-3.1-70B-Instruct")
    with pytest.raises(InfeasibleError, match="tp=16 needs 16 devices, but the plan is for 8 devices of h100x8"):
        plan(**asked, model="llama-3.1-8b", cluster="h100x8", fix={"tp": 16})
