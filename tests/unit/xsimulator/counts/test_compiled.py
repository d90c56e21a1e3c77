"""Compiled loops are kept on disk, and references are not counted within them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from xsimulator.counts.compiled import borrowed, helper, is_kept, kept


class Arrays(NamedTuple):
    values: np.ndarray
    factor: float


@helper
def total(arrays):  # type: ignore[no-untyped-def]
    found = 0.0
    for value in arrays.values:
        found += arrays.factor * value
    return found


def test_what_is_compiled_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))

    @kept
    def run(arrays):  # type: ignore[no-untyped-def]
        return total(borrowed(arrays))

    assert not is_kept(run)
    assert run(Arrays(np.arange(4.0), 2.0)) == 12.0
    assert is_kept(run)


def test_what_cannot_be_kept_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no locator available")

    monkeypatch.setattr("numba.core.caching.FunctionCache.__init__", refuse)

    @kept
    def run(arrays):  # type: ignore[no-untyped-def]
        return total(borrowed(arrays))

    assert run(Arrays(np.arange(4.0), 3.0)) == 18.0
    assert not is_kept(run)
