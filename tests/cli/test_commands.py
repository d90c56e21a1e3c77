"""Exit codes, one line on standard error, nothing half done: what scripts rely on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.commands import PROBLEM, Xgpt
from tests.fakes import FakeExecutor, fake_app, fake_engine, running
from tests.rings import few
from xgpt.cli import COMMANDS
from xgpt.core.io import config_names, dump_json, load_json
from xgpt.core.schema import Histogram, Plan
from xgpt.resolve import load_cluster, load_model
from xprofiler import analytic
from xrunner.server.observe.watch import Ended, Watch


@pytest.mark.parametrize("kind", ["model", "cluster", "workload"])
def test_an_unknown_name_lists_what_exists(xgpt: Xgpt, kind: str) -> None:
    arguments = dict(zip(PROBLEM[::2], PROBLEM[1::2], strict=True)) | {f"--{kind}": "nothing-like-this"}
    line = xgpt.fails(2, "plan", "--latency-bound", "4", *(word for pair in arguments.items() for word in pair))
    assert "nothing-like-this" in line
    for name in config_names(f"{kind}s"):  # type: ignore[arg-type]
        assert name in line


def test_one_bound_is_enough_and_none_is_refused(xgpt: Xgpt, tmp_path: Path) -> None:
    line = xgpt.fails(2, "plan", *PROBLEM)
    assert "--latency-bound" in line and "--ttft" in line
    path = tmp_path / "plan.json"
    assert xgpt("plan", "--ttft", "2", *PROBLEM, "--policy", "orca", "-o", str(path)).code == 0
    constraint = load_json(path, Plan, "plan").constraint
    assert (constraint.latency_bound_s, constraint.ttft_s) == (None, 2)


def test_an_unknown_policy_lists_what_exists(xgpt: Xgpt) -> None:
    assert "did you mean chunked?" in xgpt.fails(2, "plan", "--latency-bound", "4", "--policy", "chunkd")
    line = xgpt.fails(2, "plan", "--latency-bound", "4", *PROBLEM, "--policy", "best")
    for name in ("'best'", "rra", "chunked", "orca", "static"):
        assert name in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "contains no requests"),
        ("input,output\n", "contains no requests"),
        ("input,output\n10,20\n-5,20\n", "line 3, input: '-5'"),
        ("input,output\n10,many\n", "line 2, output: 'many'"),
        ("input,output\n10\n", "line 2"),
        ("prompt,answer\n10,20\n", "xgpt finds no column with the input length"),
        ("input,output\n100000,200000\n", "exceed the model's context of"),
    ],
)
def test_a_broken_trace_is_refused(xgpt: Xgpt, tmp_path: Path, text: str, said: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(text)
    assert said in xgpt.fails(2, "plan", "--latency-bound", "4", *PROBLEM[:4], "--workload", str(trace))


@pytest.mark.parametrize(
    "options",
    [
        ("serve", "x", "--port", "8_000"),
        ("serve", "x", "--answer-within", "nan"),
        ("serve", "x", "--drain-timeout", "inf"),
        ("bench", "x", "--seed", "-1"),
        ("bench", "x", "--requests", "\u0663"),
        ("plan", "--latency-bound", "1_0"),
    ],
)
def test_numbers_are_written_in_the_usual_notation(xgpt: Xgpt, options: tuple[str, ...]) -> None:
    assert options[-1] in xgpt.fails(2, *options)


@pytest.mark.parametrize("bound", ["0", "-1", "nan", "fast", "", "-inf"])
def test_a_bound_that_is_none_is_refused(xgpt: Xgpt, bound: str) -> None:
    line = xgpt.fails(2, "plan", "--latency-bound", bound, *PROBLEM)
    assert f"'{bound}'" in line
    assert "inf for no bound" in line


@pytest.mark.parametrize("option", [("--quantile", "1"), ("--quantile", "0"), ("--ttft", "0"), ("--tpot", "inf")])
def test_other_numbers_out_of_range_are_refused(xgpt: Xgpt, option: tuple[str, str]) -> None:
    assert option[0] in xgpt.fails(2, "plan", "--latency-bound", "4", *PROBLEM, *option)


@pytest.mark.parametrize("command", few(["plan", "compare"]))
def test_an_impossible_bound_names_the_nearest_which_works(xgpt: Xgpt, command: str) -> None:
    asked = (command, *PROBLEM, *(("--policy", "orca") if command == "plan" else ()), "--latency-bound")
    line = xgpt.fails(1, *asked, "0.01")
    assert "infeasible: --latency-bound" in line
    match = re.search(r"nearest bound found that can be kept is ([\d.]+) s", line)
    assert match is not None
    assert xgpt(*asked, match[1]).code == 0


def test_too_little_memory_is_said(xgpt: Xgpt) -> None:
    line = xgpt.fails(1, "plan", "--latency-bound", "inf", "--model", "gpt3-175b", "--cluster", "h200x1")
    assert "infeasible: memory: gpt3-175b needs" in line


@pytest.mark.parametrize("command", few(["serve", "bench", "simulate"]))
def test_a_broken_plan_is_refused(xgpt: Xgpt, plan: Path, tmp_path: Path, command: str) -> None:
    document = json.loads(plan.read_text())
    for text, said in (
        ("{", "is not JSON"),
        ("[]", "must contain a JSON object"),
        (json.dumps(document | {"schema_version": 99}), "plan.schema_version: 99"),
        (json.dumps(document | {"surprise": 1}), "plan.surprise"),
        (json.dumps(document | {"replicas": 0}), "plan.replicas: 0"),
    ):
        broken = tmp_path / "broken.json"
        broken.write_text(text)
        assert said in xgpt.fails(2, command, str(broken))
    assert "there is no such file" in xgpt.fails(2, command, "missing.json")


@pytest.mark.parametrize(
    "arguments", few([("serve", "plan.json"), ("serve", "plan.json", "--dry-run"), ("bench", "plan.json")], whole=True)
)
def test_a_plan_for_another_machine_is_refused(
    xgpt: Xgpt, plan: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    line = xgpt.fails(3, *arguments)
    assert "h200" in line and "this machine has" in line
    assert "`xgpt plan --cluster local`" in line


def test_a_plan_that_predicts_nothing_cannot_promise_answers(xgpt: Xgpt, plan: Path, tmp_path: Path) -> None:
    whole = json.loads(plan.read_text())
    whole["estimate"]["encode_batch"] = 0
    (tmp_path / "zero.json").write_text(json.dumps(whole))
    line = xgpt.fails(2, "serve", str(tmp_path / "zero.json"), "--answer-within", "3", "--dry-run")
    assert "--answer-within" in line and "3" in line


def test_an_output_that_cannot_be_written_is_said(xgpt: Xgpt, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = xgpt.fails(3, "plan", "--latency-bound", "4", *PROBLEM, "-o", str(tmp_path / "file" / "plan.json"))
    assert "cannot write" in line


def test_plan_writes_what_it_prints(xgpt: Xgpt) -> None:
    ran = xgpt("plan", "--latency-bound", "4", *PROBLEM, "--policy", "orca", "--json", "-o", "deep/er/p.json")
    assert ran.code == 0
    document = json.loads(ran.out)
    assert document == json.loads(Path("deep/er/p.json").read_text())
    assert document["constraint"]["latency_bound_s"] == 4.0
    assert document["estimate"]["latency_s"] <= 4.0
    assert sorted(Path.cwd().iterdir()) == [Path.cwd() / "deep"]


def test_a_busy_machine_does_not_halve_a_plan_in_silence(xgpt: Xgpt) -> None:
    spec, _ = load_model(PROBLEM[1])
    profile = analytic.profile(spec, load_cluster(PROBLEM[3]), spec.default_dtype)
    Path("wild.json").write_text(dump_json(profile.model_copy(update={"spread": 1.3})))
    asked = ("plan", "--latency-bound", "0.9", *PROBLEM, "--policy", "chunked", "--profile", "wild.json")
    ran = xgpt(*asked)
    assert re.search(
        r"busy machine.* 130% longer.* headroom is 20%.*with 12% headroom this plan would sustain about [1-9]\d*% more",
        " ".join(ran.out.split()),
    )
    document = json.loads(Path("plan.json").read_text())
    assert document["constraint"]["headroom"] == 0.2
    assert "busy machine" in document["estimate"]["warnings"][0]
    wild = {"spread": 1.3, "others": {"cc1plus": 1.2, "make": 0.1}, "is_brief": True}
    Path("wild.json").write_text(dump_json(profile.model_copy(update=wild)))
    refused = xgpt("plan", "--latency-bound", "0.001", *asked[3:])
    assert refused.code == 1
    assert "warning: the profile was measured on a busy machine" in refused.err
    assert "meanwhile other processes used 1.3 cores (cc1plus 1.2, make 0.1)" in refused.err


def test_a_point_counts_once_however_often_it_was_predicted(xgpt: Xgpt) -> None:
    ran = xgpt(
        "plan", "--latency-bound", "15", "--json", *PROBLEM[:4], "--workload", "azure-code", "--policy", "static"
    )
    search = json.loads(ran.out)["search"]
    assert 0 < search["evaluations"] <= search["space_size"]


@pytest.mark.long
def test_the_order_of_admission_is_the_plans(xgpt: Xgpt) -> None:
    asked = ("plan", "--latency-bound", "4", *PROBLEM, "--policy", "orca", "--objective", "saturated", "--json")
    first = json.loads(xgpt(*asked).out)
    das = json.loads(xgpt(*asked, "--order", "das", "-o", "das.json").out)
    mean_input = Histogram.model_validate(das["workload"]["input"]).mean
    row_tokens = round(das["estimate"]["decode_batch"] * mean_input)
    assert das["admission"] == first["admission"] | {"order": "das", "row_tokens": row_tokens}
    ran = xgpt("simulate", "das.json", "--requests", "200", "--json")
    assert ran.code == 0, ran
    Path("das.json").write_text(json.dumps(das | {"admission": das["admission"] | {"order": "edf"}}))
    assert "only 'das' uses it" in xgpt.fails(2, "simulate", "das.json")


@pytest.mark.long
def test_optuna_plans_for_an_objective_without_monotone_bounds(xgpt: Xgpt) -> None:
    """Throughput over latency neither rises nor falls with the batch."""
    asked = (
        "plan",
        "--latency-bound",
        "8",
        *PROBLEM,
        "--policy",
        "orca",
        "--explain",
        "--maximise",
        "throughput / latency",
    )
    shown = " ".join(xgpt(*asked).out.split())
    maximised = json.loads(Path("plan.json").read_text())
    assert (maximised["search"]["method"], maximised["search"]["gap"]) == ("optuna", None)
    assert "no proof of optimality (sampled points prove no bound)" in shown


def test_replanning_judges_what_the_server_runs(xgpt: Xgpt, plan: Path) -> None:
    assert xgpt("plan", "--latency-bound", "8", *PROBLEM, "--policy", "orca", "-o", "later.json").code == 0
    running_plan = load_json(Path("later.json"), Plan, "plan")
    watch = Watch(running_plan)
    for _ in range(200):
        seen = watch.arrive(128, 128)
        seen.generated = 100
        watch.end(seen, Ended(seen.generated, 0.1, 0.05, 0.1, None))
    with running(fake_app(fake_engine(FakeExecutor()), watch)) as url:
        ran = xgpt("replan", "plan.json", "--lengths", url, "-o", "now.json", "--explain")
        same = xgpt("replan", "later.json", "--lengths", url, "--json")
    assert ran.code == same.code == 0, (ran, same)
    assert ran.out.count("judged: the plan that the server runs now, which differs from plan.json (") == 1
    judged = json.loads(same.out)
    assert judged["running"]["policy"] == running_plan.policy.model_dump(mode="json")
    assert judged["action"] in ran.out
    assert judged["action"] != "keep" or load_json(Path("now.json"), Plan, "plan") == running_plan
    Path("today.csv").write_text("input,output\n" + "128,128\n" * 200)
    freed = xgpt("replan", "later.json", "--lengths", "today.csv", "--replan-policies", "all", "--explain")
    assert freed.code == 0 and "judged" not in freed.out


def test_simulate_is_repeatable(xgpt: Xgpt, plan: Path) -> None:
    first, second, third = (
        xgpt("simulate", str(plan), "--requests", "200", "--seed", seed, "--json").out for seed in ("1", "1", "2")
    )
    assert first == second
    assert first != third


def test_what_runs_now_is_scored(xgpt: Xgpt) -> None:
    asked = ("compare", "--latency-bound", "4", *PROBLEM, "--objective", "saturated")
    command = (*asked, "--price", "3.6", "--json", "--current")
    document = json.loads(xgpt(*command, "vllm serve m --max-num-seqs 16 --max-num-batched-tokens 256").out)
    now, best = document["current"], max(p["estimate"]["throughput_rps"] for p in document["plans"].values())
    assert (now["policy"]["max_batch"], now["policy"]["token_budget"]) == (16, 256)
    assert now["search"]["method"] == "given"
    assert now["estimate"]["throughput_rps"] < best
    tokens_per_hour = 3600 * now["estimate"]["output_tokens_per_s"]
    assert now["estimate"]["cost_per_million_tokens"] == pytest.approx(3.6e6 / tokens_per_hour)
    relaxed = [p["estimate"]["throughput_rps"] for p in document["relaxed"]]
    assert relaxed == sorted(relaxed)
    assert relaxed[0] >= best * 0.998
    assert "vllm serve" in xgpt.fails(2, *command, "python serve.py")
    assert "16 devices" in xgpt.fails(2, *command, "vllm serve m -tp 4 -pp 4")


def test_devices_and_arrival_rates(xgpt: Xgpt) -> None:
    plan = ("plan", "--latency-bound", "4", *PROBLEM)
    assert "--arrival-rate" in xgpt.fails(2, *plan, "--devices", "auto")
    assert "h200x1 has 1" in xgpt.fails(2, *plan, "--devices", "9")
    ran = xgpt(*plan, "--arrival-rate", "1e6", "--policy", "orca")
    assert ran.code == 1 and "infeasible: --arrival-rate" in ran.err and not Path("plan.json").exists()
    assert "No schedule found on your 1 device holds your load;" in ran.out
    ran = xgpt(*plan, "--arrival-rate", "5", "--devices", "auto", "--policy", "orca", "--json")
    document = json.loads(ran.out)
    assert document["constraint"]["arrival_rate_per_s"] == 5
    assert document["constraint"]["objective"] == "arrivals"
    assert document["estimate"]["capacity"]["rate_per_s"] >= 5


@pytest.mark.long
def test_the_cheapest_of_several_clusters(xgpt: Xgpt) -> None:
    plan = ("plan", "--latency-bound", "8", "--model", "opt-13b", "--policy", "orca")
    rate = ("--arrival-rate", "5")
    ran = xgpt(*plan, *rate, "--among", "a40x4=1,h200x1=4.5", "--explain")
    assert "4.5" in ran.out and "1 of 4" in ran.out and "chosen: orca" in ran.out
    assert "--arrival-rate" in xgpt.fails(2, *plan, "--among", "a40x4=1")
    assert "prices above 0" in xgpt.fails(2, *plan, *rate, "--among", "a40x4")
    assert "leave --devices out" in xgpt.fails(2, *plan, *rate, "--among", "a40x4=1", "--devices", "2")
    assert "leave --cluster out" in xgpt.fails(2, *plan, *rate, "--among", "a40x4=1", "--cluster", "a40x4")
    assert "a40x4" in xgpt.fails(1, *plan, "--arrival-rate", "1e6", "--among", "a40x4=1,h200x1=4.5")


def test_what_is_not_a_command_is_refused(xgpt: Xgpt) -> None:
    assert "No such command 'plam'" in xgpt.fails(2, "plam")
    assert "--latency-bound" in xgpt.fails(2, "plan")
    assert "--fast" in xgpt.fails(2, "plan", "--latency-bound", "4", "--fast")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(xgpt: Xgpt, command: str) -> None:
    ran = xgpt(command, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert "Example" in ran.out
    assert f"xgpt {command}" in ran.out


def test_an_internal_error_is_one_line(xgpt: Xgpt, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("xgpt.solving.resolve", broken)
    line = xgpt.fails(4, "plan", "--latency-bound", "4")
    assert line == "xgpt: internal error: RuntimeError: two lines (XGPT_TRACEBACK=1 shows where)\n"


def test_an_interrupt_is_one_line(xgpt: Xgpt, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("xgpt.solving.resolve", interrupted)
    ran = xgpt("plan", "--latency-bound", "4")
    # click ends the terminal's "^C" line first.
    assert (ran.code, ran.out, ran.err) == (130, "", "\nxgpt: interrupted\n")


@pytest.mark.usefixtures("full_simulations")
def test_both_figures_stand_in_the_plan_and_what_was_maximised_is_said(xgpt: Xgpt) -> None:
    plan = ("plan", "--latency-bound", "3", *PROBLEM, "--policy", "orca", "--explain")
    served = xgpt(*plan, "-o", "arrivals.json").out
    paper = xgpt(*plan, "--objective", "saturated", "-o", "saturated.json").out
    assert "maximised: the arrival rate (Poisson) within the bounds, waiting included" in served
    assert "maximised: throughput while requests are always waiting" in paper
    plans = [load_json(Path(f"{name}.json"), Plan, "plan") for name in ("arrivals", "saturated")]
    assert [each.constraint.objective for each in plans] == ["arrivals", "saturated"]
    for text, each in zip((served, paper), plans, strict=True):
        found = each.estimate.capacity
        assert found is not None and found.rate_under_tighter_per_s is not None
        flat = " ".join(text.split())
        assert f"arrivals: up to {found.rate_per_s:.4g} requests/s" in flat
        assert "of all requests keep 3 s from arrival to the last token, waiting included" in flat
        assert ("standard deviation of the rate" in flat) == (text == served)
        assert "with 5% tighter bounds" in flat and "limit the rate" not in flat
        assert f"saturated: {each.estimate.throughput_rps:.4g} requests/s" in flat
        assert "even if all times are 12% longer than predicted" in flat
    assert plans[0].estimate.capacity.rate_per_s >= 0.99 * plans[1].estimate.capacity.rate_per_s  # type: ignore[union-attr]
    loose = " ".join(xgpt("plan", "--latency-bound", "60", *PROBLEM, "--policy", "orca", "--explain").out.split())
    assert "with 5% looser bounds: memory and step times limit the rate, not the bounds" in loose
    none = " ".join(xgpt("plan", "--latency-bound", "inf", *PROBLEM, "--policy", "orca", "--explain").out.split())
    assert "without a bound, any lower arrival rate is sustained" in none


def test_options_of_one_objective_are_refused_beside_the_other(xgpt: Xgpt) -> None:
    plan = ("plan", "--latency-bound", "4", *PROBLEM, "--policy", "orca")
    assert "--objective saturated" in xgpt.fails(2, *plan, "--objective", "arrivals", "--sla", "request")
    assert "--objective saturated" in xgpt.fails(2, *plan, "--objective", "arrivals", "--search", "exhaustive")
    assert "--objective arrivals" in xgpt.fails(2, *plan, "--objective", "saturated", "--arrival-rate", "1")
    assert "with --arrival-rate" in xgpt.fails(2, *plan, "--sla", "request", "--arrival-rate", "1")
    asked = json.loads(xgpt(*plan, "--sla", "length", "--json").out)
    assert asked["constraint"]["objective"] == "saturated"


@pytest.mark.long
def test_a_plan_that_names_no_objective_was_made_for_saturation(xgpt: Xgpt, plan: Path) -> None:
    document = json.loads(plan.read_text())
    del document["constraint"]["objective"], document["estimate"]["capacity"]
    plan.write_text(json.dumps(document))
    older = load_json(plan, Plan, "plan")
    assert older.constraint.objective == "saturated"
    assert older.estimate.capacity is None
    assert xgpt("report", str(plan), "-o", "older.html").code == 0
    assert "requests/s within the bounds, at most" in Path("older.html").read_text()


def test_headroom_is_what_is_asked_for(xgpt: Xgpt) -> None:
    plan = ("plan", "--latency-bound", "4", *PROBLEM, "--policy", "orca", "--json")
    documents = [json.loads(xgpt(*plan, *words).out) for words in ((), ("--headroom", "0"), ("--headroom", "0.3"))]
    assert [document["constraint"]["headroom"] for document in documents] == [0.12, 0.0, 0.3]
    rates = [document["estimate"]["capacity"]["rate_per_s"] for document in documents]
    assert rates[2] < rates[0] < rates[1]


def test_simulated_arrivals_say_which_share_kept_the_bound(xgpt: Xgpt, plan: Path) -> None:
    found = load_json(plan, Plan, "plan").estimate.capacity
    assert found is not None
    at = ("simulate", str(plan), "--requests", "1000", "--json", "--arrival-rate")
    half, above = (json.loads(xgpt(*at, str(factor * found.rate_per_s)).out) for factor in (0.5, 1.5))
    assert half["goodput"] >= 0.99 > above["goodput"]
    assert half["whole_p99_s"] <= 4 < above["whole_p99_s"]


def test_simulated_arrivals_tell_times_from_arrival(xgpt: Xgpt, plan: Path) -> None:
    at = ("simulate", str(plan), "--requests", "100", "--arrival-rate", "4")
    figures = json.loads(xgpt(*at, "--json").out)
    for name in ("ttft", "tpot", "whole"):
        assert figures[f"{name}_p50_s"] <= figures[f"{name}_p90_s"] <= figures[f"{name}_p99_s"]
        assert figures[f"{name}_mean_s"] > 0
    assert not {"ttft_s", "latency_s"} & figures.keys()  # those count from admission
    assert "time to first token, s" in xgpt(*at).out
    stages = json.loads(xgpt("simulate", str(plan), "--arrival-rate", "2:10,8:5,2:10", "--json").out)
    assert stages["ttft_p99_s"] >= 0
    line = xgpt.fails(2, "simulate", str(plan), "--arrival-rate", "2:50", "--requests", "9")
    assert "contain 100" in line
    for wrong in ("2:", "0", "2:5:6", "2,3", "nan"):
        assert "--arrival-rate" in xgpt.fails(2, "simulate", str(plan), "--arrival-rate", wrong)


@pytest.mark.long
def test_a_bound_has_a_quantile_of_its_own(xgpt: Xgpt) -> None:
    asked = ("plan", "--latency-bound", "inf", *PROBLEM, "--policy", "chunked", "--json")
    bounds = ("--ttft", "1", "--tpot", "0.02")
    document, together = (
        json.loads(xgpt(*asked, *bounds, *more).out)
        for more in (("--ttft-quantile", "0.9", "--tpot-quantile", "0.9"), ())
    )
    assert document["constraint"]["ttft_quantile"] == 0.9
    rates = [each["estimate"]["capacity"]["rate_per_s"] for each in (document, together)]
    assert rates[0] >= rates[1] > 0
    assert "--ttft: give --ttft as well" in xgpt.fails(2, *asked, "--ttft-quantile", "0.9")
    line = xgpt.fails(2, *asked, *bounds, "--ttft-quantile", "0.9", "--objective", "saturated")
    assert "--ttft-quantile" in line and "arrivals" in line


FIXED = {
    "chunked": {"token_budget": 1024, "max_batch": 40},
    "orca": {"max_batch": 24},
    "rra": {"encode_batch": 6, "decode_iterations": 12},
    "static": {"batch": 20},
}


@pytest.mark.parametrize("objective", few(["arrivals", "saturated"]))
@pytest.mark.parametrize("kind", few(FIXED, 2))
def test_control_variables_are_held(xgpt: Xgpt, kind: str, objective: str) -> None:
    """Each by itself, and all together: then there is one plan, and it is what `search` says is left of the space."""
    asked = ("plan", "--latency-bound", "30", *PROBLEM, "--policy", kind, "--objective", objective, "--json")
    fixes = [f"--fix={name}={value}" for name, value in FIXED[kind].items()]
    for words in (*[[word] for word in fixes], fixes):
        document = json.loads(xgpt(*asked, *words).out)
        for name, value in (word.removeprefix("--fix=").split("=") for word in words):
            assert document["policy"][name] == int(value)
    assert document["search"]["space_size"] == 1
    if objective == "arrivals":
        assert document["estimate"]["capacity"]["rate_per_s"] > 0


def test_placements_are_held(xgpt: Xgpt) -> None:
    place = ("--model", "opt-13b", "--cluster", "a40x4", "--workload", "summarization", "--objective", "saturated")
    fixes = ("--fix", "tp=2", "--fix", "pp=2", "--policy", "orca")
    document = json.loads(xgpt("plan", "--latency-bound", "60", *place, *fixes, "--json").out)
    assert document["replicas"] == 1
    assert [stage["tp"] for stage in document["stages"]] == [2, 2]
    experts = ("--model", "mixtral-8x7b", "--cluster", "h200x8", "--policy", "orca", "--objective", "saturated")
    for ep in (1, 2):
        fixes = ("--fix", "tp=2", "--fix", f"ep={ep}", "--fix", "replicas=1", "--fix", "max_batch=32")
        document = json.loads(xgpt("plan", "--latency-bound", "60", *experts, *fixes, "--json").out)
        assert {(stage["tp"], stage["ep"]) for stage in document["stages"]} == {(2, ep)}
    fixes = ("--policy", "waa", "--fix", "encode_batch=3", "--fix", "buffer_iterations=2")
    waa = json.loads(xgpt("plan", "--latency-bound", "60", *place, *fixes, "--json").out)["policy"]
    assert (waa["encode_batch"], waa["buffer_iterations"]) == (3, 2)


@pytest.mark.parametrize(
    ("fix", "code", "said"),
    [
        ("max_bach=3", 2, "did you mean max_batch?"),
        ("max_batch=0", 2, "it must be at least 1"),
        ("max_batch", 2, "write NAME=N"),
        ("tp=3", 1, "32 attention heads cannot be divided by 3"),
        ("max_batch=9999", 1, "fits in memory with max_batch=9999"),
        ("microbatches=2", 1, "only a pipeline over several devices has micro-batches"),
    ],
)
def test_what_cannot_be_held_is_said_in_a_line(xgpt: Xgpt, fix: str, code: int, said: str) -> None:
    for objective in ("arrivals", "saturated"):
        asked = ("plan", "--latency-bound", "30", *PROBLEM, "--policy", "orca", "--objective", objective)
        assert said in xgpt.fails(code, *asked, "--fix", fix)
    assert "orca has no such variable" in xgpt.fails(2, *asked, "--fix", "token_budget=64")


@pytest.mark.long
def test_what_runs_now_is_a_plan(xgpt: Xgpt, tmp_path: Path) -> None:
    path = str(tmp_path / "current.json")
    command = "vllm serve llama --max-num-seqs 64 --max-num-batched-tokens 2048"
    asked = ("compare", "--latency-bound", "8", *PROBLEM, "--objective", "saturated")
    ran = xgpt(*asked, "--current", command, "-o", path)
    assert ran.code == 0 and "requests/s" in " ".join(ran.out.split())
    plan = load_json(Path(path), Plan, "plan")
    assert plan.search.method == "given"
    assert (plan.policy.kind, plan.policy.max_batch, plan.policy.token_budget) == ("chunked", 64, 2048)
    rate = plan.estimate.capacity.rate_per_s
    figures = json.loads(xgpt("simulate", path, "--arrival-rate", str(rate), "--requests", "400", "--json").out)
    assert figures["goodput"] > 0.95
    assert xgpt("report", path, "-o", str(tmp_path / "report.html")).code == 0
    assert "needs --current" in xgpt.fails(2, *asked, "-o", path)


def test_no_policy_vanishes_from_the_table_without_a_word(xgpt: Xgpt) -> None:
    ran = xgpt(
        "plan", "--explain", "--latency-bound", "15", "--sla", "request", *PROBLEM[:4], "--workload", "azure-conv"
    )
    assert ran.code == 0
    assert "these policies need several devices: waa" in ran.out
    assert re.search(r"these policies serve less, so their latency was not simulated: .*static", ran.out)
    assert "no proof of optimality (the latencies of all requests are simulated" in " ".join(ran.out.split())


def test_rows_take_a_plan_of_whole_batches(xgpt: Xgpt, plan: Path) -> None:
    line = xgpt.fails(2, "serve", str(plan), "--batching", "rows", "--dry-run")
    assert "--batching" in line and "`policy=static`" in line
    assert "it applies only to a plan file" in xgpt.fails(2, "bench", "http://127.0.0.1:9", "--batching", "slots")


def test_what_is_bounded_has_its_column(xgpt: Xgpt) -> None:
    asked = ("plan", "--explain", "--latency-bound", "8", *PROBLEM, "--policy", "orca", "--objective", "saturated")
    assert "tpot ms" in xgpt(*asked, "--tpot", "0.1").out and "tpot ms" not in xgpt(*asked).out


def test_a_file_that_is_not_there_is_said_to_be_none(xgpt: Xgpt) -> None:
    line = xgpt.fails(2, "plan", "--latency-bound", "4", *PROBLEM[:4], "--workload", "lengths.csv")
    assert "there is no such file" in line and "azure-conv" not in line
    line = xgpt.fails(2, "plan", "--latency-bound", "4", "--model", "./my-model")
    assert "there is no such file" in line and "llama" not in line


@pytest.mark.parametrize(
    ("code", "options"),
    [
        (2, ("--cluster", "local:2", "--devices", "3")),
        (2, ("--fix", "max_bach=8")),
        (2, ("--workload", "./none.csv")),
        (2, ("--speculative", "eagle3")),
        (2, ("--speculative", "mtp", "--acceptance", "0.5")),
        (3, ("-o", ".")),
    ],
)
def test_nothing_is_measured_for_what_is_refused(
    xgpt: Xgpt, monkeypatch: pytest.MonkeyPatch, code: int, options: tuple[str, ...]
) -> None:
    """A profile of this machine takes minutes."""
    monkeypatch.setattr("xprofiler.store.obtain_profile", lambda *given, **more: pytest.fail("it is measured"))
    monkeypatch.setattr("xgpt.problems.obtain_profile", lambda *given, **more: pytest.fail("it is measured"))
    xgpt.fails(code, "plan", "--latency-bound", "4", "--model", "qwen3-0.6b", *options)
