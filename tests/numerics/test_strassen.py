"""Seven products of halves: whole numbers exactly, of any number of rows, inputs and outputs; each row by itself."""

import pytest
import torch
from torch.nn.functional import linear

from xrunner.cpu import panels, strassen
from xrunner.cpu.packed import ACTIVATIONS, GATES
from xrunner.cpu.panels import Finish

pytestmark = pytest.mark.skipif(not panels.is_available(), reason="of processors with AVX-512")
LEAST, CHUNK = strassen.LEAST_ROWS, strassen.CHUNK
SHAPES = [(1, 2), (32, 64), (33, 66), (96, 202), (40, 5000), (130, 2050)]
"""Outputs and inputs: of one panel and of an odd number of them, of one block and of several."""
FINISHES = {Finish.NOTHING: "none", Finish.RELU: "relu", Finish.GATE: GATES["silu"]}


def made(shape, finish):
    """# [out, in], and a bias [out]; as many gates as what they gate"""
    outputs = shape[0] + shape[0] % 2 if finish is Finish.GATE else shape[0]
    return torch.randint(-9, 10, (outputs, shape[1])).float(), torch.randint(-9, 10, (outputs,)).float()


@pytest.mark.parametrize("rows", [LEAST, LEAST + 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1])
@pytest.mark.parametrize("finish", FINISHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_whole_numbers_are_exact(shape, finish, rows):
    torch.manual_seed(rows)
    weight, bias = made(shape, finish)
    x = torch.randint(-9, 10, (rows, shape[1])).float()
    product = strassen.pack(weight, finish)
    for b in (bias, None):
        expected = ACTIVATIONS[FINISHES[finish]](linear(x, weight, b))
        found = product(x, b)
        if finish is Finish.GATE:
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
        else:
            assert torch.equal(found, expected)


def test_rows_and_outputs_of_any_size_keep_their_own_precision():
    torch.manual_seed(0)
    x = torch.randn(200, 300) * 10.0 ** torch.randint(-18, 18, (200, 1))
    weight = torch.randn(128, 300) * 10.0 ** torch.randint(-9, 9, (128, 1))
    x[3], weight[7], weight[40] = 0.0, 0.0, 0.0  # outputs of a left and of a right panel
    of_rows, of_outputs = x.double().norm(dim=1), weight.double().norm(dim=1)
    most = of_rows.clamp(min=1e-30)[:, None] * of_outputs.clamp(min=1e-16 * float(of_outputs.max()))
    error = strassen.pack(weight)(x, None) - linear(x.double(), weight.double())
    assert (error.abs() <= 5e-7 * most).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_row_without_a_power_of_two_changes_no_bit_of_the_others(value):
    """Compared with panels, which such rows go to: each row's sums are its own there."""
    torch.manual_seed(0)
    weight, x = torch.randn(128, 64), torch.randn(LEAST + 5, 64)
    x[7, 3] = value
    found, expected = strassen.pack(weight)(x, None), panels.pack(weight)(x, None)
    assert torch.equal(found.isfinite(), expected.isfinite())
    rest = torch.arange(len(x)) != 7
    assert torch.equal(found[rest], expected[rest]) and expected[rest].isfinite().all()


def test_inputs_that_cannot_be_halved_are_multiplied_in_panels():
    weight, x = torch.randn(64, 33), torch.randn(LEAST, 33)
    assert torch.equal(strassen.pack(weight)(x, None), panels.pack(weight)(x, None))


def test_a_weight_that_is_not_finite_touches_no_other_output():
    weight, x = torch.randn(64, 32), torch.randn(LEAST, 32)
    weight[40, 3] = float("nan")
    assert strassen.pack(weight)(x, None).isnan().all(dim=0).nonzero().flatten().tolist() == [40]


def test_fewer_multiplications_give_other_roundings():
    """The tests above do not compare panels with themselves."""
    torch.manual_seed(0)
    weight, x = torch.randn(64, 64), torch.randn(LEAST, 64)
    assert not torch.equal(strassen.pack(weight)(x, None), panels.pack(weight)(x, None))
    assert torch.equal(strassen.pack(weight)(x[1:], None), panels.pack(weight)(x[1:], None))
