"""What the engine asks of OpenMP must be there before torch loads it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMMAND = "import os, sys, xgpt; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"


@pytest.mark.parametrize(("given", "seen"), [({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_threads_wait_briefly_unless_the_user_says_otherwise(given: dict[str, str], seen: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"} | given
    done = subprocess.run([sys.executable, "-c", COMMAND], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [seen, "False"]
