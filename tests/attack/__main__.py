"""All attacks, and the tests elsewhere that show a point: `python -m tests.attack [options of pytest]`."""

from __future__ import annotations

import sys

import pytest

from tests.attack.points import POINTS


def main() -> int:
    elsewhere = sorted({test for point in POINTS.values() for test in point.elsewhere})
    return pytest.main(["-m", "long or not long", "tests/attack", *elsewhere, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
