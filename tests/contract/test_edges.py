"""The ends of what can be asked: a clear answer, or a clear error."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.agreement import KINDS, random_case
from tests.contract.scenarios import problem
from tests.rings import few
from xgpt.cli import main
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.io import load_json
from xgpt.core.schema import Constant, Profile, Workload
from xgpt.core.traces import read_lengths
from xgpt.core.workload import histogram, sample
from xgpt.resolve import load_workload
from xscheduler.problem import Problem
from xscheduler.schedule import Scheduler
from xscheduler.space import POLICIES
from xsimulator.clock import LaneClock, Span, TwoLaneClock
from xsimulator.events import SimulatedEngine, SimulatedRequest
from xsimulator.lengths import Lengths
from xsimulator.run import joint_lengths


def planned(subject: Problem, kind: str) -> dict[str, float]:
    """Figures of the best plan of a kind, all finite."""
    plan = Scheduler(subject).best([kind])
    figures = {name: value for name, value in plan.estimate.model_dump().items() if isinstance(value, float)}
    assert np.isfinite(list(figures.values())).all()
    assert figures["throughput_rps"] > 0
    assert sum(stage.decode_layers[1] - stage.decode_layers[0] for stage in plan.stages if stage.lane != "encode") == (
        subject.model.num_layers
    )
    return figures


def with_workload(subject: Problem, workload: Workload) -> Problem:
    return Problem(subject.model, None, subject.cluster, workload, subject.profile, subject.constraint)


@pytest.mark.parametrize("kind", POLICIES)
def test_a_trace_of_one_row(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text("input,output\n100,20\n")
    subject = problem("opt-13b", "a40x4", "summarization")
    figures = planned(with_workload(subject, load_workload(str(path), subject.model)), kind)
    assert figures["output_tokens_per_s"] == pytest.approx(20 * figures["throughput_rps"])


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize(("inputs", "outputs"), few([(1, 1), (300, 40), (64, 1)]))
def test_one_value_of_each_length(kind: str, inputs: int, outputs: int) -> None:
    subject = problem("opt-13b", "a40x4", "summarization")
    alike = Workload(name="alike", input=histogram(Constant(value=inputs)), output=histogram(Constant(value=outputs)))
    figures = planned(with_workload(subject, alike), kind)
    if outputs == 1 and kind != "waa":
        assert figures["latency_s"] == pytest.approx(figures["ttft_s"])


@pytest.mark.parametrize("kind", few(sorted(POLICIES), 2))
def test_a_model_of_one_layer_on_more_devices_than_layers(kind: str) -> None:
    """No pipeline has more stages than layers; what is left is tensor parallelism, replicas, idle devices."""
    subject = problem("opt-13b", "a40x4", "summarization")
    thin = subject.model.model_copy(update={"num_layers": 1})
    small = Problem(thin, None, subject.cluster, subject.workload, subject.profile, subject.constraint, max_devices=3)
    planned(small, kind)


@pytest.mark.parametrize("field", ["embedding", "overhead", "hop"])
def test_a_profile_with_nan_is_refused_by_name(field: str, tmp_path: Path) -> None:
    document = json.loads(problem("opt-13b", "a40x4", "summarization").profile.model_dump_json())
    document[field]["seconds"][1] = float("nan")
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=rf"{field}.*finite number"):
        load_json(path, Profile, "profile")


def test_an_empty_trace_and_a_length_of_zero_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    for text in ("input,output\n", "input,output\n0,5\n", "input,output\n5,0\n", "input,output\n5,nan\n"):
        path.write_text(text)
        with pytest.raises(InputError):
            load_workload(str(path))


def test_what_nothing_can_keep_names_the_nearest(tmp_path: Path) -> None:
    subject = problem("opt-13b", "a40x4", "summarization", latency_bound_s=1e-6)
    with pytest.raises(InfeasibleError, match="the nearest bound that can be kept is") as refused:
        Scheduler(subject).best(["rra"])
    reason = re.search(
        r"1% of the outputs have (\d+) tokens .* takes ([\d.]+) s .* and ([\d.]+) ms", str(refused.value)
    )
    assert reason is not None and refused.value.nearest_bound_s is not None
    tokens, first_s, each_ms = map(float, reason.groups())
    whole_s = (first_s + (tokens - 1) * each_ms / 1e3) * (1 + subject.constraint.headroom)
    assert whole_s == pytest.approx(refused.value.nearest_bound_s, rel=0.02)


@pytest.mark.parametrize("kind", few(KINDS, 2))
def test_the_bubble_is_the_time_in_which_simulated_stages_wait(kind: str) -> None:
    rng = np.random.default_rng(11)
    case = random_case(rng, (kind,))
    while case.predicted["peak_requests"] > 60 or case.is_known_to_differ:
        case = random_case(rng, (kind,))
    schedule, spans = case.schedule(), list[Span]()
    clock = case.clock(schedule)
    lanes = [clock] if isinstance(clock, LaneClock) else []
    if isinstance(clock, TwoLaneClock):
        lanes = list(clock._lanes.values())
    devices: dict[tuple[str, int], int] = {}
    for name, lane in zip(("encode", "decode") if len(lanes) == 2 else ("both",), lanes, strict=True):
        lane._on_span = spans.append
        devices |= {(name, i): stage.tp for i, stage in enumerate(lane.cost.stages)}
    lengths, count = Lengths(case.workload), round(10 * case.predicted["peak_requests"]) + 300
    columns = zip(*(column.tolist() for column in sample(case.workload, count, rng)), strict=True)
    requests = [SimulatedRequest(i, n, lengths.max_output, out) for i, (n, out) in enumerate(columns)]
    SimulatedEngine(schedule, clock, requests).run()
    end = max(span.end_ns for span in spans)
    first, last = 0.25 * end, 0.7 * end
    work = sum(
        devices[span.lane, span.stage] * max(min(span.end_ns, last) - max(span.start_ns, first), 0) for span in spans
    )
    waited = 1 - work / (last - first) / sum(devices.values())
    assert case.predicted["bubble"] == pytest.approx(waited, abs=0.05), case.text


def test_what_independent_lengths_cost_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Long answers to long prompts: requests that stay long attend to more than independent lengths say.

    The batch is small enough that all fit. If memory limits the number inside, fewer run at once, and each sooner.
    """
    lengths = np.random.default_rng(0).integers(50, 1000, 300)
    path, plan = tmp_path / "trace.csv", tmp_path / "plan.json"
    path.write_text("input,output\n" + "".join(f"{n},{n // 4}\n" for n in lengths))
    arguments = ["plan", "--latency-bound", "inf", "--model", "opt-13b", "--cluster", "a40x4", "--policy", "orca"]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--fix", "max_batch=64", "--workload", str(path), "-o", str(plan), "--explain"])
    assert end.value.code == 0
    assert "input and output lengths have a correlation of +1.00" in capsys.readouterr().out
    joint = json.loads(plan.read_text())["estimate"]["joint_lengths"]
    assert joint["correlation"] == pytest.approx(1.0, abs=0.01)
    assert -0.2 < joint["throughput"] < -0.005
    assert joint["latency"] > 0.0


def test_a_trace_that_is_all_alike_has_no_pairs_to_tell_of(tmp_path: Path) -> None:
    path = tmp_path / "alike.csv"
    path.write_text("input,output\n" + "100,20\n" * 5)
    subject = problem("opt-13b", "a40x4", "summarization")
    plan = Scheduler(with_workload(subject, load_workload(str(path), subject.model))).best(["rra"])
    assert joint_lengths(plan, subject.profile, read_lengths(path)) is None
