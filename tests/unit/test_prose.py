"""Plain English: requests and machines are not people, and words are used in their usual sense."""

from __future__ import annotations

import ast
import importlib
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from xgpt.cli import COMMANDS, cli

ROOT = Path(__file__).parents[2]

PRODUCT = ("xgpt", "xsimulator", "xscheduler", "xprofiler", "xrunner")
PACKAGES = (*PRODUCT, "benchmarks", "tests", "tools", "examples")

UNWANTED = {
    "people": r"\b(who|whom|whoever|whomever|nobody|somebody|someone|everybody|everyone|anybody|anyone)\b",
    "beside": r"\bbeside\b",
    "of late": r"\bof late\b",
    "so many": r"\bso (many|much)\b(?! (\w+ )?(that|as)\b)",
    "diary": r"\b(it was|used to be|no longer)\b.*\b(before|until|now)\b",
    "commit hash": r"\b(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7}\b",
}
"""By what is wrong with them. A peer's plan hash has eight digits; seven are a commit's."""


def unwanted(text: str) -> list[str]:
    """Return each unwanted word or phrase with some words around it; code is left out."""
    prose = re.sub(r"(?s:```.*?```)|`[^`\n]*`|^ {4}.*$", " ", text, flags=re.MULTILINE)
    found = []
    for what, pattern in UNWANTED.items():
        for match in re.finditer(pattern, prose, re.IGNORECASE):
            around = prose[max(0, match.start() - 40) : match.end() + 40]
            found.append(f"{what}: {' '.join(around.split())}")
    return found


def explanations(path: Path) -> Iterator[str]:
    """Yield every comment and docstring of a module, those below its attributes included, with its lines outdented."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield "\n".join(line.strip() for line in node.value.value.splitlines())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


def strings(path: Path) -> Iterator[str]:
    """Yield the strings of a module that are sentences: errors, logs, help."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


@pytest.mark.parametrize(
    "text", ["Who waits", "stands beside it", "takes so many devices", "since 163285c", "    code\n\nWho waits"]
)
def test_unwanted_words_are_found(text: str) -> None:
    assert unwanted(text)


@pytest.mark.parametrize(
    "text",
    ["`who` in code", "so many rows that it overflows", "besides", "plan a4c65eaf", "of 1234567 points", "whose"],
)
def test_other_words_are_not(text: str) -> None:
    assert not unwanted(text)


@pytest.mark.parametrize(
    "page", ["README.md", "CHANGELOG.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md"))]
)
def test_pages(page: str) -> None:
    found = unwanted((ROOT / page).read_text(encoding="utf-8"))
    if page.startswith("docs/results/"):  # figures say which commit they are of
        found = [what for what in found if not what.startswith("commit hash")]
    assert not found


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help(name: str) -> None:
    command: click.Command = importlib.import_module(f"xgpt.cli.{name}").command if name else cli
    texts = [command.help or "", *(option.help or "" for option in command.params if isinstance(option, click.Option))]
    assert not [found for text in texts for found in unwanted(" ".join(text.split()))]


def test_every_option_has_a_help_text() -> None:
    for name in COMMANDS:
        command = importlib.import_module(f"xgpt.cli.{name}").command
        silent = [option.name for option in command.params if isinstance(option, click.Option) and not option.help]
        assert not silent, f"xgpt {name}: {silent}"


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_and_comments(package: str) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    assert paths
    assert not {str(path): found for path in paths for text in explanations(path) for found in unwanted(text)}


@pytest.mark.parametrize("package", PRODUCT)
def test_messages(package: str) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    assert not {str(path): found for path in paths for text in strings(path) for found in unwanted(text)}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120
