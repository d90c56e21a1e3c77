"""Each page of results has the tables that are stored, and the command of each table runs."""

from __future__ import annotations

import shlex
from importlib.util import find_spec

import pytest

from benchmarks.lib.results import PAGES, STORED, claims, filled, stored
from tools.make_pictures import pictures

NAMES = sorted(path.stem for path in STORED.glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_page_has_what_is_stored(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert filled(text, stored(name)) == text
    assert text.count("<!-- result: ") == len(stored(name))


@pytest.mark.parametrize("name", NAMES)
def test_commands_of_tables_are_there(name: str) -> None:
    for one in stored(name).values():
        words = shlex.split(one.command)
        if words[:2] == ["python", "-m"] and not one.commit:
            assert find_spec(words[2]) is not None, one.command


def test_the_list_of_claims_is_the_stored_one() -> None:
    assert (PAGES / "index.md").read_text(encoding="utf-8") == claims()


def test_pictures_show_what_is_stored() -> None:
    for path, drawn in pictures().items():
        assert path.read_text(encoding="utf-8") == drawn, path
