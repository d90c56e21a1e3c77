"""What is published of the code's types and commands is current."""

from pathlib import Path

import pytest

from tools import make_reference, make_schema


def test_the_published_schemas_are_current() -> None:
    for path, text in make_schema.files().items():
        assert path.read_text() == text, "run python -m tools.make_schema"


@pytest.mark.parametrize("page", make_reference.PAGES)
def test_the_reference_is_current(page: str) -> None:
    path: Path = make_reference.ROOT / "docs" / page
    assert path.read_text() == make_reference.PAGES[page](), "run python -m tools.make_reference"


def test_the_schema_describes_fields() -> None:
    assert '"description": "Mean number of requests in a step that encodes."' in make_schema.text()
