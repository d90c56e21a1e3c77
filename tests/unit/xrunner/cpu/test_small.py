"""Small operations on CPUs equal torch's, of few rows and of many, which threads share."""

import pytest
import torch
from torch.nn import functional as F

from xrunner.cpu import small
from xrunner.sampling import NO_TOKEN, highest


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 700])
def test_they_equal_torchs(num_tokens: int) -> None:
    torch.manual_seed(0)
    heads = torch.randn(num_tokens, 7, 24).split((4, 3), dim=1)[1]  # a part: not contiguous
    weight = torch.randn(24)
    torch.testing.assert_close(small.rms_norm(heads, weight, 1e-6), F.rms_norm(heads, (24,), weight, 1e-6))
    angles = torch.randn(num_tokens, 12)
    a, b = heads.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    torch.testing.assert_close(small.rotate(heads, angles.cos(), angles.sin()), turned)
    both = 30 * torch.randn(num_tokens, 130)
    gate, up = both.chunk(2, dim=-1)
    torch.testing.assert_close(small.gate(both), F.silu(gate) * up)


def test_what_is_not_finite_stays_so() -> None:
    bad = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0]])
    assert not small.rms_norm(bad, torch.ones(2), 1e-6).isfinite().all(dim=1).any()
    assert not small.gate(torch.cat((bad[:, :1], torch.ones(2, 1)), dim=1)).isfinite().any()


def test_the_highest_logit_is_the_first_of_equals_and_none_where_it_is_not_finite() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [1.0, float("nan"), 9.0], [float("inf"), 0.0, 0.0], [-9.0, -8.0, -7.0]])
    assert highest(logits).tolist() == [1, NO_TOKEN, NO_TOKEN, 2]
    assert highest(logits[:0]).tolist() == []
