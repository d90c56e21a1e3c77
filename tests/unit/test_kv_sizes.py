"""K/V memory against what engines logged: published start-up logs, over models, types, groups, devices and versions."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.kv_sizes import Size, rows, setting_of, sizes


@pytest.fixture(scope="module")
def every_size() -> list[Size]:
    return list(sizes())


@pytest.mark.parametrize("number", range(len(rows())), ids=map(setting_of, rows()))
def test_no_more_than_there_is_and_little_less(every_size: list[Size], number: int) -> None:
    size = every_size[number]
    if size.logged < 0:
        assert size.predicted < 0, "it does not start"
    else:
        assert -0.05 <= size.error <= 0.02


def test_most_sizes_verify(every_size: list[Size]) -> None:
    verify = [size for size in every_size if not size.is_fitted]
    assert len(every_size) >= 65 and len(verify) >= 4 / 5 * len(every_size)
    assert median(abs(size.error) for size in verify) < 0.005
    assert {size.engine for size in verify} >= {f"vllm-0.{minor}" for minor in (10, 11, 15, 16, 17, 18, 19, 24)}
