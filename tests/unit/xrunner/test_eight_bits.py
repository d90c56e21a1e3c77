"""Rows in eight bits: as plain torch has them; what is not finite stays so."""

import pytest
import torch

from xrunner.eight_bits import BLOCK, fits, quantise, scaled


@pytest.mark.parametrize("shape", [(1, 5), (7, 48), (3, 4096)], ids=str)
def test_rows_are_rounded_to_the_nearest_of_255_steps(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rows, scale = quantise(x)
    assert rows.dtype == torch.int8 and (rows.abs().amax(dim=1) == 127).all()
    assert ((rows * scale[:, None] - x).abs() <= scale[:, None] * 0.5001).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_only_a_row_that_is_not_finite_has_a_scale_that_is_not(bad):
    x = torch.ones(3, 20)
    x[1, 7] = bad
    rows, scale = quantise(x)
    assert scale.isfinite().tolist() == [True, False, True] and not rows[1].any()
    assert quantise(torch.zeros(1, 4))[0].eq(0).all()


def test_a_matrix_may_have_as_many_blocks_as_rows():
    """As the output projections of DeepSeek-V3 have: 56 times 128 blocks, and 7168 rows."""
    shape, scales = [256, 16384], torch.rand(2, 128)
    numbers = torch.randint(-127, 128, shape, dtype=torch.int8)
    assert fits([2, 128], shape)
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    assert torch.equal(scaled(numbers, scales, shape, (slice(None), slice(None))), numbers.float() * wide)
