"""xgpt calibrate: a plan's step times fitted to a benchmark of the server that ran it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.commands import PROBLEM, Xgpt
from xgpt.calibrating import predicted, read_loads
from xgpt.core.errors import InputError
from xgpt.core.io import load_json
from xgpt.core.schema import Plan, Profile
from xgpt.core.workload import ArrivalProcess
from xprofiler.store import profile_of
from xsimulator.benchmarked import simulate_benchmark
from xsimulator.fitted import Fit

PACE, STEP_S, PATH_S = 1.3, 2e-3, 0.03
INPUT, OUTPUT = 400, 60


def vllm(clients: int, rps: float, ttft_s: float, tpot_s: float) -> dict[str, Any]:
    figures = {"request_throughput": rps, "mean_ttft_ms": 1e3 * ttft_s, "mean_tpot_ms": 1e3 * tpot_s}
    lengths = {"completed": 200, "total_input_tokens": 200 * INPUT, "total_output_tokens": 200 * OUTPUT}
    return {"request_rate": "inf", "max_concurrency": clients, **lengths, **figures}


def aiperf(clients: int, rps: float, ttft_s: float, tpot_s: float) -> dict[str, Any]:
    return {
        "request_throughput": {"unit": "requests/sec", "avg": rps},
        "time_to_first_token": {"unit": "ms", "avg": 1e3 * ttft_s},
        "inter_token_latency": {"unit": "ms", "avg": 1e3 * tpot_s},
        "input_sequence_length": {"unit": "tokens", "avg": INPUT},
        "output_sequence_length": {"unit": "tokens", "avg": OUTPUT},
        "request_count": {"unit": "requests", "avg": 200.0},
        "input_config": {"loadgen": {"concurrency": clients}},
    }


def genai_perf(clients: int, rps: float, ttft_s: float, tpot_s: float) -> dict[str, Any]:
    same = aiperf(clients, rps, ttft_s, tpot_s)
    return same | {"input_config": {"perf_analyzer": {"stimulus": {"concurrency": clients}}}}


def guidellm(clients: int, rps: float, ttft_s: float, tpot_s: float) -> dict[str, Any]:
    names = ("requests_per_second", "time_to_first_token_ms", "inter_token_latency_ms")
    figures = dict(zip(names, (rps, 1e3 * ttft_s, 1e3 * tpot_s), strict=True))
    figures |= {"prompt_token_count": INPUT, "output_token_count": OUTPUT}
    metrics = {name: {"successful": {"mean": value}} for name, value in figures.items()}
    counts = {"request_totals": {"successful": 200, "incomplete": 8, "errored": 0, "total": 208}}
    strategy = {"type_": "concurrent", "streams": clients}
    return {"benchmarks": [{"config": {"strategy": strategy}, "metrics": metrics | counts}]}


TOOLS = (vllm, aiperf, genai_perf, guidellm)


@pytest.fixture
def truth(xgpt: Xgpt, tmp_path: Path) -> Callable[[int], tuple[float, float, float]]:
    """What a server does that is slower than its plan in all of the ways that are fitted."""
    asked = ("--latency-bound", "4", *PROBLEM, "--engine", "vllm", "--policy", "chunked", "--objective", "saturated")
    assert xgpt("plan", *asked, "-o", "plan.json").code == 0
    plan = load_json(Path("plan.json"), Plan, "plan")
    hidden = Fit(decode=PACE, prefill=PACE, step_s=STEP_S, path_s=PATH_S)
    slow = hidden.of_profile(profile_of(plan, None))

    def measured(clients: int) -> tuple[float, float, float]:
        load = read_loads(written(tmp_path / "lengths.json", vllm(clients, 1.0, 1.0, 1.0)))[0]
        assert load.benchmark is not None
        run = simulate_benchmark(hidden.of_plan(plan), slow, load.benchmark)
        assert run.times is not None
        return run.measured.throughput_rps, float(np.mean(run.times.ttft_s)), float(np.mean(run.times.tpot_s))

    return measured


def written(path: Path, document: dict[str, Any]) -> Path:
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("tool", TOOLS)
def test_results_of_four_tools_say_the_same(tool: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    [load] = read_loads(written(tmp_path / "result.json", tool(8, 2.5, 0.2, 0.03)))
    assert (load.clients, load.rate_per_s, load.inputs, load.outputs) == (8, None, (INPUT,), (OUTPUT,))
    assert load.figures == pytest.approx((2.5, 0.2, 0.03))
    assert load.benchmark is not None and len(load.benchmark.requests.input) == 200


@pytest.mark.parametrize(
    ("changes", "clients", "arrivals"),
    [
        ({"request_rate": 1.0}, None, ArrivalProcess.at(1.0)),
        ({"request_rate": 1.0, "burstiness": 0.25}, None, ArrivalProcess.at(1.0, 2.0)),
        ({"request_rate": 1.0, "burstiness": float("inf")}, None, ArrivalProcess.at(1.0, 1e-3)),
        ({"request_rate": 4.0, "max_concurrency": 2}, 2, None),
    ],
)
def test_arrivals_are_simulated_as_vllm_sent_them(
    changes: dict[str, Any], clients: int | None, arrivals: ArrivalProcess | None, tmp_path: Path
) -> None:
    """Each request takes 1.97 s, so that 1.97 are outstanding: two clients leave no request waiting for a third."""
    [load] = read_loads(written(tmp_path / "result.json", vllm(8, 1.0, 0.2, 0.03) | changes))
    assert (load.clients, load.arrivals) == (clients, arrivals)
    assert load.benchmark is not None
    if (times := load.benchmark.requests.timestamp_s) is not None:
        assert times[-1] == pytest.approx(200)  # 200 requests at one a second, as vLLM stretches its gaps


def test_failed_requests_are_not_short_ones(tmp_path: Path) -> None:
    document = vllm(8, 1.0, 0.2, 0.03) | {"input_lens": [400, 500, 300], "output_lens": [60, 0, 40]}
    [load] = read_loads(written(tmp_path / "result.json", document))
    assert (load.inputs, load.outputs) == ((400, 300), (60, 40))


def test_arrivals_at_equal_gaps_are_simulated_so(tmp_path: Path) -> None:
    document = guidellm(8, 1.0, 0.2, 0.03)
    document["benchmarks"][0]["config"]["strategy"] = {"type_": "constant", "rate": 1.0}
    [load] = read_loads(written(tmp_path / "result.json", document))
    assert load.arrivals == ArrivalProcess.at(1.0, 1e-3)
    assert load.benchmark is not None and load.benchmark.requests.timestamp_s is not None
    assert load.benchmark.requests.timestamp_s[-1] == pytest.approx(200)


@pytest.mark.long
def test_a_fit_finds_what_the_server_does_and_proves_it_on_loads_left_out(
    xgpt: Xgpt, tmp_path: Path, truth: Callable[[int], tuple[float, float, float]]
) -> None:
    files = [str(written(tmp_path / f"{clients}.json", vllm(clients, *truth(clients)))) for clients in (1, 16, 80, 40)]
    ran = xgpt("calibrate", "plan.json", *files, "-o", "fitted.json", "--engine-output", "engine.yaml", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["decode"] == pytest.approx(PACE, rel=0.1) and found["prefill"] == pytest.approx(PACE, rel=0.1)
    assert found["path_s"] == pytest.approx(PATH_S, rel=0.2)
    left_out = [load for load in found["loads"] if not load["used"]]
    assert len(left_out) == 2
    for load in left_out:
        assert all(abs(error) < 0.02 for error in load["after"].values()), load
        assert abs(load["before"]["tpot_s"]) > 0.2
    assert load_json(Path("fitted.json"), Profile, "profile").provenance["calibration"].startswith("prefill x1.")
    again = ("--profile", "fitted.json", "--engine", "engine.yaml", "--latency-bound", "8", "-o", "again.json")
    assert xgpt("plan", *PROBLEM, *again, "--policy", "chunked", "--objective", "saturated").code == 0
    assert "the error on other loads is not known" in xgpt("calibrate", "plan.json", files[0]).out


def test_a_file_that_is_no_result_is_refused(xgpt: Xgpt, plan: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "other.json", {"a": 1})
    assert "it is no known result; give that of `vllm bench serve" in xgpt.fails(2, "calibrate", str(plan), str(path))
    lacking = vllm(8, 1.0, 1.0, 1.0)
    del lacking["completed"]
    assert "it lacks completed" in xgpt.fails(2, "calibrate", str(plan), str(written(path, lacking)))


@pytest.mark.long
def test_a_plan_that_names_no_engine_has_its_first_tokens_fitted_too(
    xgpt: Xgpt, tmp_path: Path, truth: Callable[[int], tuple[float, float, float]]
) -> None:
    """A plan from a measured profile names none; between tokens alone, a fit made its first tokens worse."""
    files = [str(written(tmp_path / f"{clients}.json", vllm(clients, *truth(clients)))) for clients in (1, 16, 80)]
    plan = load_json(Path("plan.json"), Plan, "plan")
    assert plan.engine is not None
    bare = plan.model_copy(update={"engine": None})
    Path("bare.json").write_text(bare.model_dump_json())
    ran = xgpt("calibrate", "bare.json", *files, "--engine-output", "engine.yaml", "--json")
    assert ran.code == 0, ran.err
    [held] = [load for load in json.loads(ran.out)["loads"] if not load["used"]]
    assert all(abs(held["after"][name]) < min(0.15, abs(before)) for name, before in held["before"].items()), held


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"completed": 0, "errors": ["", "Connection refused"]}, "completed; the first error: Connection refused"),
        ({"completed": 0}, "none of its requests completed: see the errors of the benchmark"),
        ({"mean_tpot_ms": None}, "it lacks mean_tpot_ms"),
        ({"mean_ttft_ms": 0.0}, "ttft_s: 0.0 is not accepted; it must be above 0"),
    ],
)
def test_a_result_without_measurements_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(vllm(4, 2.0, 0.1, 0.01) | changes))
    with pytest.raises(InputError, match=says):
        read_loads(path)


@pytest.mark.parametrize("missing", ["mean_ttft_ms", "mean_tpot_ms", "total_input_tokens", "completed"])
def test_a_missing_field_of_a_result_is_named(tmp_path: Path, missing: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({name: value for name, value in vllm(4, 2.0, 0.1, 0.01).items() if name != missing}))
    with pytest.raises(InputError, match=f"it lacks {missing}: give the complete result"):
        read_loads(path)


def test_a_result_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no such file; check the path$"):
        read_loads(tmp_path / "nope.json")


def test_a_queue_is_no_time_of_a_request_and_a_good_profile_is_left_alone(
    xgpt: Xgpt, tmp_path: Path, plan: Path
) -> None:
    """An overloaded server keeps requests waiting for ten seconds; another one does exactly what was predicted."""
    overloaded = written(tmp_path / "queue.json", vllm(16, 1.0, 10.0, 0.02))
    found = json.loads(xgpt("calibrate", str(plan), str(overloaded), "--json").out)
    assert found["path_s"] <= 0.5 and any("one client" in text for text in found["unknown"])
    (load,) = read_loads(written(tmp_path / "lengths.json", vllm(4, 1.0, 1.0, 1.0)))
    made = load_json(plan, Plan, "plan")
    as_said = vllm(4, *predicted(made, profile_of(made, None), load))
    found = json.loads(xgpt("calibrate", str(plan), str(written(tmp_path / "good.json", as_said)), "--json").out)
    assert [found[name] for name in Fit._fields] == [1.0, 1.0, 0.0, 0.0]
