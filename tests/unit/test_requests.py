"""One declaration of each option: what is made from it is up to date, and nothing declares it again."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import get_args

import click
import pytest
from click.testing import CliRunner

from tools.fields import descriptions
from tools.make_reference import PAGES
from tools.request_options import keywords_pyi, options_json
from xgpt import requests
from xgpt.cli import COMMANDS, commands
from xgpt.cli.options import Command, RequestOption
from xgpt.core.schema import AdmissionOrder, DType
from xgpt.core.schema.policy import PolicyChoice
from xgpt.requests import REQUESTS, Option, RequestBase

ROOT = Path(__file__).parents[2]
MADE = {"xgpt/options.json": options_json, "xgpt/keywords.pyi": keywords_pyi}
MADE |= {f"docs/{name}": write for name, write in PAGES.items()}


@pytest.mark.parametrize("path", MADE)
def test_what_is_made_from_the_declarations_is_up_to_date(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == MADE[path](), "run python -m tools.make_reference"


def command_of(name: str) -> Command:
    found = getattr(commands, name)
    assert isinstance(found, Command)
    return found


@pytest.mark.parametrize("name", REQUESTS)
def test_a_command_has_the_options_of_its_request_and_no_second_ones(name: str) -> None:
    params = [param for param in command_of(name).params if isinstance(param, click.Option)]
    flags = [flag for param in params for flag in param.opts]
    assert sorted(flags) == sorted(set(flags))
    of_request = {param.name for param in params if isinstance(param, RequestOption)}
    others = {param.name for param in params} - of_request
    declared = REQUESTS[name].model_fields
    unset = {
        field for field, each in declared.items() if any(annotation == Option(None) for annotation in each.metadata)
    }
    assert of_request == declared.keys() - unset
    assert others <= {
        "output",
        "engine_output",
        "force",
        "as_json",
        "calibrate",
        "timeline",
        "simulated_trace",
        "explain",
    }


@pytest.mark.parametrize("name", REQUESTS)
def test_a_text_sets_no_option_that_the_command_lacks(name: str) -> None:
    texts = descriptions(REQUESTS[name])
    for field in REQUESTS[name].model_fields:
        assert set(re.findall(r"`(\w+)=", texts[field])) <= REQUESTS[name].model_fields.keys(), field


def declarations() -> dict[tuple[str, str], set[str]]:
    """The classes that declare a field, by its name and text."""
    found = defaultdict(set)
    for kind in vars(requests).values():
        if inspect.isclass(kind) and issubclass(kind, RequestBase):
            texts = descriptions(kind)
            for name in inspect.get_annotations(kind).keys() & kind.model_fields.keys():
                found[name, texts[name]].add(kind.__name__)
    return found


def test_no_field_is_declared_twice() -> None:
    declared = declarations()
    assert {field: kinds for field, kinds in declared.items() if len(kinds) > 1} == {}
    assert all(text for _, text in declared)


@cache
@cache
def lists_of(path: Path) -> list[set[str]]:
    """The choices that code spells out: lists, tuples, sets and Literals of texts."""
    return [
        {element.value for element in node.elts if isinstance(element, ast.Constant) and isinstance(element.value, str)}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.List | ast.Tuple | ast.Set)
    ]


@pytest.mark.parametrize("choices", [PolicyChoice, AdmissionOrder, DType])
def test_a_list_of_choices_stands_once(choices: object) -> None:
    known = set(get_args(choices))
    paths = [path for package in ("xgpt", "xscheduler") for path in sorted((ROOT / package).rglob("*.py"))]
    found = [path for path in paths for spelt in lists_of(path) if known <= spelt]
    assert len(found) <= 1 and all(path.is_relative_to(ROOT / "xgpt/core/schema") for path in found)


def test_help_lists_the_most_used_options_first_then_groups() -> None:
    text = CliRunner().invoke(command_of("plan"), ["--help"]).output
    titles = [line.removesuffix(" options:") for line in text.splitlines() if line.endswith(" options:")]
    assert titles == [
        "Most used",
        "Problem",
        "Bounds",
        "Search",
        "Speculative decoding",
        "Arrivals",
        "Output",
        "Research",
    ]
    first = text.partition("Most used options:")[2].partition("Problem options:")[0]
    options = [line.split()[0].strip(",") for line in first.splitlines() if line.lstrip().startswith("-")]
    assert options == ["--latency-bound", "--model", "--cluster", "--workload", "-o"]


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"]])
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys, time\nfrom xgpt.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "heavy = {'numpy', 'pydantic', 'scipy', 'torch', 'optuna'} & set(sys.modules)\n"
        "print(time.process_time(), *heavy, file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, *heavy = ran.stderr.split()
    assert float(seconds) < 0.3 and not heavy


def test_commands_have_requests_or_say_why_not() -> None:
    assert set(COMMANDS) - REQUESTS.keys() == {"autoscale", "export", "ui", "doctor", "completion"}
