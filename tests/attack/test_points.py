"""What `make attack` runs is there."""

from pathlib import Path

import pytest

from tests.attack.points import POINTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("test", sorted({test for point in POINTS.values() for test in point.elsewhere}))
def test_what_a_point_names_is_there(test: str) -> None:
    """Two tests had been renamed, and `make attack` ran nothing."""
    path, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text() if name else (ROOT / path).exists()
