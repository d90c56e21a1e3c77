"""numba emits a function when its address is wanted; helpers are only part of their callers."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit, prange

from xgpt.core import compiled_files

assert compiled_files  # its import changes how numba compiles


@njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)
def root(x: float) -> float:
    if x < 0:
        raise ValueError("negative", 1)
    return x**0.5


@njit
def sum_of_roots(numbers: np.ndarray) -> float:
    total = 0.0
    for number in numbers:
        total += root(number)
    return total


@njit(parallel=True)
def roots(numbers: np.ndarray) -> np.ndarray:
    found = np.empty_like(numbers)
    for i in prange(len(numbers)):
        found[i] = root(numbers[i])
    return found


def emitted(function: object) -> list[bool]:
    """Return whether a function's code was emitted, for each type of its arguments."""
    return [found.library._is_emitted for found in function.overloads.values()]  # type: ignore[attr-defined]


def test_a_helper_that_python_cannot_call_is_not_emitted() -> None:
    numbers = np.arange(5.0)
    assert sum_of_roots(numbers) == pytest.approx(np.sqrt(numbers).sum())
    assert emitted(sum_of_roots) == [True]
    assert emitted(root) == [False]


def test_parallel_loops_and_errors_of_helpers_are_as_usual() -> None:
    assert roots(np.arange(9.0)) == pytest.approx(np.sqrt(np.arange(9.0)))
    with pytest.raises(ValueError) as raised:
        sum_of_roots(np.array([1.0, -1.0]))
    assert raised.value.args == ("negative", 1)
