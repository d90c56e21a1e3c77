"""Products by matrix registers: whole numbers exactly, of any number of rows, inputs and outputs."""

import pytest
import torch

from xrunner.cpu import matrix_panels

if not matrix_panels.is_available():
    pytest.skip("this processor has no matrix registers", allow_module_level=True)

SHAPES = [(1, 1), (32, 64), (33, 65), (96, 200), (40, 5000)]


def rounded(x):
    """Rows as they are rounded to eight bits, and their scales."""
    scales = x.abs().amax(dim=1) / 127
    return (x * (1 / scales)[:, None]).round().double(), scales


@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 17, 32, 33, 48, 49, 255, 300])
@pytest.mark.parametrize("shape", SHAPES)
def test_eight_bits_are_exact_but_for_their_scales(shape, rows):
    torch.manual_seed(rows)
    weight, scales, bias = (
        torch.randint(-127, 128, shape, dtype=torch.int8),
        torch.rand(shape[0]) + 0.1,
        torch.ones(shape[0]),
    )
    x = torch.randn(rows, shape[1])
    numbers, of_rows = rounded(x)
    expected = numbers @ weight.double().T * scales * of_rows[:, None] + 1
    found = matrix_panels.pack(weight, scales)(x, bias)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_threads_share_a_product():
    x, product = torch.randn(70, 900), matrix_panels.pack(torch.ones(50, 900, dtype=torch.int8), torch.ones(50))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(product(x, None))
    finally:
        torch.set_num_threads(before)
    assert results[0].equal(results[1])


def test_numbers_that_are_none_stay_in_their_row():
    product = matrix_panels.pack(torch.ones(40, 70, dtype=torch.int8), torch.ones(40))
    x = torch.ones(20, 70)
    x[3, 5], x[4, 0] = float("nan"), float("inf")
    found = product(x, None)
    assert found[3].isnan().all() and not found[4].isfinite().any()
    assert found[[0, 1, 2, *range(5, 20)]].allclose(torch.tensor(70.0))
