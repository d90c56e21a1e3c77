"""What an encoder-decoder has of its own. That its logits and tokens equal transformers', test_families.py says."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import xrunner.models.encoder_decoder as encoder_decoder
import xrunner.worker as worker_module
from tests.contract.scenarios import problem
from tests.numerics.checkpoints import T5_START, VOCABULARY, load_checkpoint
from tests.numerics.test_families import compare, make_worker, must_differ
from tests.numerics.test_weights import copy_with
from tests.rings import few
from xgpt.checkpoints.files import read_spec
from xgpt.core import policies
from xgpt.core.errors import InputError
from xgpt.core.policies import LaneSettings, OneLane, Pool
from xrunner.build import WorkerSettings, build_worker, warm_up
from xrunner.engine import Engine
from xrunner.generation import Generation
from xrunner.models import EncoderDecoderModel
from xrunner.models.layers import RelativeBias
from xscheduler.schedule import Scheduler
from xsimulator.events import replay
from xsimulator.run import simulate

CHUNKED = LaneSettings(mix=True, token_budget=16, max_batch=9)
ORCA = LaneSettings(mix=True, max_batch=9)


def test_spec_of_a_checkpoint(checkpoint):
    spec = read_spec(checkpoint("t5-gated-untied")[0])
    assert (spec.family, spec.num_encoder_layers, spec.num_layers, spec.hidden_size) == ("t5", 3, 2, 60)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (5, 5, 22)
    assert (spec.gated_ffn, spec.activation, spec.ffn_size) == (True, "gelu_tanh", 101)
    assert (spec.tie_embeddings, spec.head_scale, spec.bos_token_id) == (False, 1.0, T5_START)
    spec = read_spec(checkpoint("t5-few-buckets")[0])
    assert (spec.num_encoder_layers, spec.num_layers, spec.gated_ffn, spec.activation) == (1, 3, False, "relu")
    assert (spec.relative_buckets, spec.relative_max_distance) == (8, 20)
    assert (spec.tie_embeddings, spec.head_scale) == (True, 42**-0.5)


LATER = (
    "scale_decoder_outputs",
    "tie_word_embeddings",
    "feed_forward_proj",
    "is_gated_act",
    "dense_act_fn",
    "relative_attention_max_distance",
)


@pytest.mark.parametrize(
    ("name", "kept"),
    [("t5-tied", {}), ("t5-gated-untied", {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"})],
)
def test_configs_of_older_checkpoints(checkpoint, tmp_path, name, kept):
    """They leave out what later became a setting; T5 1.1 and Flan-T5 say only that their head is not tied."""
    directory, _ = checkpoint(name)
    older = copy_with(directory, tmp_path / "older")
    config = json.loads((older / "config.json").read_text())
    config = {field: value for field, value in config.items() if field not in LATER} | kept
    (older / "config.json").write_text(json.dumps(config))
    assert read_spec(older) == read_spec(directory).model_copy(update={"name": "older"})


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (8, 20), (9, 50)])
def test_buckets_are_those_of_transformers(checkpoint, bidirectional, buckets, longest):
    from transformers.models.t5.modeling_t5 import T5Attention

    spec = read_spec(checkpoint("t5-tied")[0])
    spec = spec.model_copy(update={"relative_buckets": buckets, "relative_max_distance": longest})
    distance = torch.arange(-300, 300)
    expected = T5Attention._relative_position_bucket(distance, bidirectional, buckets, longest)
    assert torch.equal(RelativeBias(torch.empty, spec, bidirectional=bidirectional).bucket(distance), expected)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_the_comparison_notices_a_dropped_position_bias(checkpoint, stack):
    must_differ(*checkpoint("t5-tied"), lambda worker: getattr(worker.model, stack).position_bias.weight.zero_())


def test_the_comparison_notices_an_encoder_that_looks_back_only(checkpoint, monkeypatch):
    both_ways = encoder_decoder.reading_batch
    monkeypatch.setattr(encoder_decoder, "reading_batch", lambda lengths: replace(both_ways(lengths), both_ways=False))
    must_differ(*checkpoint("t5-tied"))


def test_the_comparison_notices_a_decoder_that_looks_at_prompts_too(checkpoint, monkeypatch):
    decoded_tokens = encoder_decoder.own_tokens
    monkeypatch.setattr(encoder_decoder, "own_tokens", lambda batch: replace(decoded_tokens(batch), first_key=None))
    monkeypatch.setattr(EncoderDecoderModel, "own_bias", lambda model, _: model.decoder.position_bias.of_places(256))
    must_differ(*checkpoint("t5-tied"))


def test_the_comparison_notices_dropped_cross_attention(checkpoint):
    def drop(worker):
        for layer in worker.model.decoder.layers:
            layer.cross.forward = lambda hidden, memory, attend: torch.zeros_like(hidden)

    must_differ(*checkpoint("t5-tied"), drop)


def test_the_comparison_notices_a_head_that_is_not_scaled(checkpoint):
    def drop(worker):
        worker.model.spec = worker.model.spec.model_copy(update={"head_scale": 1.0})

    must_differ(*checkpoint("t5-tied"), drop)


def test_the_comparison_notices_another_start(checkpoint):
    must_differ(*checkpoint("t5-tied"), lambda worker: setattr(worker.model, "decoder_start", (T5_START + 1,)))


def test_a_warm_worker_computes_the_same(checkpoint):
    directory, model = checkpoint("t5-tied")
    worker = make_worker(directory, "numba")
    warm_up(worker)
    compare(worker, model)


def run(directory, lane, cancelled=(), **memory):
    """Tokens of eight requests; `cancelled` leave after the second step."""
    worker = make_worker(directory, "reference")
    pool = Pool(**{"kv_blocks": 64, "block_size": 8, "encoder": True} | memory)
    engine = Engine(OneLane(lane, pool), worker)
    rng = np.random.default_rng(2)
    outputs = {id_: [] for id_ in range(8)}
    for id_ in outputs:
        engine.submit(Generation(id_, tuple(rng.integers(0, VOCABULARY, 20).tolist()), max_output=6))
    steps, pieces = 0, set()
    while (tokens := engine.step()) is not None:
        steps += 1
        for token in tokens:
            outputs[token.id].append(token.token)
        if steps == 2:
            pieces = {id_ for id_ in pool.encoding if pool.running[id_].encoded}
            for id_ in cancelled:
                engine.cancel(id_)
    assert pool.memory.decodes.num_used == 0
    return outputs, pieces


def test_pieces_and_slices_change_nothing(checkpoint, monkeypatch):
    directory, _ = checkpoint("t5-tied")
    whole, _ = run(directory, ORCA)
    pieces, begun = run(directory, CHUNKED)
    monkeypatch.setattr(worker_module, "SLICE_TOKENS", 7)
    sliced, _ = run(directory, ORCA)
    assert begun and whole == pieces == sliced


def test_a_request_that_leaves_between_its_pieces(checkpoint):
    directory, _ = checkpoint("t5-tied")
    everyone, begun = run(directory, CHUNKED)
    rest, _ = run(directory, CHUNKED, cancelled=(0, *begun))
    assert begun and not any(rest[id_] for id_ in begun) and len(rest[0]) < 6
    assert all(rest[id_] == everyone[id_] for id_ in everyone if id_ not in {0, *begun})


@pytest.mark.parametrize("kv_blocks", [9, 14])
def test_preempted_requests_have_the_same_tokens(checkpoint, monkeypatch, kv_blocks):
    directory, _ = checkpoint("t5-tied")
    whole, _ = run(directory, ORCA)
    preempted = []
    take_out = Pool._preempt_last
    monkeypatch.setattr(Pool, "_preempt_last", lambda pool: preempted.append(take_out(pool)))
    assert run(directory, ORCA, kv_blocks=kv_blocks, kv="quantile")[0] == whole
    assert len(preempted) > 1


@pytest.mark.long
@pytest.mark.parametrize("kind", few(["waa", "rra", "orca"]))
def test_quantile_plans_are_simulated_and_replayed(kind):
    subject = replace(problem("t5-11b", "a40x4", "translation", 20.0), kv="quantile")
    plan = Scheduler(subject).best([kind])
    assert plan.admission.kv == "quantile" and plan.admission.max_running
    stages = tuple(
        stage if stage.lane == "encode" else stage.model_copy(update={"kv_blocks": stage.kv_blocks // 3})
        for stage in plan.stages
    )
    for blocks in (plan.stages, stages):
        plan = plan.model_copy(update={"stages": blocks})
        measured, log = simulate(plan, subject.profile, plan.workload, 400, np.random.default_rng(0))
        assert replay(policies.build(plan), log) == log
    assert measured.preemptions


def test_what_does_not_go_with_an_encoder_is_refused(checkpoint):
    directory, _ = checkpoint("t5-tied")
    spec = read_spec(directory)
    with pytest.raises(InputError, match="t5 runs in float32, bfloat16, int8"):
        build_worker(WorkerSettings(spec=spec, dtype="float16", num_blocks=8))


def test_a_head_that_is_stored_is_used(checkpoint):
    tied, untied = (load_checkpoint(checkpoint(name)[0]) for name in ("t5-tied", "t5-gated-untied"))
    assert tied.lm_head.weight is tied.token_embedding.weight
    assert torch.equal(untied.lm_head.weight, checkpoint("t5-gated-untied")[1].lm_head.weight)
