"""`xgpt tune` and `xgpt check`: how an engine is driven, what a search measures, and what follows from failures."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from click.testing import CliRunner

from tests.cli.commands import once
from xgpt.calibrating import MeasuredLoad
from xgpt.cli import cli
from xgpt.core.errors import InputError, MachineError
from xgpt.core.schema import ChunkedSettings, Constraint, Histogram, Workload
from xgpt.core.schema.tuning import DrivenLoad, TuneRun
from xgpt.problems import resolve
from xgpt.requests import TuneRequest, parse_arguments, plan_request
from xgpt.tuning import check as checking
from xgpt.tuning import driving, engines, tune
from xgpt.tuning.driving import SequentialTest, drive, highest_rate
from xgpt.tuning.engines import DidNotStart, Template, split
from xgpt.tuning.journal import alone
from xgpt.tuning.problem import EngineProblem, engine_problem, variants_of
from xgpt.tuning.tune import Search, Told

ROOT = Path(__file__).resolve().parents[3]
SMALL = Workload(
    name="small",
    input=Histogram(lengths=(20, 60), probabilities=(0.5, 0.5)),
    output=Histogram(lengths=(4, 12), probabilities=(0.5, 0.5)),
)


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches of tests do not keep those of the machine's users waiting."""
    monkeypatch.setattr("xgpt.tuning.journal.cache_dir", lambda: tmp_path / "cache")


def load_of(rate: float, *, kept: bool, ttft_s: float = 0.1, tpot_s: float = 0.01) -> DrivenLoad:
    means = {"ttft_mean_s": ttft_s, "tpot_mean_s": tpot_s}
    quantiles = {"ttft_quantile_s": 2 * ttft_s, "tpot_quantile_s": 2 * tpot_s, "whole_quantile_s": 1.0}
    answers = {"num_requests": 100, "num_failed": 0, "share_kept": float(kept)}
    return DrivenLoad(rate_per_s=rate, kept=kept, seconds=10.0, **means, **quantiles, **answers)


@pytest.mark.parametrize(("late", "expected"), [(0.001, True), (0.08, False)])
def test_a_few_requests_tell_a_server_that_keeps_the_bounds_from_one_that_does_not(late: float, expected: bool) -> None:
    rng, right, used = np.random.default_rng(0), 0, []
    for _ in range(200):
        test = SequentialTest(0.01)
        while test.verdict is None:
            test.note(is_kept=rng.random() >= late)
        right += test.verdict is expected
        used.append(test.num_kept + test.num_late)
    assert right >= 185 and np.median(used) < 100


@pytest.mark.parametrize("expected", [0.3, 2.0, 7.0, 40.0])
def test_the_highest_rate_is_found_from_a_wrong_expectation(expected: float) -> None:
    found = highest_rate(lambda rate: load_of(rate, kept=rate <= 6.0), expected)
    assert abs(found.rate_per_s / 6.0 - 1) < 0.2 and len(found.loads) <= 7
    assert highest_rate(lambda rate: load_of(rate, kept=False), expected).rate_per_s == 0


@contextmanager
def fake_engine(monkeypatch: pytest.MonkeyPatch, flags: str = "", model: str = "m", **variables: str) -> Iterator[str]:
    """The URL of an engine that batches on a sleeping clock."""
    monkeypatch.setattr(driving, "LEAST_S", 0.3)
    monkeypatch.setattr(engines, "LOOK_S", 0.05)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    start = f"cd {ROOT} && exec {sys.executable} -m tests.fake_engine {{command}} --port {{port}}"
    with Template(start, None).run([model, *flags.split()], time.monotonic() + 30) as url:
        yield url


def test_a_server_is_driven_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_engine(monkeypatch, "--max-num-seqs 4") as url:
        loose = Constraint(ttft_s=2.0, tpot_s=0.1, objective="arrivals")
        kept = drive(url, SMALL, loose, 40.0, vocabulary=100)
        assert kept.kept and kept.num_failed == 0 and 0.003 < kept.tpot_mean_s < 0.05
        broken = drive(url, SMALL, loose.but(ttft_s=0.05), 400.0, vocabulary=100)
        assert not broken.kept and broken.num_requests < 200, "it ends as soon as it is clear"


def test_a_server_that_dies_meanwhile_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        fake_engine(monkeypatch, FAKE_DIES_AFTER="5") as url,
        pytest.raises(MachineError, match="answers no more: ") as error,
    ):
        drive(url, SMALL, Constraint(ttft_s=2.0, objective="arrivals"), 50.0, vocabulary=100)
    assert "\n" not in str(error.value)


class Machine:
    """A host whose engines are not started: their rate follows from the settings in the command."""

    def __init__(
        self, rate: Callable[[int, int], float], fails: Callable[[int, int], str | None] | None = None
    ) -> None:
        self.rate, self.fails = rate, fails or (lambda tokens, seqs: None)
        self.ran: list[tuple[int, int]] = []
        self.open = 0

    @contextmanager
    def run(self, words: Sequence[str], until_s: float) -> Iterator[str]:
        text = " ".join(words)
        tokens, seqs = (
            int(re.search(rf"--max-num-{name} (\d+)", text)[1])  # type: ignore[index]
            for name in ("batched-tokens", "seqs")
        )
        self.ran.append((tokens, seqs))
        if (reason := self.fails(tokens, seqs)) is not None:
            raise DidNotStart(reason)
        self.open += 1
        try:
            yield f"{tokens} {seqs}"
        finally:
            self.open -= 1

    def drive(self, url: str, *args: object, **_: object) -> DrivenLoad:
        tokens, seqs = map(int, url.split())
        rate = args[2]
        assert isinstance(rate, float)
        return load_of(rate, kept=rate <= self.rate(tokens, seqs), ttft_s=0.3, tpot_s=0.02)


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("DESIGN", 16), ("SAMPLES", 512), ("REQUESTS", 60)):
        monkeypatch.setattr(f"xscheduler.tuning.model.{name}", value)


@pytest.fixture
def asked(small_model: None) -> EngineProblem:
    given = {"model": "llama-3.1-8b", "cluster": "h200x1", "workload": "azure-conv", "engine": "vllm-0.32"}
    bounds = {"latency_bound_s": None, "ttft_s": 1.0, "tpot_s": 0.03}
    return EngineProblem(resolve(plan_request(**given, **bounds, policy="chunked")))


def peaked(tokens: int, seqs: int) -> float:
    """The best settings are near 700 tokens and 60 requests, where no model expects it."""
    return float(20 * np.exp(-(np.log(tokens / 700) ** 2) / 4 - np.log(seqs / 60) ** 2 / 3))


def searched(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, asked: EngineProblem, journal: Path | None = None, **more: object
) -> Search:
    monkeypatch.setattr(tune, "drive", machine.drive)
    return Search(asked, machine, journal, **more)  # type: ignore[arg-type]


@pytest.mark.long
def test_a_search_finds_what_no_model_expects_and_says_how_sure_it_is(
    asked: EngineProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(peaked)
    found = searched(monkeypatch, machine, asked).run()
    best = max(found.runs, key=lambda run: run.rate_per_s)
    assert peaked(best.token_budget, best.max_batch) > 0.85 * 20 and len(found.runs) <= 20
    (process,) = found.recommendation.best.processes
    assert f"--max-num-seqs {best.max_batch}" in process.command and machine.open == 0
    assert found.recommendation.action == "run" and found.most_per_s > 0


def test_what_runs_now_is_measured_first_and_kept_if_nothing_is_better(
    asked: EngineProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = searched(monkeypatch, Machine(peaked), asked).tuner.model
    now = model.plan_of(ChunkedSettings(token_budget=700, max_batch=60))
    machine = Machine(lambda tokens, seqs: 20.0 if (tokens, seqs) == (700, 60) else 0.7 * peaked(tokens, seqs))
    monkeypatch.setattr(tune, "MOST_RUNS", 4)
    command = "vllm serve llama --max-model-len 8192 --max-num-batched-tokens 700 --max-num-seqs 60 --swap-space 8"
    running = replace(asked, now=now, kept={"max-model-len": "8192"}, command=command)
    found = searched(monkeypatch, machine, running).run()
    assert machine.ran[0] == (700, 60) and found.runs[0].command == command, "exactly what runs now is measured"
    assert found.recommendation.best.processes[0].command == command
    for run in found.runs[1:]:
        assert run.command.startswith("vllm serve llama --max-model-len 8192 --swap-space 8 "), "only sizes differ"
        assert f"--max-num-seqs {run.max_batch}" in run.command and run.command.count("--max-num-seqs") == 1
    assert found.recommendation.action == "keep" and found.recommendation.best.settings.endswith("max_batch 60")
    assert all("--max-model-len 8192" in run.command for run in found.runs)


@pytest.mark.long
def test_a_search_goes_on_after_it_was_killed(
    asked: EngineProblem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tune, "MOST_RUNS", 4)
    whole = searched(monkeypatch, Machine(peaked), asked).run()
    journal, machine = tmp_path / "tune.jsonl", Machine(peaked)

    def killed(run: TuneRun, standing: object) -> None:
        if len(machine.ran) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        searched(monkeypatch, machine, asked, journal).run(told=Told(end=killed))
    assert machine.open == 0
    journal.write_text(journal.read_text() + '{"token_budget": 5')  # killed while it wrote
    again = Machine(peaked)
    found = searched(monkeypatch, again, asked, journal, resume=True).run()
    settings = [(run.token_budget, run.max_batch) for run in found.runs]
    assert settings == [(run.token_budget, run.max_batch) for run in whole.runs], "as if it had never been killed"
    assert again.ran == settings[2:]
    with pytest.raises(InputError, match="it exists already: give `resume`"):
        searched(monkeypatch, again, asked, journal)
    other = replace(asked, problem=asked.problem.under(asked.problem.constraint.but(tpot_s=0.05)))
    with pytest.raises(InputError, match="it is of another search"):
        searched(monkeypatch, again, other, journal, resume=True)
    (tmp_path / "x").write_text("{}\n")
    with pytest.raises(InputError, match="it is no journal of `xgpt tune`"):
        searched(monkeypatch, again, asked, tmp_path / "x", resume=True)


@pytest.mark.long
def test_flags_that_no_model_knows_are_measured_beside_the_settings(
    asked: EngineProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two values gains 60%. The search finds it although every prediction is the same."""

    class WithKernels(Machine):
        @contextmanager
        def run(self, words: Sequence[str], until_s: float) -> Iterator[str]:
            self.gains = 1.6 if "FLASHINFER" in words else 0.7 if "TRITON_ATTN" in words else 1.0
            with super().run(words, until_s) as url:
                yield url

        def drive(self, url: str, *args: object, **more: object) -> DrivenLoad:
            rate = args[2]
            assert isinstance(rate, float)
            return super().drive(url, *args[:2], rate / self.gains, **more).but(rate_per_s=rate)

    machine = WithKernels(lambda tokens, seqs: 10.0)
    monkeypatch.setattr(tune, "MOST_RUNS", 10)
    variants = variants_of(["attention-backend=FLASHINFER,TRITON_ATTN"])
    found = searched(monkeypatch, machine, replace(asked, variants=variants)).run()
    assert "--attention-backend FLASHINFER" in found.recommendation.best.processes[0].command
    assert {run.further for run in found.runs} >= {(), ("--attention-backend", "FLASHINFER")}
    with pytest.raises(InputError, match="give each flag once"):
        variants_of(["a=1", "--a=2"])
    with pytest.raises(InputError, match="these are 27 combinations: at most 16"):
        variants_of(["a=1,2", "b=1,2", "c=1,2"])


def test_settings_that_do_not_start_cut_the_search_and_do_not_end_it(
    asked: EngineProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(peaked, lambda tokens, seqs: "torch.OutOfMemoryError: out of memory" if seqs > 40 else None)
    found = searched(monkeypatch, machine, asked).run()
    failed = [run for run in found.runs if run.start == "did not start"]
    assert failed and all(run.for_memory for run in failed) and len(failed) < 12
    best = max(found.runs, key=lambda run: run.rate_per_s)
    assert best.max_batch <= 40 and peaked(best.token_budget, best.max_batch) > 0.8 * peaked(700, 40)


def test_engines_that_never_start_are_one_clear_line(asked: EngineProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(peaked, lambda tokens, seqs: "error: unrecognized arguments: --max-num-seqz")
    with pytest.raises(MachineError, match=r"the first 3 engines did not start; the last one: .*--max-num-seqz"):
        searched(monkeypatch, machine, asked).run()


def test_a_time_that_is_too_short_is_refused(asked: EngineProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"budget_s: 5\.0 is not accepted; a start and one load take longer"):
        searched(monkeypatch, Machine(peaked), asked).run(5.0)


def test_two_searches_on_one_machine_would_disturb_each_other() -> None:
    with (
        alone(),
        pytest.raises(MachineError, match=r"another `xgpt tune` measures on this machine \(process \d+\)"),
        alone(),
    ):
        pass


def test_a_template_must_say_where_the_flags_belong() -> None:
    with pytest.raises(InputError, match=r"it must contain \{command\} or \{flags\}"):
        Template("ssh gpu7 start-it", None)
    assert split(["env", "A=1", "vllm", "serve", "m"]) == ({"A": "1"}, ["vllm", "serve", "m"])


@pytest.mark.usefixtures("small_model")
def test_tune_through_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process for each setting, which does not start with more than 700 requests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driving, "LEAST_S", 0.2)
    monkeypatch.setattr(engines, "LOOK_S", 0.05)
    monkeypatch.setattr(driving, "MOST_LOADS", 2)
    monkeypatch.setenv("FAKE_MOST_SEQS", "700")
    start = f"cd {ROOT} && exec {sys.executable} -m tests.fake_engine m --port {{port}} {{flags}}"
    asked = "tune --model llama-3.1-8b --cluster h200x1 --workload translation --ttft 0.4 --tpot 0.05 --quantile 0.9"
    given = [*asked.split(), "--start", start, "--json", "--budget", "60s"]
    monkeypatch.setattr(tune, "MOST_RUNS", 4)
    result = CliRunner().invoke(cli, given)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    Path("tuned.json").write_text(result.stdout, encoding="utf-8")
    page = CliRunner().invoke(cli, ["report", "tuned.json", "-o", "rounds.html"])
    html = Path("rounds.html").read_text(encoding="utf-8")
    assert page.exit_code == 0 and found["recommendation"]["best"]["processes"][0]["command"] in html
    assert html.count("<tr>") == 1 + len(found["runs"]) and "did not start" in html
    assert {run["start"] for run in found["runs"]} == {"started", "did not start"} and Path("tune.jsonl").exists()
    assert found["recommendation"]["best"]["processes"][0]["command"].startswith("vllm serve")


def test_check_says_what_it_sends_and_whether_to_keep_the_settings(
    asked: EngineProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = searched(monkeypatch, Machine(peaked), asked).tuner.model
    now = model.plan_of(ChunkedSettings(token_budget=256, max_batch=8))
    sent: list[checking.LoadToSend] = []

    def refuse(sending: checking.LoadToSend) -> bool:
        sent.append(sending)
        return False

    with fake_engine(monkeypatch) as url:
        monkeypatch.setattr(checking, "served_model", lambda url, key: _named("meta-llama/Llama-3.1-8B"))
        with pytest.raises(MachineError, match="nothing was sent"):
            checking.check(replace(asked, now=now), url, 10.0, may_send=refuse)
    assert "requests at 5 a second" in sent[0].text and sent[0].serving == 0
    loads = [MeasuredLoad("a bench", (1000.0,) * 50, (200.0,) * 50, None, 2.0, 2.0, 0.08, 0.006)]
    found = checking.check(replace(asked, now=now), loads)
    width = found.rate_after.high / found.rate_after.low  # type: ignore[operator]
    assert width < found.rate_before.high / found.rate_before.low, "the range is narrower"  # type: ignore[operator]
    assert found.recommendation.action == "change" and found.recommendation.confidence > 0.9  # type: ignore[operator]


async def _named(name: str) -> str:
    return name


def test_check_refuses_another_model_and_what_is_no_engine(
    asked: EngineProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = searched(monkeypatch, Machine(peaked), asked).tuner.model.plan_of(
        ChunkedSettings(token_budget=256, max_batch=8)
    )
    with (
        fake_engine(monkeypatch) as url,
        pytest.raises(InputError, match=r"serves it, but the plan is for llama-3\.1-8b"),
    ):
        checking.check(replace(asked, now=now), url)
    with pytest.raises(MachineError, match="does not answer like an OpenAI-compatible endpoint"):
        checking.check(replace(asked, now=now), "http://127.0.0.1:9")
    with pytest.raises(InputError, match="give the plan of an engine's own scheduler"):
        checking.check(asked, "http://127.0.0.1:9")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n"])
def test_check_asks_the_server_before_it_plans_and_waits_for_no_silent_one(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server accepts and says nothing, or a byte at a time."""

    def serve() -> None:
        peer, _ = listener.accept()
        with peer, suppress(OSError):
            for byte in answer + b"x" * 10_000 * bool(answer):
                peer.sendall(bytes([byte]))
                time.sleep(0.02)
            while peer.recv(65536):
                pass

    monkeypatch.setattr("xgpt.tuning.problem.engine_problem", lambda *_: pytest.fail("planned before it asked"))
    monkeypatch.setattr(checking, "ANSWER_S", 0.3)
    asked = ["--model", "llama-3.1-8b", "--cluster", "h200x1", "--ttft", "1", "--current", "vllm serve m"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=serve, daemon=True).start()
        started = time.monotonic()
        result = CliRunner().invoke(cli, ["check", f"http://127.0.0.1:{listener.getsockname()[1]}", *asked])
        assert time.monotonic() - started < 3
    refused = CliRunner().invoke(cli, ["check", "http://127.0.0.1:9", *asked])
    for found in (result, refused):
        assert found.exception is not None and "start the server, or correct the URL" in str(found.exception)


def test_the_problem_of_a_command_has_its_model_settings_and_engine() -> None:
    command = "vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 64 --max-num-batched-tokens 1024 --max-model-len 16384"
    request = parse_arguments(
        {"cluster": "h200x1", "workload": "azure-conv", "ttft_s": 1.0, "model": "llama-3.1-8b"}, TuneRequest
    )
    found = engine_problem(request, command)
    (now,) = found.settings_now
    assert (now.token_budget, now.max_batch) == (1024, 64) and found.kept == {"max-model-len": "16384"}
    assert found.problem.engine is not None and found.problem.engine.framework == "vllm"


@pytest.mark.usefixtures("small_model", "short_simulations")
def test_check_of_a_plan_and_a_benchmark_through_the_command_line(tmp_path: Path) -> None:
    """The plan has the bounds. Without a plan or a command, the error says what to give."""
    asked = ["--model", "llama-3.1-8b", "--cluster", "h200x1", "--workload", "azure-conv", "--engine", "vllm"]
    plan, bench = tmp_path / "plan.json", tmp_path / "bench.json"
    made = CliRunner().invoke(cli, ["plan", *asked, "--ttft", "1", "--policy", "chunked", "-o", str(plan)])
    assert made.exit_code == 0, made.output
    figures = {"completed": 50, "request_rate": 2.0, "request_throughput": 2.0, "mean_ttft_ms": 90, "mean_tpot_ms": 9}
    bench.write_text(json.dumps(figures | {"total_input_tokens": 50000, "total_output_tokens": 10000}))
    result = CliRunner().invoke(cli, ["check", str(bench), "--plan", str(plan)])
    assert result.exit_code == 0, result.output
    first = result.output.split()[0]
    assert (
        first in ("keep:", "change")
        and "measured by this client" in result.output
        and "fit: prefill x" in result.output
    )
    refused = CliRunner().invoke(cli, ["check", str(bench)])
    assert "give the plan that the server runs" in str(refused.exception)


SESSIONS = """
name: short-sessions
source: made up
sessions:
  turns: {kind: uniform, min: 2, max: 4}
  shared_prefix: 64
  first_input: {kind: uniform, min: 100, max: 200}
  added_input: {kind: uniform, min: 20, max: 60}
  output: {kind: uniform, min: 20, max: 40}
  pause: {median_s: 0.05}
  max_context: 2000
"""


@pytest.mark.usefixtures("small_model", "short_simulations")
def test_check_sends_sessions_and_compares_their_turns_and_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    law, plan = tmp_path / "law.yaml", tmp_path / "plan.json"
    law.write_text(SESSIONS, encoding="utf-8")
    bounds = ["--ttft", "1", "--tpot", "0.1", "--session-wait", "3", "--quantile", "0.9"]
    asked = ["--model", "llama-3.1-8b", "--cluster", "h100x1", "--workload", str(law), "--engine", "vllm", *bounds]
    made = CliRunner().invoke(cli, ["plan", *asked, "--policy", "chunked", "-o", str(plan)])
    assert made.exit_code == 0, made.output
    promised = json.loads(plan.read_text(encoding="utf-8"))["estimate"]["sessions"]["rate_per_s"]
    monkeypatch.setattr(checking, "LEAST_REQUESTS", 12)
    monkeypatch.setattr(checking, "LOAD_S", 0.5)
    with fake_engine(monkeypatch, model="meta-llama/Llama-3.1-8B") as url:
        given = ["check", url, "--plan", str(plan), "--arrival-rate", "10"]
        checked = once(monkeypatch, "check")
        result = CliRunner().invoke(cli, given)
        found = json.loads(CliRunner().invoke(cli, [*given, "--json"]).stdout)
        checked.clear()
        current = [*given[:2], *asked[:6], *bounds, "--current", "vllm serve meta-llama/Llama-3.1-8B", *given[4:]]
        refused = CliRunner().invoke(cli, ["tune", *asked, "--start", "true {command}"])
        other = CliRunner().invoke(cli, [*current, "--json"])
    assert result.exit_code == 0, result.output
    assert (
        "sends 12 sessions at 5 a second (at least" in result.output and "sessions/s within the bounds" in result.output
    )
    assert "requests/s" not in result.output and "a session's waiting" in result.output
    assert "xgpt tune" not in result.output, "it sends no sessions"
    assert (
        other.exit_code == 0
        and found["recommendation"]["action"] == json.loads(other.stdout)["recommendation"]["action"]
    )
    assert found["rate_before"]["value"] == pytest.approx(promised, rel=0.1) and found["bounds"]["ttft_quantile_s"] == 1
    assert len(found["loads"]) == 2
    for load, predicted in zip(found["loads"], found["predicted"], strict=True):
        assert load["num_sessions"] == 12 and load["share_kept"] > 0.5
        # The fake engine keeps everything in blocks of vLLM's size, as the simulation does with so much memory.
        assert load["reused_share"] == pytest.approx(predicted["reused_share"], abs=0.03)
        assert load["session_wait_quantile_s"] > load["ttft_quantile_s"] > predicted["ttft_quantile_s"] / 3
    assert "send sessions by `xgpt check`" in str(refused.exception)
