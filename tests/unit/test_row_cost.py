"""Simulated rows: what is not padding costs what it costs flattened, and what is costs more."""

import pytest

from benchmarks.tcb.layouts import slotted_rows
from benchmarks.tcb.row_cost import RowCost
from xgpt.core.errors import InputError
from xgpt.core.policies.request import Request
from xgpt.core.policies.tcb import concatenated_rows, padded_rows
from xgpt.resolve import load_cluster, load_model
from xprofiler.analytic import profile


@pytest.fixture(scope="module")
def cost():
    spec, cluster = load_model("tcb-seq2seq")[0], load_cluster("v100x1")
    return RowCost(spec, profile(spec, cluster, "float16"))


def requests(lengths):
    return [Request(i, n, 10) for i, n in enumerate(lengths)]


def outputs(lengths):
    return dict(enumerate(lengths))


def test_rows_without_padding_cost_what_they_cost_flattened(cost):
    alike = requests([64] * 32)
    flattened = cost.flattened([64] * 32, [], []) + sum(cost.flattened([], [n] * 32, [64] * 32) for n in range(2, 11))
    assert cost.rows(padded_rows(alike), outputs([10] * 32)) == pytest.approx(flattened, rel=0.01)


def test_padding_and_waiting_for_the_longest_cost_more(cost):
    even = cost.rows(padded_rows(requests([64] * 32)), outputs([10] * 32))
    assert cost.rows(padded_rows(requests([64] * 31 + [100])), outputs([10] * 32)) > 1.02 * even
    assert cost.rows(padded_rows(requests([64] * 32)), outputs([10] * 31 + [20])) > 1.4 * even


def test_slots_save_attention_and_more_when_they_leave(cost):
    rows = [[Request(20 * i + j, 20, 10) for j in range(20)] for i in range(8)]
    slotted, left_over = slotted_rows(rows, 400, 40)
    assert not left_over
    answers = outputs([5 + (i * 7) % 20 for i in range(160)])
    pure = cost.rows(concatenated_rows(rows), answers)
    assert cost.rows(slotted, answers) < pure
    assert cost.rows(slotted, answers, free_slots=True) < cost.rows(slotted, answers)


def test_a_model_without_an_encoder_is_refused():
    spec, cluster = load_model("opt-13b")[0], load_cluster("v100x1")
    with pytest.raises(InputError, match="rows are simulated for encoder-decoders"):
        RowCost(spec, profile(spec, cluster, "float16"))
