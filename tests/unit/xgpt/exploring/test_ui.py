"""The page on which one plans: its answers, its server, and the page itself in a browser where there is one."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.browser import CHROMIUM, browser
from tests.rings import few
from xgpt.core.errors import InputError
from xgpt.exploring.explore import Explorer
from xgpt.exploring.ui import MOST_BYTES, AnswerProcess

ONE = {"model": "llama-3.1-8b", "cluster": "h200x1", "workload": "orca", "latency_bound_s": 8}
MANY = {"model": "gpt3-175b", "cluster": "a40x32", "workload": "translation", "latency_bound_s": 40}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The page's address, as `xgpt ui` says it. Ctrl-C, which a terminal sends to all processes, ends it in a line."""
    command = [sys.executable, "-m", "xgpt", "ui", "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, process_group=0)
    assert process.stderr is not None
    try:
        yield process.stderr.readline().split()[2]
    finally:
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr.read().split() == ["xgpt:", "interrupted"]
        process.stderr.close()


def at(url: str, path: str = "") -> str:
    """Return an address of the page's server, with its token."""
    address, token = url.split("?")
    return f"{address}{path}{'&' if '?' in path else '?'}{token}"


def ask(url: str, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    headers = {"Content-Type": "application/json"}
    with httpx.stream("POST", at(url, "ask"), content=json.dumps(asked), headers=headers, timeout=60) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            yield json.loads(line)


@pytest.mark.usefixtures("short_simulations")
def test_an_answer_comes_part_by_part_and_settles_on_what_plan_writes() -> None:
    parts = list(Explorer().answers(ONE | {"current": "vllm serve x"}))
    names = [part["part"] for part in parts]
    assert names == ["plans", "trade-off", "timeline", "looser", "plans", *["timeline"] * (len(names) - 6), "current"]
    first, settled = parts[0], parts[4]
    assert not first["settled"] and settled["settled"]
    assert first["rows"][0]["rate_per_s"] == pytest.approx(settled["rows"][0]["rate_per_s"], rel=0.1)
    assert {row["policy"] for row in first["rows"]} == {line["name"] for line in parts[1]["lines"]}
    rates = [row["rate_per_s"] for row in parts[3]["rows"]]
    assert rates == sorted(rates)
    assert " times (" in parts[-1]["gain"] and "requests/s" in parts[-1]["gain"]
    from xgpt import plan

    mine = plan(**ONE, engine="vllm")  # the engine that the current deployment runs in
    assert json.loads(settled["plan"])["policy"] == mine.policy.model_dump(mode="json")


@pytest.mark.long
def test_what_is_drawn_is_what_is_settled_on() -> None:
    """Simulation may choose another policy than closed forms do."""
    asked = {"model": "llama-3.1-70b", "cluster": "h100x8", "workload": "azure-conv", "latency_bound_s": 15}
    parts = list(Explorer().answers(asked))
    (plan,) = (json.loads(part["plan"]) for part in parts if part["part"] == "plans" and part["settled"])
    drawn = [part["rows"] for part in parts if part["part"] == "timeline"]
    assert len(drawn[-1]) == len(plan["stages"])


@pytest.mark.parametrize(("asked", "within_s"), few([(ONE, 0.3), (MANY, 1.5)]))
def test_the_next_bound_is_answered_at_once(asked: dict[str, Any], within_s: float) -> None:
    explorer = Explorer()
    for part in explorer.answers(asked):
        if part["part"] == "trade-off":
            break
    begin_s = time.process_time()
    first = next(explorer.answers(asked | {"latency_bound_s": 1.1 * asked["latency_bound_s"]}))
    assert first["part"] == "plans"
    assert time.process_time() - begin_s < within_s


def test_a_bound_that_nothing_keeps_has_a_trade_off_and_the_nearest() -> None:
    parts = Explorer().answers(ONE | {"latency_bound_s": 0.05, "objective": "saturated"})
    first = next(parts)
    assert first["part"] == "infeasible" and first["nearest_bound_s"] > 0.05
    assert next(parts)["part"] == "trade-off"


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(InputError, match="did you mean"):
        next(Explorer().answers(ONE | {"model": "llama-3.1-8bb"}))


def test_the_server_answers_this_page_alone(url: str) -> None:
    assert "<title>Plan" in httpx.get(url).text
    assert httpx.get(url, headers={"Host": "evil.example"}).status_code == 400
    plain = httpx.post(at(url, "ask"), content=json.dumps(ONE), headers={"Content-Type": "text/plain"})
    assert plain.status_code == 415
    for wrong in ("[]", "{", "[" * 100_000):
        assert (
            httpx.post(at(url, "ask"), content=wrong, headers={"Content-Type": "application/json"}).status_code == 400
        )
    (part, end) = ask(url, {"model": "nothing", "latency_bound_s": 8})
    assert part["part"] == "error" and "give a path or one of" in part["reason"] and end["part"] == "end"
    (part, _) = ask(url, {**ONE, "current": 5})
    assert part["part"] == "error" and "current" in part["reason"]
    (part, _) = ask(url, {"nonsense": 1, "latency_bound_s": 8})
    assert part["part"] == "error" and "nonsense" in part["reason"]


def test_nothing_is_answered_without_the_token(url: str) -> None:
    """Any user of the machine can connect, and answers read its owner's files."""
    address, _, token = url.partition("?token=")
    json_, asked = {"Content-Type": "application/json"}, json.dumps(ONE | {"workload": "/etc/passwd"})
    for wrong in ({}, {"X-Token": "x"}, {"X-Token": token[:-1]}, {"X-Token": "ä".encode("latin-1").decode("latin-1")}):
        headers = {name: value.encode() for name, value in (json_ | wrong).items()}
        for answer in (
            httpx.get(address, headers=headers),
            httpx.get(f"{address}names", headers=headers),
            httpx.post(f"{address}ask", content=asked, headers=headers),
            httpx.post(f"{address}trace?name=x", content="input,output\n1,1\n", headers=headers),
        ):
            assert answer.status_code == 403 and "root:" not in answer.text
    answer = httpx.get(f"{address}names", headers={"X-Token": token})
    assert answer.status_code == 200 and answer.headers["X-Frame-Options"] == "DENY"


def test_a_newer_question_supersedes_the_one_before(url: str) -> None:
    asked = ONE | {"policy": "orca"}
    slow, begin_s = ask(url, asked), time.monotonic()
    assert next(slow)["part"] == "plans"
    quick = list(ask(url, asked | {"objective": "saturated"}))
    assert quick[-1]["part"] == "end" and quick[-2]["settled"]
    rest = [part["part"] for part in slow]
    assert "end" not in rest
    assert time.monotonic() - begin_s < 30


@pytest.mark.long
def test_a_newer_question_cuts_no_line_of_the_answer_before() -> None:
    command = [sys.executable, "-m", "xgpt.exploring.explore"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None and process.stdout is not None
        assert json.loads(process.stdout.readline())["part"] == "ready"
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # one page: the second line does not fit

        def write(number: int) -> None:
            question = {"id": number, "asked": ONE | {"objective": "saturated"}}
            process.stdin.write(json.dumps(question).encode() + b"\n")

        write(1)
        assert json.loads(process.stdout.readline())["part"] == "plans"
        select.select([process.stdout], [], [])  # the process has begun to write, and waits for room in the pipe
        process.send_signal(signal.SIGUSR1)
        write(2)
        process.stdin.close()
        parts = [json.loads(line) for line in process.stdout]
    assert [part["id"] for part in parts] == [1] + [2] * (len(parts) - 1)
    assert parts[-1] == {"id": 2, "part": "end"}


def test_a_trace_becomes_a_workload(url: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(at(url, "trace?name=../mine.csv"), content="input,output\n10,4\n30,8\n", headers=headers)
    assert answer.json()["mean"] == {"input": 20, "output": 6} and answer.json()["workload"]["name"] == "mine"
    for odd in ("x" * 300, "a%00b.csv", ""):
        answer = httpx.post(at(url, f"trace?name={odd}"), content="input,output\n10,4\n", headers=headers)
        assert answer.status_code == 200 and len(answer.json()["workload"]["name"]) <= 64
    wrong = httpx.post(at(url, "trace?name=mine.csv"), content="input,output\n10,-4\n", headers=headers)
    assert wrong.status_code == 400 and "-4" in wrong.json()["error"] and "/tmp" not in wrong.json()["error"]


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_one_plans_in_a_browser(url: str, tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as page:
        page.open(f"{url}#model=llama-3.1-8b&cluster=h200x1&workload=orca&bound=8")
        page.wait("document.body?.dataset.state === 'settled'")
        assert page.run("document.querySelectorAll('#policies tr').length") == 4
        assert page.run("document.querySelectorAll('#trade-off path').length") == 4
        assert page.run("document.querySelectorAll('#timeline rect.step').length") > 10
        settled = page.run("document.getElementById('rate').textContent")
        page.run("document.getElementById('pin').click()")
        rates, took_ms = [], []
        for position in (300, 500, 700, 900):
            page.run(
                f"(() => {{ const slider = document.getElementById('slider'); slider.value = {position};"
                "delete document.body.dataset.firstMs; slider.dispatchEvent(new Event('input')); })()"
            )
            page.wait("document.body.dataset.firstMs !== undefined || !document.getElementById('trouble').hidden")
            took_ms.append(float(page.run("document.body.dataset.firstMs ?? 0")))
            rates.append(float(page.run("document.getElementById('throughput').textContent")))
        assert all(looser >= 0.99 * tighter for tighter, looser in pairwise(rates)), rates
        print("ms to the first answer:", took_ms)
        assert page.run("document.querySelectorAll('#pins tr td')[3].textContent") == settled
        page.run("document.querySelector('#pins button').click()")
        page.wait("document.body.dataset.state === 'settled'")
        assert page.run("document.getElementById('bound').value") == "8"
        assert page.run("document.getElementById('command').textContent").endswith("--workload orca --latency-bound 8")
        page.run("Object.assign(document.getElementById('bound'), {value: '0.01'}).dispatchEvent(new Event('input'))")
        page.wait("!document.getElementById('nearest').hidden && document.body.dataset.state === 'settled'")
        page.run("document.getElementById('nearest').click()")
        page.wait("document.getElementById('trouble').hidden && document.body.dataset.state === 'settled'")
        unnamed = (
            "[...document.querySelectorAll('input, select, textarea')].filter((e) => !e.labels.length && !e.ariaLabel)"
        )
        assert page.run(f"{unnamed}.length") == 0
        page.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
        assert page.run("document.documentElement.scrollWidth") <= 390
        page.shoot(tmp_path / "phone.png")
        assert page.complaints == []


@pytest.mark.long
def test_the_process_may_end_and_the_page_goes_on(url: str) -> None:
    children = subprocess.check_output(["pgrep", "-f", "xgpt.exploring.explore"], text=True).split()
    for child in children:
        if b"xgpt.exploring.explore" in Path(f"/proc/{child}/cmdline").read_bytes():
            parent = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1]
            if f"--port\0{0}" in Path(f"/proc/{parent}/cmdline").read_text():
                os.kill(int(child), signal.SIGKILL)
    asked = ONE | {"objective": "saturated", "latency_bound_s": 0.05}
    parts = list(ask(url, asked))
    if parts[-1]["part"] == "error":  # the question met the process in its end
        parts = list(ask(url, asked))
    assert parts[0]["part"] == "infeasible" and parts[-1]["part"] == "end"


@pytest.mark.long
def test_a_body_in_chunks_is_no_longer_than_another(url: str) -> None:
    """Its length was looked up in a header that it does not have."""
    headers = {"Content-Type": "application/json"}
    parts = (b" " * 2**20 for _ in range(MOST_BYTES // 2**20 + 1))
    answer = httpx.post(at(url, "ask"), content=parts, headers=headers, timeout=60)
    assert (answer.status_code, answer.json()) == (413, {"error": f"at most {MOST_BYTES} bytes"})


@pytest.mark.long
@pytest.mark.parametrize("noticed", few(["gone", "silent"]))
def test_a_question_right_behind_the_end_of_the_process_is_answered(noticed: str) -> None:
    """It had the last word of the process that was gone for its answer, or might have waited for ever."""

    async def parts() -> list[str]:
        worker = AnswerProcess()
        try:
            await worker.start()
            process = worker._process
            assert process is not None
            await worker._is_ready.wait()
            process.kill()
            reading = worker._reading
            assert reading is not None
            while process.returncode is None if noticed == "gone" else not reading.done():
                await asyncio.sleep(0)
            async with asyncio.timeout(30):
                return [json.loads(part)["part"] async for part in worker.answers(ONE | {"latency_bound_s": 0.05})]
        finally:
            await worker.stop()

    assert "error" not in asyncio.run(parts())
