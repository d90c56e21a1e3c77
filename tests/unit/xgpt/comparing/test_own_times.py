"""What `xgpt compare` says about a deployment at a log's own times, and prints before it tries looser bounds."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from xgpt import plan
from xgpt.cli import main
from xgpt.comparing.compare import Compared, compare
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.schema import Plan
from xgpt.deciding import words
from xgpt.requests import plan_request

pytestmark = pytest.mark.usefixtures("short_simulations")

CURRENT = "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 16384 --served-model-name chat --port 9000"
ASKED = {"cluster": "h100x1", "objective": "saturated", "policy": "chunked"}


def log(path: Path, long_outputs: int) -> str:
    rows = [f"{2 * i},500,{1500 if i < long_outputs else 100}" for i in range(300)]
    path.write_text("\n".join(["timestamp_s,input,output", *rows]) + "\n")
    return str(path)


def compared(workload: str, bound_s: float) -> Compared:
    return compare(plan_request(**ASKED, workload=workload, latency_bound_s=bound_s), CURRENT)


def test_outputs_that_no_setting_makes_fast_enough_are_counted(tmp_path: Path) -> None:
    found = compared(log(tmp_path / "log.csv", 2), 9)
    load = found.recommendation.now.at_load
    assert load.share_kept == pytest.approx(298 / 300)
    (others,) = found.answer
    says = r"of the 2 late requests, 2 have outputs of more than ([\d,]+) tokens, .* takes ([\d.]+) ms .*"
    found = re.fullmatch(says, others)
    assert found is not None
    most, each_ms = int(found[1].replace(",", "")), float(found[2])
    assert most * each_ms / 1e3 == pytest.approx(9, rel=0.02)


def test_requests_that_are_late_alone_do_not_wait(tmp_path: Path) -> None:
    """Of 25,514 late requests 372 had too long outputs for any schedule, and "25,142 wait or share steps". About 4,500
    of these were late without any other request, since the deployment used fewer devices for each.
    """
    asked = ASKED | {"cluster": "h100x8", "workload": log(tmp_path / "log.csv", 2), "latency_bound_s": 9, "devices": 8}
    (others,) = compare(plan_request(**asked), CURRENT).answer
    says = "of the 2 late requests, 2 are late even if they run alone, since this deployment's steps take too long; "
    assert re.fullmatch(re.escape(says) + r"under the best plan \d of these are late, and \d+ that now are not", others)


def test_settings_that_keep_the_bound_for_all_are_not_to_blame(tmp_path: Path) -> None:
    found = compared(log(tmp_path / "log.csv", 0), 9)
    told = found.recommendation
    assert not found.answer and told.action == "keep"
    assert not told.would_change, "twice this load is held, too"
    said = words.told(told, explained=False)
    assert said[-2:] == ["  xgpt check http://127.0.0.1:9000 --plan current.json", "More: --explain."]
    text = " ".join(" ".join(said).split())
    assert "-o current.json writes the file" in text
    assert "The best other plan, chunked with token_budget " in text and text.count("of 300 requests") == 1


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


@pytest.mark.long
def test_the_busy_noon_of_a_log_that_begins_at_midnight_decides(tmp_path: Path) -> None:
    """A verdict on the first part of this log would be that no request is late."""
    night, noon = range(0, 40_000, 10), np.linspace(40_000, 40_120, 4_320).tolist()
    rows = [f"{second},2000,200" for second in (*night, *noon)]
    path = tmp_path / "day.csv"
    path.write_text("\n".join(["timestamp_s,input,output", *rows]) + "\n")
    request = plan_request(cluster="h100x8", policy="chunked", workload=str(path), latency_bound_s=10)
    told = compare(request, CURRENT).recommendation
    assert told.now is not None and told.now.at_load is not None and told.action == "change"
    assert told.now.at_load.worst_share_kept < 0.5 and told.now.at_load.share_kept < 0.99
    assert told.best.at_load is not None and told.best.at_load.share_kept > 0.99
    assert told.why == "what runs now does not hold your load, this plan does"
    assert not told.now.at_load.holds and told.best.at_load.holds
    assert told.runner_up is not None and told.runner_up.name != told.best.name, "another shape"
    said = words.told(told, explained=False)
    assert len(said) <= 15 and max(map(len, said)) <= 80
    assert re.match(
        r"Yours keeps the bounds for \d.*, \S+% in the worst window \(\+.*: it does not hold your load",
        " ".join(" ".join(said).split()),
    )
    text = " ".join(words.told(told, explained=True))
    assert re.search(r"Devices\b.*: .*\b8\b", text) and re.search(r"optimal on \d devices", text)


def test_the_answer_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "--cluster", "h100x1", "--objective", "saturated", "--latency-bound", "9"]
    words += ["--workload", log(tmp_path / "log.csv", 0), "--current", CURRENT, "-o", str(tmp_path / "current.json")]
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0 and Plan.model_validate_json((tmp_path / "current.json").read_text())
    shown = capsys.readouterr().out
    assert "Keep what runs now" in shown and f"--plan {tmp_path / 'current.json'}" in " ".join(shown.split())


def test_what_is_said_of_what_runs_now_is_not_said_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """A default of the command and the K/V memory of what runs stood among the lines on the proposed plan."""
    asked = ["compare", "--cluster", "h100x1", "--objective", "saturated", "--latency-bound", "9"]
    with pytest.raises(SystemExit) as end:
        main([*asked, "--workload", "orca", "--explain", "--current", f"{CURRENT} --gpu-memory-utilization 0.8"])
    assert end.value.code == 0
    of_plan, runs, of_now = capsys.readouterr().out.partition("what runs now:\n")
    logged = re.compile(r'K/V memory: vllm-[\d.]+ should log "GPU KV cache size: ([\d,]+) tokens" when it starts')
    (plans,), (now,) = (map(str, logged.findall(" ".join(part.split()))) for part in (of_plan, of_now))
    assert int(plans.replace(",", "")) > 1.2 * int(now.replace(",", "")), "0.92 against 0.8 of the memory"
    assert runs and "vLLM's default on this device" in of_now and "vLLM's default" not in of_plan


def test_gains_from_looser_bounds_are_of_the_same_kinds_of_plans() -> None:
    """The first row left out pipelines, the second had one: of 24% gain, 14 points were the pipeline's."""

    def of(number: int, rate: float, cluster: str = "h100x8") -> SimpleNamespace:
        return SimpleNamespace(num_devices=number, rate=rate, cluster=cluster)

    best, pipeline = of(8, 11.6), of(8, 13.1)
    others = pipeline, of(8, 10.1), of(16, 20.0), of(4, 30.0, "b200x8")
    planned = SimpleNamespace(plans={"chunked": best}, best=best, others=others)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xgpt.comparing.compare.rate_of", lambda plan: plan.rate)
        assert Compared(planned).highest is pipeline  # type: ignore[arg-type]


def test_a_current_deployment_without_a_model_or_on_too_few_devices_is_named() -> None:
    asked = {"workload": "orca", "latency_bound_s": 9, "objective": "saturated", "policy": "chunked"}
    with pytest.raises(InputError, match="names no model"):
        compare(plan_request(**asked, cluster="h100x8"), "vllm serve --tensor-parallel-size 8")
    with pytest.raises(InfeasibleError, match="the current deployment uses 1 of the 8 devices"):
        compare(plan_request(**asked, cluster="h100x8"), "vllm serve meta-llama/Llama-3.1-70B-Instruct")
    with pytest.raises(InfeasibleError, match="tp=16 needs 16 devices, but the plan is for 8 devices of h100x8"):
        plan(**asked, model="llama-3.1-8b", cluster="h100x8", fix={"tp": 16})
