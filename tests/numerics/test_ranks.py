"""Two devices measured at work together: every degree, hops and transfers, in one profile."""

import pytest

import xgpt
from xgpt.core.machine import detect, num_cores
from xgpt.core.schema import Workload
from xgpt.resolve import load_model
from xprofiler import measure, ranks


@pytest.mark.long
@pytest.mark.skipif(num_cores() < 2, reason="two devices need a core each")
def test_a_profile_of_two_cores():
    spec, _ = load_model("opt-125m")
    spec = spec.model_copy(update={"num_layers": 2, "max_context": 128, "vocab_size": 500})
    profile = measure.profile(spec, detect(2), "float32")
    assert profile.tp_degrees == (1, 2)
    assert profile.hop is not None and profile.kv_transfer is not None
    assert profile.kv_transfer.seconds[-1] > profile.kv_transfer.seconds[0] > 0
    alone, together = (profile.layer(degree).rest.seconds[-1] for degree in (1, 2))
    assert 0.3 * alone < together < alone  # a large step is worth sharing


@pytest.mark.long
@pytest.mark.skipif(num_cores() < 2, reason="devices need cores")
def test_three_devices_are_planned_as_a_pair_and_a_single_one():
    """The third device computes alone while the first two are measured together."""
    spec, _ = load_model("opt-125m")
    spec = spec.model_copy(update={"num_layers": 3, "max_context": 128, "vocab_size": 500})
    three = detect(2).model_copy(update={"name": "three", "devices_per_node": 3})
    profile = measure.profile(spec, three, "float32")
    assert profile.tp_degrees == (1, 2, 3)
    workload = Workload.model_validate(
        {
            "name": "short",
            "input": {"lengths": [8, 24], "probabilities": [0.5, 0.5]},
            "output": {"lengths": [9], "probabilities": [1.0]},
        }
    )
    asked = {
        "model": spec,
        "cluster": three,
        "workload": workload,
        "profile": profile,
        "policy": "rra",
        "objective": "saturated",
    }
    plan = xgpt.plan(latency_bound_s=None, **asked, fix={"tp": 2, "tp_devices": 2, "replicas": 1})
    assert [stage.tp for stage in plan.stages] == [2, 1]
    assert sum(stage.decode_layers[1] - stage.decode_layers[0] for stage in plan.stages) == 3


@pytest.mark.parametrize(
    ("num_devices", "expected"),
    [(2, (1, 2)), (3, (1, 2, 3)), (4, (1, 2, 4)), (5, (1, 2, 4, 5)), (6, (1, 2, 3, 4, 6)), (7, (1, 2, 4, 7))],
)
def test_degrees_suit_devices_and_heads(num_devices, expected):
    spec, _ = load_model("opt-125m")
    assert ranks.degrees(spec, num_devices) == expected
    assert 3 not in ranks.degrees(spec.model_copy(update={"num_heads": 4, "num_kv_heads": 2}), 6)
