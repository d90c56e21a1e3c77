"""A plan or profile that was cut short or edited by hand is read or refused in one line, never by a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.commands import PROBLEM, run
from tests.rings import examples, few, shorten

VALUES: list[Any] = [
    None,
    0,
    -1,
    1,
    1.5,
    -0.5,
    1e-9,
    1e9,
    2**63,
    1e308,
    "",
    "x",
    [],
    {},
    [0],
    [1, 2],
    True,
    float("nan"),
]
FACTORS = (-1, 0, 0.5, 2, 1000)
KINDS = ("rra", "chunked", "orca", "static", "waa")
PAIR = ("--model", "opt-13b", "--cluster", "a40x4", "--workload", "translation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A plan of each policy, and a profile. K/V is small, so an output of 100,000 tokens is refused, not simulated."""
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        path = tmp_path_factory.mktemp("mutated")
        patch.setenv("XDG_CACHE_HOME", str(path / "cache"))
        patch.chdir(path)
        for kind in KINDS:
            problem = PAIR if kind == "waa" else PROBLEM
            asked = ("plan", "--latency-bound", "inf", *problem, "--policy", kind, "-o", f"{kind}.json")
            small = ("--fix", "max_batch=64") if kind in ("chunked", "orca") else ()  # simulated with few requests
            assert run(*asked, *small, *(() if kind == "orca" else ("--objective", "saturated"))).code == 0
            plan = json.loads(Path(f"{kind}.json").read_text())
            for stage in plan["stages"]:
                stage["kv_blocks"] = min(1024, stage["kv_blocks"])
            Path(f"{kind}.json").write_text(json.dumps(plan))
        assert run("profile", *PROBLEM[:4], "-o", "profile.json").code == 0
        yield path


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in a document; of a long list, its ends."""
    keys: list[Any] = list(value) if isinstance(value, dict) else []
    if isinstance(value, list):
        keys = [*range(min(2, len(value))), *range(max(2, len(value) - 1), len(value))]
    for key in keys:
        yield value, key
        yield from places(value[key])


@st.composite
def mutations(draw: st.DrawFn, text: str) -> str:
    """The text cut short, or its document with one thing deleted, added, scaled or replaced."""
    if draw(st.integers(0, 9)) == 0:
        return text[: draw(st.integers(0, len(text) - 2))]
    document = json.loads(text)
    container, key = draw(st.sampled_from(list(places(document))))
    match draw(st.sampled_from(("delete", "add", "scale", "replace"))):
        case "delete":
            del container[key]
        case "add" if isinstance(container, dict):
            container["more"] = 1
        case "scale" if type(container[key]) in (int, float):
            container[key] *= draw(st.sampled_from(FACTORS))
        case _:
            container[key] = draw(st.sampled_from(VALUES))
    return json.dumps(document)


def check(text: str, *commands: tuple[str, ...]) -> None:
    Path("mutated.json").write_text(text)
    for command in commands:
        ran = run(*command)
        assert ran.code in (0, 2, 3) or (ran.code == 1 and command[0] == "plan"), ran.err
        assert ran.code == 0 or (ran.err.startswith("xgpt: ") and ran.err.count("\n") == 1), ran.err


FEW = settings(max_examples=examples(60, 3))


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(data=st.data())
def test_plans(folder: Path, kind: str, data: st.DataObject) -> None:
    text = data.draw(mutations((folder / f"{kind}.json").read_text()))
    check(
        text,
        ("simulate", "mutated.json", "--requests", "5"),
        ("serve", "mutated.json", "--dry-run"),
        ("export", "mutated.json", "--to", "shell", "-o", "out"),
    )


@FEW
@given(data=st.data())
def test_profiles(folder: Path, data: st.DataObject) -> None:
    text = data.draw(mutations((folder / "profile.json").read_text()))
    plan = ("plan", "--latency-bound", "inf", *PROBLEM, "--policy", "orca", "-o", "planned.json")
    check(text, (*plan, "--profile", "mutated.json"), ("simulate", "orca.json", "--profile", "mutated.json"))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@settings(FEW, max_examples=40)
@given(data=st.data())
def test_reports(folder: Path, kind: str, data: st.DataObject) -> None:
    text = data.draw(mutations((folder / f"{kind}.json").read_text()))
    check(text, ("report", "mutated.json", "-o", "report.html"))


@pytest.mark.parametrize("field", few(["hidden_size", "ffn_size", "vocab_size"]))
def test_a_report_of_a_plan_whose_model_has_grown(folder: Path, field: str) -> None:
    document = json.loads((folder / "rra.json").read_text())
    document["model"][field] *= 1000
    check(json.dumps(document), ("report", "mutated.json", "-o", "report.html"))
