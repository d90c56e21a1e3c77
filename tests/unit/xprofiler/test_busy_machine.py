"""What is measured on a busy machine, and what is said of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from xgpt.resolve import load_model
from xprofiler.bench import BATCHES, Points, Timings, brief, filled
from xprofiler.others import UNSEEN, Others


def points(model: str = "opt-125m") -> list[tuple[str | int, ...]]:
    chosen = Points.of(load_model(model)[0], "cpu")
    attention = [("encode attention", *at) for at in chosen.encode] + [
        ("decode attention", *at) for at in chosen.decode
    ]
    return [*(("step", n) for n in chosen.steps), *(("head", n) for n in BATCHES), *attention]


def seconds(name: str | int, *sizes: int) -> float:
    """Times on straight lines in every size; only steps up to the largest decode batch compute logits."""
    b, n = sizes if len(sizes) == 2 else (sizes[0], 1)
    logits = 5e-4 * b if b <= max(BATCHES) else 0.0
    return {"step": 1e-2 + 1e-3 * b + logits, "head": 1e-3 + 1e-4 * b}.get(str(name), 1e-5 + 1e-6 * b * n + 2e-5 * b)


def test_few_points_tell_all() -> None:
    keys = points()
    measured: Timings = {key: seconds(key[0], *map(int, key[1:])) for key in brief(keys)}
    assert len(measured) < 0.55 * len(keys)
    assert sum(int(key[1]) for key in measured if key[0] == "step") < 0.5 * sum(
        int(key[1]) for key in keys if key[0] == "step"
    )
    found = filled(measured, keys)
    for key in keys:
        assert found[key] == pytest.approx(seconds(key[0], *map(int, key[1:]))), key
    with pytest.raises(ValueError, match="do not determine"):
        filled({("step", 1): 1.0}, [("step", 2)])


@pytest.mark.parametrize("context", [64, 128, 300, 512, 1024, 2048, 4096, 8192, 40960])
def test_few_points_tell_all_for_any_context(context: int) -> None:
    """A model with a context of 1,024 ended in an internal error."""
    chosen = Points.of(load_model("opt-125m")[0].model_copy(update={"max_context": context}), "cpu")
    keys = [("encode attention", *at) for at in chosen.encode] + [("decode attention", *at) for at in chosen.decode]
    keys += [("step", n) for n in chosen.steps]
    found = filled({key: seconds(key[0], *map(int, key[1:])) for key in brief(keys)}, keys)
    for key in keys:
        assert found[key] == pytest.approx(seconds(key[0], *map(int, key[1:]))), key


def test_the_cpu_time_of_other_processes_is_read_from_proc(tmp_path: Path) -> None:
    def write(number: int, name: str, parent: int, ticks: int, began: int = 7) -> None:
        (tmp_path / str(number)).mkdir(exist_ok=True)
        rest = f"S {parent} 0 0 0 0 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 {began} 0"
        (tmp_path / str(number) / "stat").write_text(f"{number} ({name}) {rest}\n")

    (tmp_path / "stat").write_text("cpu  9000 0 0 0 0 0 0 0 0 0\ncpu0 0\n")
    write(14, "sed", 1, 300)
    for number, name, parent in ((os.getpid(), "xgpt", 1), (11, "worker", os.getpid()), (12, "cc (1)", 1)):
        write(number, name, parent, 1000)
    others = Others(tmp_path)
    tick = os.sysconf("SC_CLK_TCK")
    time.sleep(0.05)
    for number, name, parent in ((os.getpid(), "xgpt", 1), (11, "worker", os.getpid()), (12, "cc (1)", 1)):
        write(number, name, parent, 1000 + 10 * tick)
    write(13, "make", 1, 5 * tick)
    (tmp_path / "14" / "stat").unlink()  # it has ended, and others that were never seen took 7 s with it
    (tmp_path / "stat").write_text(f"cpu  {9000 + 42 * tick} 0 0 0 0 0 0 {tick} 0 0\ncpu0 0\n")
    found = others.cores()
    assert list(found) == ["cc (1)[12]", UNSEEN, "make[13]", "steal"]
    assert found[UNSEEN] == pytest.approx(7 * found["steal"], rel=0.05)
    assert found["cc (1)[12]"] == pytest.approx(2 * found["make[13]"], rel=0.05)
    assert found["make[13]"] == pytest.approx(5 * found["steal"], rel=0.05)
