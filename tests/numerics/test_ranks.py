"""Two devices measured at work together: every degree, hops and transfers, in one profile."""

import pytest

from xgpt.core.machine import detect, num_cores
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


@pytest.mark.parametrize(("num_devices", "expected"), [(2, (1, 2)), (4, (1, 2, 4)), (6, (1, 2, 3, 6))])
def test_degrees_divide_devices_and_suit_the_heads(num_devices, expected):
    spec, _ = load_model("opt-125m")
    assert ranks.degrees(spec, num_devices) == expected
    assert 3 not in ranks.degrees(spec.model_copy(update={"num_heads": 4, "num_kv_heads": 2}), 6)
