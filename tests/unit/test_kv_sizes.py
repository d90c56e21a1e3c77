"""K/V memory against what engines logged: published start-up logs, over models, types, groups, devices and versions."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.kv_sizes import Size, sizes

SIZES = list(sizes())


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.setting)
def test_no_more_than_there_is_and_little_less(size: Size) -> None:
    if size.logged < 0:
        assert size.predicted < 0, "it does not start"
    else:
        assert -0.05 <= size.error <= 0.02


def test_most_sizes_verify() -> None:
    verify = [size for size in SIZES if not size.is_fitted]
    assert len(SIZES) >= 65 and len(verify) >= 4 / 5 * len(SIZES)
    assert median(abs(size.error) for size in verify) < 0.005
    assert {size.engine for size in verify} >= {f"vllm-0.{minor}" for minor in (10, 11, 15, 16, 17, 18, 19, 24)}
