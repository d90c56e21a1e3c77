"""A policy lives in its settings, its rule and its forecast: no other code names one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import get_args

import pytest

from tests.unit.test_imports import PACKAGES, ROOT
from xgpt.core.schema import PolicySettings
from xgpt.core.schema.policy import POLICY_WORDS
from xsimulator.forecast import FORECASTS

ROOMS = ("xgpt/core/schema", "xgpt/core/policies", "xsimulator/forecast")
ALLOWED = {
    "xgpt/deciding/commands.py": "how other engines are told to run a chunked plan",
    "xgpt/reporting/plan_text.py": "what a plan does, in words for people",
    "xscheduler/objectives/best_plans.py": "what other planners offer, and which policies vLLM runs",
    "xgpt/served_profile.py": "the schedule under which a profile's steps are served, whatever the plan",
    "xgpt/comparing/scoring.py": "vLLM's own scheduler, with which a plan is compared, is chunked",
    "xgpt/comparing/own_times.py": "how fast vLLM's own scheduler can be, whatever its settings",
    "xgpt/testing.py": "the usual plan under which a rule of one's own is checked",
    "xgpt/tuning": "vLLM's own scheduler, whose settings are tried, is chunked",
    "xscheduler/tuning": "the same",
    "xrunner/vllm/command.py": "how large a step vLLM is told to take, of a policy's own settings",
    "xrunner/vllm/lane.py": "which policies run within one vLLM",
    "xrunner/vllm/waa.py": "runs the two lanes of waa as two of them",
}
NAMES = set(FORECASTS)
CLASSES = {forecast.settings.__name__ for forecast in FORECASTS.values()}
ANY = re.compile("|".join(NAMES | CLASSES), re.IGNORECASE)


def named(source: str) -> Iterator[str]:
    """Policies that code names: as a string, by their settings, or in a name of its own; not in docstrings."""
    if not ANY.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)) if text in NAMES:
                yield f"{node.lineno}: {text!r}"
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) if name in CLASSES:
                yield f"{node.lineno}: {name}"
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) if NAMES & set(re.split(r"[_.]", name.lower())):
                yield f"{node.lineno}: {name}"


def is_in(path: str, place: str) -> bool:
    return path == place or path.startswith(place + "/")


def test_no_other_code_names_a_policy() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{name}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if not any(is_in(path.relative_to(ROOT).as_posix(), place) for place in (*ROOMS, *ALLOWED))
        for name in named(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        'kinds = ("orca", 3)',
        "from xgpt.core.schema import WaaSettings",
        "isinstance(policy, schema.RraSettings)",
        "def _waa(size): ...",
    ],
)
def test_the_check_sees(source: str) -> None:
    assert list(named(source))


def test_every_policy_has_all_its_parts() -> None:
    for kind, forecast in FORECASTS.items():
        names = [variable.name for variable in forecast.settings.variables]
        assert forecast.settings.model_fields["kind"].default == kind
        assert {forecast.line, forecast.load, *forecast.follows} <= set(names)
    assert POLICY_WORDS.keys() >= NAMES
    assert {forecast.settings for forecast in FORECASTS.values()} == set(get_args(get_args(PolicySettings)[0]))
