"""Rows in eight bits: as plain torch has them, whatever the threads; what is not finite stays so."""

import pytest
import torch

from xrunner.cpu.quantised import quantise, rescale
from xrunner.cpu.threads import LEAST_SHARED


@pytest.mark.parametrize("shape", [(1, 5), (7, 48), (3, LEAST_SHARED)], ids=str)
def test_rows_are_rounded_to_the_nearest_of_255_steps(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rows, scale = quantise(x)
    assert rows.dtype == torch.int8 and (rows.abs().amax(dim=1) == 127).all()
    assert ((rows * scale[:, None] - x).abs() <= scale[:, None] * 0.5001).all()


@pytest.mark.parametrize("bias", [None, torch.tensor([0.5, -100.0, 0.0])])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("num_rows", [2, LEAST_SHARED])
def test_sums_are_scaled_back(bias, relu, num_rows):
    y = torch.randn(num_rows, 3, generator=torch.Generator().manual_seed(1))
    scale = torch.rand(num_rows, generator=torch.Generator().manual_seed(2))
    expected = y * scale[:, None] + (0.0 if bias is None else bias)
    actual = rescale(y, scale, bias, relu=relu)
    torch.testing.assert_close(actual, expected.relu() if relu else expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_stays_so_alone(bad):
    x = torch.ones(3, 20)
    x[1, 7] = bad
    rows, scale = quantise(x)
    y = rescale(rows.float(), scale, None, relu=True)
    assert y[[0, 2]].isfinite().all() and not y[1].isfinite().any()
    assert quantise(torch.zeros(1, 4))[0].eq(0).all()
