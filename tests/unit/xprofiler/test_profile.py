"""What a profile accepts, and what the datasheet makes of every shipped model and cluster."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.contract.scenarios import problem
from tests.rings import few
from xgpt.core.errors import InputError
from xgpt.core.io import config_names, parse
from xgpt.core.schema import ClusterSpec, DeviceKind, Link, Profile
from xgpt.core.schema.profile import MOST_HEADROOM, RESTLESS
from xgpt.resolve import load_cluster, load_model
from xprofiler import analytic, bench
from xprofiler.bench import SHORT_STEPS, Bench, jitter_of, least_certain, middle_mean, spread
from xprofiler.measurement_order import PASSES

CLUSTERS = [name for name in config_names("clusters") if name != "local"]


def of(model: str, cluster: str) -> Profile:
    spec, _ = load_model(model)
    return analytic.profile(spec, load_cluster(cluster), spec.default_dtype)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return of("t5-11b", "a40x8").model_dump(mode="json")


def changed(document: Any, path: tuple[Any, ...], value: object) -> Any:
    """A copy with one value replaced."""
    if not path:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[path[0]] = changed(copy[path[0]], path[1:], value)
    return copy


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("layers", 0, "rest", "seconds", 3), math.nan, "profile.layers.0.rest.seconds.3: nan"),
        (("layers", 0, "rest", "seconds", 3), math.inf, "profile.layers.0.rest.seconds.3: inf"),
        (("layers", 1, "decode_attention", "seconds", 0, 0), -1.0, "a time is negative"),
        (("hop", "seconds", 0), -1e-6, "a time is negative: -1e-06"),
        (("hop", "points", 1), 1, "points must rise"),
        (("head", "points", 0), -1, "a point is negative: -1"),
        (("layers", 0, "encode_attention", "lengths", 0), 4096, "lengths must rise"),
        (("layers", 0, "encode_attention", "batches", 0), -1, "batches: -1 is negative"),
        (("layers", 0, "tp_degree"), 2, "a pair of tp_degree and ep_degree is repeated"),
        (("encoder_layers",), (), "cross is needed at every degree"),
        (("encoder_layers", 0, "tp_degree"), 16, "must equal those of layers"),
        (("layers", 0, "cross"), None, "cross is needed at every degree"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    document: dict[str, Any], path: tuple[Any, ...], value: object, says: str
) -> None:
    with pytest.raises(InputError) as caught:
        parse(changed(document, path, value), Profile, "profile")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cluster", few(CLUSTERS))
def test_every_shipped_model_has_an_analytic_profile(cluster: str) -> None:
    devices = load_cluster(cluster)
    for model in config_names("models"):
        spec, _ = load_model(model)
        if spec.default_dtype not in devices.device.flops_per_s:
            continue
        profile = analytic.profile(spec, devices, spec.default_dtype)
        assert parse(profile.model_dump(mode="json"), Profile, "profile") == profile
        assert profile.tp_degrees[0] == 1
        assert max(profile.tp_degrees) <= devices.devices_per_node
        assert bool(profile.encoder_layers) == spec.is_encoder_decoder
        assert (profile.hop is None) == (devices.intra_node is None)
        assert (profile.inter_node_hop is None) == (devices.inter_node is None)
        assert profile.kv_transfer is not None


def test_degrees_share_heads_evenly() -> None:
    assert of("gpt3-175b", "a40x32").tp_degrees == (1, 2, 3, 4, 6, 8)  # 96 heads
    assert of("opt-13b", "a40x8").tp_degrees == (1, 2, 4, 5, 8)  # 40 heads
    assert of("opt-125m", "a40x8").tp_degrees == (1, 2, 3, 4, 6)  # 12 heads
    assert of("llama-3.1-70b", "h100x8").tp_degrees == (1, 2, 4, 8)


def test_a_larger_group_is_faster_but_not_in_proportion() -> None:
    profile = of("gpt3-175b", "a40x32")
    at_2048 = [layer.rest.seconds[layer.rest.points.index(2048)] for layer in profile.layers]
    for one, two in pairwise(at_2048):
        assert one / 2 < two < one
    attention = [layer.decode_attention.seconds[-1][-1] for layer in profile.layers]
    assert attention == pytest.approx([attention[0] / t for t in profile.tp_degrees])
    heads = [profile.head_of(t).seconds[0] for t in profile.tp_degrees]
    assert heads == sorted(heads, reverse=True)


def test_norms_over_all_heads_are_summed_up_over_a_group() -> None:
    spec, _ = load_model("minimax-m2")
    plain = spec.model_copy(update={"family": "qwen3_moe"})
    profiles = [analytic.profile(each, load_cluster("h200x8"), "bfloat16").layers for each in (spec, plain)]
    for spanning, apart in zip(*profiles, strict=True):
        more = np.asarray(spanning.rest.seconds) - np.asarray(apart.rest.seconds)
        assert (more > 0).all() if spanning.tp_degree > 1 else not more.any()


def test_copied_key_value_heads_save_no_time() -> None:
    """Sixteen devices for eight key/value heads: each reads a whole one."""
    spec, _ = load_model("llama-3.1-70b")
    cluster = load_cluster("h100x8").model_copy(update={"devices_per_node": 16})
    profile = analytic.profile(spec, cluster, "bfloat16")
    assert profile.layer(16).decode_attention == profile.layer(8).decode_attention


def test_an_encoder_looks_both_ways_and_a_decoder_makes_its_keys_once() -> None:
    spec, _ = load_model("t5-11b")
    profile = of("t5-11b", "a40x8")
    encoder, decoder = profile.encoder_layer(2), profile.layer(2)
    assert decoder.cross is not None
    assert encoder.attention.seconds[2][3] == pytest.approx(2 * decoder.encode_attention.seconds[2][3])
    assert decoder.cross.attention == decoder.decode_attention
    # Weights bind at one token: the encoder layer's, and all of a decoder layer's but cross keys and values.
    one = analytic.Kernels(load_cluster("a40x8"), "float16")
    alone = profile.layer(1)
    assert alone.cross is not None
    assert alone.rest.seconds[0] + alone.cross.keys_values.seconds[0] == pytest.approx(
        one.matrix(1, spec.decoder_layer_params) + one.efficiency.layer_s
    )
    with pytest.raises(KeyError):
        of("opt-13b", "a40x8").encoder_layer(1)


def test_links_are_charged_as_stated() -> None:
    """One token's hidden state of GPT-3 175B is 24,576 bytes, its K/V 4.7 MB."""
    cluster = load_cluster("a40x32")
    profile = of("gpt3-175b", "a40x32")
    assert profile.hop is not None and profile.inter_node_hop is not None and profile.kv_transfer is not None
    assert profile.hop.seconds[10] == pytest.approx(1024 * 24576 / (32e9 * 0.8) + 7e-6)
    assert profile.inter_node_hop.seconds[10] == pytest.approx(1024 * 24576 / (12.5e9 * 0.8) + 10e-6)
    assert profile.kv_transfer.seconds[10] == pytest.approx(1024 * 96 * 2 * 24576 / (32e9 * 0.8) + 20e-6)
    kernels = analytic.Kernels(cluster, "float16")
    assert kernels.all_reduce(1e6, 1) == 0
    assert kernels.all_reduce(1e6, 4) == pytest.approx(1.5 * 2e6 / (32e9 * 0.59) + 6 * 7e-6)


@pytest.mark.parametrize("is_fitted", [True, False])
def test_devices_exchange_half_precision_if_products_are_in_float8(is_fitted: bool) -> None:
    cluster, (spec, _) = load_cluster("h100x32"), load_model("llama-3.1-8b")
    if not is_fitted:
        device = cluster.device.model_copy(update={"efficiency_float8": None})
        cluster = cluster.model_copy(update={"device": device})
    half, eight = (analytic.profile(spec, cluster, dtype) for dtype in ("bfloat16", "float8"))
    assert (eight.hop, eight.inter_node_hop) == (half.hop, half.inter_node_hop)
    assert (eight.head, eight.layer(8).head) == (half.head, half.layer(8).head)
    of_half, of_eight = (analytic.Kernels(cluster, dtype) for dtype in ("bfloat16", "float8"))
    assert of_eight.all_reduce(1e6, 8) == of_half.all_reduce(1e6, 8)
    assert of_eight.matrix(1, 1e9) < 0.6 * of_half.matrix(1, 1e9)


def test_devices_exchange_float32_if_the_engine_computes_in_it() -> None:
    cpu = DeviceKind(
        name="cpu", type="cpu", memory_bytes=2**36, flops_per_s={"int8": 4e12}, memory_bandwidth_bytes_per_s=1e11
    )
    cluster = ClusterSpec(
        name="two", device=cpu, devices_per_node=2, intra_node=Link(bandwidth_bytes_per_s=1e10, latency_s=0)
    )
    hop = analytic.profile(load_model("llama-3.1-8b")[0], cluster, "int8").hop
    assert hop is not None and hop.seconds[10] == pytest.approx(1024 * 4096 * 4 / (1e10 * 0.8))


def test_a_device_without_a_rate_says_so() -> None:
    spec, _ = load_model("llama-3.1-8b")
    with pytest.raises(InputError, match=r"v100-sxm2-16gb.*flops_per_s\.bfloat16"):
        analytic.profile(spec, load_cluster("v100x1"), "bfloat16")


def test_the_spread_is_of_stretches_and_one_stall_does_not_hide_it() -> None:
    rng = np.random.default_rng(0)
    steps = list(rng.normal(1.0, 0.1, 300))
    assert 0.05 < spread(steps) < 0.10  # single steps: 0.13
    stalled = [*steps[:200], 60.0, *steps[200:]]
    assert np.quantile(stalled, 0.9) < np.mean(stalled)
    assert spread([1.0, 1.0, 1.5] * 10) == pytest.approx(0.0)  # any three seconds are like any others
    assert spread([1.0, 1.0, 8.0] + [1.0] * 17) > 0.0


def test_jitter_is_of_single_short_steps_and_keeps_their_stalls() -> None:
    found = jitter_of([1.0] * 980 + [3.0] * 20)
    mean = found["short step", 0]
    ratios = [found["jitter", i] for i in range(100)]
    assert mean == pytest.approx(1.04)
    assert ratios == sorted(ratios) and np.mean(ratios) == pytest.approx(1.0)
    assert ratios[97] == pytest.approx(1 / mean) and ratios[98:] == pytest.approx([3 / mean] * 2)


def test_a_moment_of_other_work_is_no_part_of_a_point() -> None:
    assert middle_mean([1.0, 1.2, 1.1, 1.5, 0.5]) == pytest.approx(1.1)
    assert middle_mean([1.0, 2.0]) == 1.5


def idle_worker() -> Any:
    """A worker without a model: what is measured is a test's own."""
    model = SimpleNamespace(spec=None)
    return SimpleNamespace(model=model, cache=SimpleNamespace(layers=()))


@pytest.mark.parametrize(("in_group", "expected"), [(False, 24), (True, 24 + 24 * (1 + SHORT_STEPS) + 64 * PASSES)])
def test_workers_meet_before_every_call_of_a_group_and_else_before_every_sixteenth(
    *, in_group: bool, expected: int
) -> None:
    meetings = 0

    def meet() -> None:
        nonlocal meetings
        meetings += 1

    class Fake(Bench):
        def typical_step(self) -> float:
            return self.seconds(lambda: None)

        short_step = typical_step

        def jobs(self) -> bench.Jobs:
            return {("point", number): self.typical_step for number in range(64)}

    Fake(idle_worker(), lambda done, total, what: None, meet, in_group=in_group).measure()
    assert meetings == expected


@pytest.mark.parametrize("stalls", [False, True])
def test_restless_minutes_repeat_the_worst_points(monkeypatch: pytest.MonkeyPatch, *, stalls: bool) -> None:
    """One point in eight varies; the typical step tells whether the minutes are restless."""
    calls: dict[tuple[str | int, ...], int] = {}
    rng = np.random.default_rng(0)

    class Fake(Bench):
        def typical_step(self) -> float:
            return float(rng.exponential()) if stalls else 1.0

        def short_step(self) -> float:
            return float(rng.choice([0.9, 1.0, 1.1]))

        def job(self, number: int) -> float:
            calls["point", number] = calls.get(("point", number), 0) + 1
            return 1.0 + (number % 8 == 0) * float(rng.random())

        def jobs(self) -> bench.Jobs:
            return {("point", number): lambda number=number: self.job(number) for number in range(64)}

    found = Fake(idle_worker(), lambda done, total, what: None).measure()
    assert (found["spread", 0] > RESTLESS) == stalls
    assert found["short step", 0] == pytest.approx(1.0, abs=0.02)
    assert (found["jitter", 0], found["jitter", 99]) == pytest.approx((0.9, 1.1), abs=0.02)
    repeated = {number for (_, number), count in calls.items() if count > min(calls.values())}
    assert repeated >= {0, 8, 16, 24, 32, 40, 48, 56} if stalls else not repeated
    assert len(least_certain({("point", n): [1.0, 1.0, 1.0 + n] for n in range(8)})) == 2


@pytest.mark.parametrize(("source", "least"), [("measured", 0.05), ("imported", 0.10), ("analytic", 0.12)])
def test_headroom_follows_what_the_times_come_from(source: str, least: float) -> None:
    profile = problem("opt-125m", "v100x1", "summarization").profile
    of_kind = profile.model_copy(update={"source": source})
    assert of_kind.headroom == least
    assert of_kind.model_copy(update={"spread": 0.17}).headroom == 0.17
    assert of_kind.model_copy(update={"spread": 0.46}).headroom == MOST_HEADROOM
    others = {"others": {"make": 0.05, "steal": 0.05}, "num_threads": 2}
    assert of_kind.model_copy(update=others).headroom == pytest.approx(least + 0.05)
