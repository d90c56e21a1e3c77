"""What the documentation names exists: modules, files, commands' options."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from xgpt.cli import COMMANDS, commands

ROOT = Path(__file__).parents[2]
PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")))

PACKAGES = "xgpt|xsimulator|xscheduler|xrunner|xprofiler|benchmarks|tests|tools"
NAMED = re.compile(rf"(?<![\w/.-])(?:(?:{PACKAGES})(?:\.(?!yaml)\w+)+|(?:{PACKAGES}|configs|docs)(?:/[\w.]*\w)+)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


@cache
def stands(name: str) -> bool:
    """Whether a file, a folder, a module or a name in a module is there."""
    if "/" in name:
        return any((ROOT / f"{name}{end}").exists() for end in ("", ".py"))
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        path, rest = ROOT.joinpath(*parts[:count]), parts[count:]
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return all(re.search(rf"\b{part}\b", file.read_text(encoding="utf-8")) for part in rest)
    return not parts[1:]


def test_what_is_missing_is_found() -> None:
    assert stands("xgpt.core.schema.plan.Plan") and stands("tests/unit/test_docs.py") and stands("xgpt/cli")
    assert (
        not stands("xgpt.nothing") and not stands("xgpt.core.schema.plan.Nothing") and not stands("xgpt/cli/nothing.py")
    )


@pytest.mark.parametrize("page", PAGES)
def test_named_code_exists(page: str) -> None:
    text = re.sub(r"`[^`]*` of commit \w+", "", (ROOT / page).read_text(encoding="utf-8"))
    names = set(NAMED.findall(text))
    assert not sorted(name for name in names if not stands(name))


@pytest.mark.parametrize("page", [page for page in PAGES if page == "README.md" or "/guide/" in page])
def test_options_of_xgpt_exist(page: str) -> None:
    known = {name for command in COMMANDS for name in _options(command)}
    lines = re.findall(r"^ {4}xgpt .*(?:\n {6}.*)*", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    used = {name for line in lines for name in OPTION.findall(re.sub(r"'[^']*'|#.*", "", line))}
    assert used <= known


def _options(command: str) -> set[str]:
    parameters = getattr(commands, command).params
    return {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}


def test_every_field_of_a_file_has_a_meaning() -> None:
    lines = (ROOT / "docs/reference/files.md").read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if line.endswith("|  |")]
