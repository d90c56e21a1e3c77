"""Attacks on running servers: `make attack` runs all, `make test` those that take seconds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.attack.target import save_checkpoint

if sys.platform != "linux":
    collect_ignore_glob = ["test_*.py"]  # memory and sockets are read from /proc


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint with a tokenizer of one token a byte and a chat template."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "small")
