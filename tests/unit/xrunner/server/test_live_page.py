"""The page of a running server, in a real browser where there is one."""

import json
import re
import subprocess
from importlib.resources import files
from pathlib import Path

import httpx
import pytest

from tests.browser import CHROMIUM, browser
from tests.fakes import FakeExecutor, fake_app, fake_engine, fake_plan, running
from tests.unit.xrunner.server.test_watch import FakePlanner, ask
from xgpt.core.schema import Decision, Histogram, Observation
from xrunner.server.observe.live import causes_of
from xrunner.server.observe.watch import Watch

BOUND = {"latency_bound_s": 9.8, "objective": "arrivals"}
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--virtual-time-budget=5000", "--dump-dom",
)  # fmt: skip


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_page_comes_to_life_in_a_browser(tmp_path: Path) -> None:
    evil = "<img src=x onerror=document.body.id='taken'>"
    plan = fake_plan()
    with running(fake_app(fake_engine(FakeExecutor()), Watch(plan), names=(evil,))) as url:
        body = {"model": evil, "prompt": [[1, 2, 3]] * 40, "max_tokens": 5}
        assert httpx.post(f"{url}/v1/completions", json=body, trust_env=False).status_code == 200
        browser = subprocess.run(
            [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path}", url + "/"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        live = httpx.get(f"{url}/live", trust_env=False).json()
    dom = browser.stdout
    assert 'data-state="live"' in dom, browser.stderr[-2000:]
    assert "orca: max_batch 16" in dom
    assert "40 requests observed, 40 of them ended" in dom
    assert dom.count("<svg") == 9 and dom.count("<polyline") >= 9
    assert "Re-planning is off." in dom
    assert 'id="taken"' not in dom and "&lt;img src=x" in dom
    assert json.dumps(live["lengths"]["input"]["observed"]) != "null"


@pytest.mark.parametrize("name", ["live", "ui"])
def test_pages_fetch_no_relative_address(name: str) -> None:
    """In a page whose address has a key, http://x:KEY@host/, browsers refuse to fetch relative addresses."""
    script = files("xgpt.pages").joinpath(f"{name}.js").read_text(encoding="utf-8")
    assert re.findall(r"fetch\((?!here\()", script) == []
    assert "fetch(here(" in script


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_page_lives_with_a_key_in_its_address(tmp_path: Path) -> None:
    with running(fake_app(fake_engine(FakeExecutor()), Watch(fake_plan()))) as url:
        seen = subprocess.run(
            [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path}", url.replace("http://", "http://x:key@") + "/"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert 'data-state="live"' in seen.stdout, seen.stderr[-2000:]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_page_says_the_bound_and_what_was_decided(tmp_path: Path) -> None:
    planner = FakePlanner([None] * 20)
    plan = fake_plan()
    plan = plan.model_copy(update={"constraint": plan.constraint.model_copy(update=BOUND)})
    watch = Watch(plan, planner)
    with running(fake_app(fake_engine(FakeExecutor()), watch)) as url, browser(tmp_path / "profile") as page:
        ask(url, 3, 4)
        decided = httpx.get(f"{url}/plan/decision", trust_env=False).json() | {"at": "2026-11-26T10:02:42+00:00"}
        watch.history.extend([Decision.model_validate(decided)] * 3)
        page.open(f"{url}/")
        page.wait("document.body?.dataset.state === 'live'")
        assert page.run("document.getElementById('latency-label').textContent") == (
            "latency p99, arrival to last token; bound: 9.8 s for 99% of requests"
        )
        watch.history.append(Decision.model_validate(decided | {"action": "swap", "planned_under_s": 13.2}))
        page.wait("document.getElementById('latency-label').textContent.endsWith('requests; planned under 13.2 s')")
        watch.history.pop()
        live = httpx.get(f"{url}/live", trust_env=False).json()["now"]
        assert live["share_kept"] == 1.0 and live["first_p99_s"] <= live["whole_p99_s"] < 9.8
        assert page.run("document.getElementById('kept').textContent") == "100.0%"
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        last = "Last, at 2026-11-26T10:02:42+00:00: keep: <b>because</b>"
        page.wait(f"document.getElementById('last').textContent === '{last}'")  # at its next look at /live
        cells = "[...document.querySelectorAll('#decisions tr')].map((row) => row.children[1].textContent)"
        assert page.run(cells) == ["keep (3 times)"]
        page.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
        assert page.run("document.documentElement.scrollWidth") <= 390
        page.run("document.getElementById('would').click()")
        page.wait("document.getElementById('decision').textContent === 'keep: <b>because</b>'")
        assert page.complaints == []


def test_causes_of_broken_bounds_are_said_the_largest_first() -> None:
    plan = fake_plan()
    lengths = plan.workload.but(output=Histogram(lengths=(2 * round(plan.workload.output.mean),), probabilities=(1.0,)))
    seen = Observation(workload=lengths, num_requests=9, num_finished=9, weight=9, input_distance=0, output_distance=9)
    assert causes_of(plan, 1.01, None) == []
    slow, longer = "This machine is 1.75 times slower than when it was profiled.", "Outputs are "
    assert causes_of(plan, 1.75, None) == [slow]
    both = causes_of(plan, 1.75, seen)
    assert both[0].startswith(longer) and both[1] == slow
