"""Wrong inputs of every kind of file and option: each error is one line with the field, the value and the way out."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import PROBLEM, Xgpt
from xgpt.core.io import configs_dir

PLAN = shlex.join(("plan", "--latency-bound", "8", *PROBLEM))
ON = "--model llama-3.1-8b --cluster h200x1"


def write(name: str, text: str) -> None:
    Path(name).write_text(text)


def write_config(kind: str, name: str, old: str, new: str) -> None:
    """Write a shipped config as wrong.yaml, with one text replaced."""
    text = (configs_dir() / kind / f"{name}.yaml").read_text()
    assert old in text
    write("wrong.yaml", text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("arguments", "text", "says"),
    [
        ("plan --latency-bound 8 --model wrong.yaml", "", "--model: 'wrong.yaml' is not accepted; it is empty"),
        ("plan --latency-bound 8 --model wrong.yaml", "- 1", "--model is not accepted; it must have the fields"),
        (
            "plan --latency-bound 8 --workload wrong.yaml",
            "name: x",
            "workload.input is missing; give a value, also for `workload.output`",
        ),
        (f"plan --latency-bound 8 {ON} --workload .", "", "--workload: '.' is not accepted; it is a directory"),
        (f"fleet --trace missing.csv --latency-bound 8 {ON}", "", "--trace: 'missing.csv' is not accepted; it cannot"),
        (f"fleet --trace wrong.yaml --latency-bound 8 {ON}", "name: x", "trace.stages is missing; give a value"),
        (f"fleet --trace wrong.yaml --latency-bound 8 {ON} --among h20x1=2", "", "--among: 'h20x1' is not accepted; "),
        (f"{PLAN} --engine wrong.yaml", "name: x\nframework: vllm", "engine.version is missing; give a value"),
        (
            "plan --latency-bound 8 --among h20x1=2 --arrival-rate 1",
            "",
            "--among: 'h20x1' is not accepted; did you mean h200x1 or h20x8 or h200x8? Otherwise",
        ),
        (f"{PLAN} --cluster 8xh100", "", "did you mean h100x8 or "),
        (f"{PLAN} --cluster h100x4", "", "? Otherwise give a path or one of the "),
        (
            "plan --latency-bound 8 --model meta-llama/Llama-3.1-70B-Instrct --cluster h100x8",
            "",
            "did you mean meta-llama/Llama-3.1-70B-Instruct? Otherwise give its config.json as --config",
        ),
        (f"{PLAN} --engine vlm", "", "--engine: 'vlm' is not accepted; did you mean vllm? Otherwise give"),
        ("plan --latency-bound 8 --model ./nowhere", "", "there is no such file or directory; check the path"),
        (f"{PLAN} --fix max_num_seqs=64", "", "did you mean max_batch? Otherwise give one of adjustment_percent"),
        (f"{PLAN} --quantile 0.99%", "", "it is a share: 0.99 for 99%"),
        (f"{PLAN} --workload wrong.xlsx", "", "there is no such file"),
        ("export wrong.yaml --to trtllm", "", "the plan says which engine runs: take shell"),
        ("export wrong.yaml --to docker-compose", "", "did you mean compose?"),
        ("plan --latency-bound 8 --cluster local:9999", "", "--cluster: local:9999 needs a core for each device"),
        (
            "plan --latency-bound 20 --tpot 1 --policy slack --shared-prefix 100 --model llama-3.1-8b --cluster h100x1 "
            "--workload chat-short",
            "",
            "--policy: 'slack' is not accepted; it cannot plan for prompts with common prefixes: use chunked",
        ),
        (
            "plan --latency-bound 20 --shared-prefix 10 --model llama-3.1-8b --cluster h100x1 --workload chat-short",
            "",
            "--shared-prefix: 10 is not accepted; only whole blocks of 16 tokens are cached: give at least 16",
        ),
        (f"{PLAN} --policy slack", "", "it needs --objective arrivals and a bound on the time per token, --tpot"),
        (
            f"{PLAN} --maximise thruput",
            "",
            "--maximise: 'thruput' is not accepted; thruput is not known; the figures are throughput, ",
        ),
        (f"{PLAN} --maximise __import__('os')", "", "is not accepted; give an expression of numbers, figures, "),
        (f"{PLAN} --maximise tokens/cost", "", "--price is missing; --maximise names cost"),
        (f"{PLAN} --maximise tokens --sla request", "", "--maximise: 'tokens' is not accepted; it needs --sla"),
        (f"{PLAN} --burstiness 1e9", "", "--burstiness: 1000000000.0 is not accepted; it must be "),
        ("autoscale missing.json", "", "Missing option '--simulate'"),
        ("bench http://127.0.0.1:1 --calibrate x.json", "", "--calibrate is not accepted; only a plan file"),
        (
            "bench http://127.0.0.1:1 --engine vllm",
            "",
            "--engine: 'vllm' is not accepted; it applies only to a plan file",
        ),
        ("bench missing.json --concurrency 3", "", "--concurrency: 3 is not accepted; it applies only to a URL"),
        ("serve .", "", "it is a model or a directory, not a plan: run `xgpt plan --model . --latency-bound S` first"),
        (
            "serve meta-llama/Llama-3.1-8B-Instruct",
            "",
            "it is a model or a directory, not a plan: run `xgpt plan --model meta-llama/Llama-3.1-8B",
        ),
        ("serve plan.json --tensor-parallel-size 2", "", "`xgpt plan` has --fix tp=N."),
        (f"{PLAN} --tensor-parallel-size 2", "", "Give --fix tp=N."),
    ],
)
def test_options(xgpt: Xgpt, arguments: str, text: str, says: str) -> None:
    write("wrong.yaml", text)
    assert says in xgpt.fails(3 if "9999" in arguments else 2, *shlex.split(arguments))


@pytest.mark.parametrize(
    ("kind", "name", "old", "new", "says"),
    [
        ("model", "opt-125m", "num_layers: 12", "num_layers: -1", "model.num_layers: -1 is not accepted; it must be g"),
        (
            "model",
            "opt-125m",
            "num_layers: 12",
            "num_layers: 1.5",
            "model.num_layers: 1.5 is not accepted; it must be a",
        ),
        ("model", "opt-125m", "num_layers", "num_layer", "model.num_layers is missing; give a value"),
        (
            "cluster",
            "h200x1",
            "num_nodes: 1",
            "num_nodes: one",
            "cluster.num_nodes: 'one' is not accepted; it must be a",
        ),
        ("cluster", "h200x1", "num_nodes: 1", "num_nodes: 1\nhots: 1", "there is no such field: did you mean host?"),
        ("workload", "orca", "input:", "inputs: 1\ninput:", "there is no such field: did you mean input?"),
    ],
)
def test_configs(xgpt: Xgpt, kind: str, name: str, old: str, new: str, says: str) -> None:
    write_config(f"{kind}s", name, old, new)
    assert says in xgpt.fails(2, "plan", "--latency-bound", "8", f"--{kind}", "wrong.yaml")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda plan: plan.update(foo=1),
            "plan.foo: 1 is not accepted; there is no such field; the known ones are admission, ",
        ),
        (lambda plan: plan.pop("model"), "plan.model is missing; give a value"),
        (
            lambda plan: plan.pop("schema_version"),
            "plan.schema_version is missing; this version of xgpt reads files of version 1",
        ),
        (
            lambda plan: plan["policy"].update(kind="rraa"),
            "plan.policy.kind: 'rraa' is not accepted; give one of 'rra'",
        ),
        (lambda plan: plan["policy"].pop("kind"), "plan.policy.kind is missing; give a value"),
        (
            lambda plan: plan["policy"].update(microbatches="x"),
            "plan.policy.microbatches: 'x' is not accepted; it must",
        ),
        (lambda plan: plan["stages"][0].update(foo=1), "plan.stages.0.foo: 1 is not accepted; there is no such field"),
        (
            lambda plan: plan["workload"].update(input=3),
            "plan.workload.input: 3 is not accepted; it must have the fiel",
        ),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "serve"])
def test_plans(xgpt: Xgpt, plan: Path, command: str, change: Callable[[dict[str, Any]], Any], says: str) -> None:
    written = json.loads(plan.read_text())
    change(written)
    write("wrong.json", json.dumps(written))
    assert says in xgpt.fails(2, command, "wrong.json")


def test_a_bound_that_looks_like_milliseconds_is_questioned(xgpt: Xgpt) -> None:
    for option, value, means in (
        ("--ttft", "200", "3.33 min"),
        ("--tpot", "50", "50 s"),
        ("--latency-bound", "9000", "2.5 h"),
    ):
        line = xgpt.fails(2, "plan", option, value, "--model", "missing.yaml")
        assert f"{value} would be {means}; write {value}ms or {value}s" in line and option in line
    for value in ("200ms", "200s", "0.2", "2", "1.5min"):
        assert "missing.yaml" in xgpt.fails(2, "plan", "--ttft", value, "--model", "missing.yaml")
    assert "'200us' is not a number; give seconds above 0, or a unit as in 200ms" in xgpt.fails(
        2, "plan", "--ttft", "200us"
    )


CUSTOM = """name: mi300x8
device: {name: mi300x, type: gpu, memory_bytes: 206.0e+9, flops_per_s: {bfloat16: 1307.0e+12},
  memory_bandwidth_bytes_per_s: 5300.0e+9}
devices_per_node: 8
intra_node: {bandwidth_bytes_per_s: 448.0e+9, latency_s: 5.0e-6}
"""


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            "sglang --policy orca",
            "--policy: 'orca' is not accepted; sglang runs only chunked in order of arrival: give",
        ),
        ("sglang --policy exegpt", "--policy: 'exegpt' is not accepted; sglang runs only chunked"),
        ("sglang --policy slack", "--policy: 'slack' is not accepted; sglang runs only chunked"),
        ("sglang --order in-time", "--order: 'in-time' is not accepted; sglang runs only chunked"),
        ("trtllm --dtype float8", "--dtype: 'float8' is not accepted; trtllm needs a checkpoint in float8"),
        (
            "trtllm --speculative ngram --acceptance 0.7",
            "--speculative: 'ngram' is not accepted; it needs vllm or sglang",
        ),
    ],
)
def test_what_the_named_engine_cannot_run_is_refused(xgpt: Xgpt, asked: str, said: str) -> None:
    """The plan was priced in SGLang, and its command was `xgpt serve`, which starts another engine."""
    line = xgpt.fails(
        2, "plan", *PROBLEM, "--ttft", "3", "--latency-bound", "inf", "--tpot", "1", "--engine", *asked.split()
    )
    assert said in line and "\n" not in line.strip()


def test_a_custom_device_is_told_what_it_lacks(xgpt: Xgpt) -> None:
    """Without a link to the host waa is left out, or refused by name; that an A40's efficiencies count is said."""
    write("mine.yaml", CUSTOM)
    asked = ("--latency-bound", "8", *PROBLEM[:2], *PROBLEM[4:], "--cluster", "mine.yaml", "--objective", "saturated")
    assert "cluster.host is missing; waa sends K/V through host" in xgpt.fails(2, "plan", *asked, "--policy", "waa")
    ran = xgpt("plan", *asked, "--explain")
    assert ran.code == 0, ran.err
    text = " ".join(ran.out.split())
    assert "no plan of waa: the cluster has no `host`" in text and "no plan that keeps" not in text
    one = xgpt("plan", *asked, "--explain", "--policy", "chunked")
    assert one.code == 0 and "no plan of waa" not in one.out
    assert "warning: mi300x states no `efficiency`: step times assume an A40's" in text


def test_a_plan_given_as_a_fleet_is_named(xgpt: Xgpt, plan: Path) -> None:
    line = xgpt.fails(2, "autoscale", str(plan), "--simulate", "day.csv")
    assert line == "xgpt: fleet: 'plan.json' is not accepted; it is a plan; give a file that `xgpt fleet` wrote\n"
    assert "--arrival-rate is not accepted; it cannot be combined with --saturated" in xgpt.fails(
        2, "bench", str(plan), "--saturated", "--arrival-rate", "3"
    )


def test_a_group_wider_than_a_machine_is_not_blamed_on_memory(xgpt: Xgpt) -> None:
    link = "{bandwidth_bytes_per_s: 12.5e+9, latency_s: 10.0e-6}"
    text = f"name: two\ndevice: h100-80gb-hbm3\nnum_nodes: 2\ndevices_per_node: 1\ninter_node: {link}\nhost: {link}\n"
    Path("two.yaml").write_text(text)
    asked = ("--model", "llama-3.1-8b", "--cluster", "two.yaml", "--workload", "orca", "--latency-bound", "20")
    line = xgpt.fails(1, "plan", *asked, "--fix", "tp=2", "--policy", "orca")
    assert "in one machine, which has 1 here; fix pp=2 instead" in line
