"""Earlier loads show by how much the next one may differ from its profile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.fakes import fake_plan
from xgpt.core.schema import PACES_AT_REST, SERVED, Constraint, Plan
from xgpt.core.schema.profile import MOST_HEADROOM
from xgpt.deciding.ranges import ranges_of
from xgpt.observation.paces import ENOUGH, KEPT, NARROWEST, record, usual
from xgpt.resolve import load_cluster, load_model
from xprofiler import analytic
from xrunner.server.observe.watch import Watch
from xscheduler.schedule import headroom_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "xgpt" / "paces"


@pytest.fixture
def served() -> Plan:
    plan = fake_plan()
    return plan.model_copy(update={"profile": plan.profile.model_copy(update={"provenance": {SERVED: "x1"}})})


def test_ranges_and_headroom_follow_the_paces_of_earlier_loads(served: Plan) -> None:
    device = served.cluster.device.name
    profile = analytic.profile(load_model("opt-125m")[0], load_cluster("h200x1"), "float16")
    of_this = {"source": "measured", "engine": "xgpt", "provenance": {SERVED: "x1"}, "device": device}
    profile = profile.model_copy(update=of_this)
    assert usual(device, "xgpt") == PACES_AT_REST
    assert headroom_of(Constraint(), profile) == pytest.approx(PACES_AT_REST[1] - 1)
    at_rest = ranges_of(served, profile)["ranges"]["throughput_rps"]
    for i in range(ENOUGH - 1):
        record(served, 0.85 + 0.05 * i)
    assert usual(device, "xgpt") == PACES_AT_REST, "too few loads"
    record(served, 1.6)
    fast, slow = usual(device, "xgpt")
    assert (fast, slow) == (0.85, 1.6), "the extremes of eight loads hold seven of nine next ones"
    assert headroom_of(Constraint(), profile) == MOST_HEADROOM
    assert headroom_of(Constraint(headroom=0.01), profile) == 0.01
    low, high = ranges_of(served, profile)["ranges"]["throughput_rps"]
    assert low < at_rest[0] < at_rest[1] < high
    assert usual("another", "xgpt") == PACES_AT_REST


def test_a_machine_with_a_steady_pace_gets_narrower_ranges(served: Plan) -> None:
    for _ in range(ENOUGH):
        record(served, 1.01)
    assert usual(served.cluster.device.name, "xgpt") == NARROWEST


def test_paces_of_vllm_are_kept_apart(served: Plan) -> None:
    of_vllm = served.but(profile=served.profile.but(engine="vllm"))
    for _ in range(ENOUGH):
        record(of_vllm, 1.3)
    device = served.cluster.device.name
    assert usual(device, "xgpt") == PACES_AT_REST and usual(device, "vllm")[1] == 1.3


def test_loads_of_profiles_that_were_not_fitted_do_not_count(cache: Path) -> None:
    record(fake_plan(), 1.3)
    assert not cache.exists()


def test_old_and_damaged_entries_are_forgotten(cache: Path, served: Plan) -> None:
    cache.mkdir(parents=True)
    file = cache / f"{served.cluster.device.name}.jsonl"
    file.write_text('{"time_s": 1, "pace": 9}\nnot json\n[]\n{"pace": 2}\n{"time_s": "x", "pace": 2}\n' * 20)
    for _ in range(KEPT + 5):
        record(served, 1.0)
    assert len(file.read_text().splitlines()) == KEPT
    assert usual(served.cluster.device.name, "xgpt") == NARROWEST
    file.write_bytes(b"\xff\xfe")
    assert usual(served.cluster.device.name, "xgpt") == PACES_AT_REST


def test_a_server_records_its_pace(cache: Path, served: Plan) -> None:
    watch = Watch(served)
    for step in range(60):
        watch._observer.pace.note(0.5 * step, 0.012, 0.01)
    asyncio.run(watch.stop())
    assert '"pace": 1.2' in (cache / f"{served.cluster.device.name}.jsonl").read_text()
