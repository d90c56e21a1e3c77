"""What is planned runs: plans of the planner, served, give the tokens of `transformers`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.numerics.checkpoints import FAMILIES, VOCABULARY, random_shape, save
from tests.numerics.served import engine_on, greedy, run, served_here, served_on
from tests.planned import placements_of, planned, problem_of, scored
from tests.rings import examples
from xgpt.checkpoints.files import read_spec
from xgpt.serving.engine_process import build_engine
from xrunner.generation import Generation
from xsimulator.run import simulate

POLICIES = ("rra", "waa", "chunked", "orca", "static")


@pytest.mark.long
@pytest.mark.parametrize("name", ["t5-gated-untied", "t5-tied"])
def test_waa_plans_of_an_encoder_decoder(workers, checkpoint, name):
    directory, model = checkpoint(name)
    plan = planned(problem_of(directory, 2), "waa")
    encode = plan.stages[0]
    assert encode.decode_layers == (0, 0) and encode.kv_blocks > 100
    assert served_on(workers, plan) == greedy(model)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["orca", "waa"])
def test_an_encoder_decoder_whose_requests_are_preempted(workers, checkpoint, kind):
    directory, model = checkpoint("t5-tied")
    two = replace(problem_of(directory, 2), kv="quantile")
    plan = planned(two, kind, placements_of(two, kind)[0])
    few = [s if s.lane == "encode" else s.model_copy(update={"kv_blocks": 9}) for s in plan.stages]
    with engine_on(workers, plan.model_copy(update={"stages": tuple(few)})) as engine:
        assert run(engine) == greedy(model)
        assert engine.pool.num_preemptions


@pytest.mark.long
def test_prompts_of_several_slices_pass_a_pipeline_beside_decodes(workers, checkpoint):
    """They pass it twice, and are cut into the same slices both times: what decodes takes room of the first one."""
    directory, _ = checkpoint("t5-gated-untied")

    def tokens(engine):
        rng = np.random.default_rng(3)
        lengths = [*[5] * 9, *[60] * 40]
        waiting = [Generation(i, tuple(rng.integers(0, VOCABULARY, n).tolist()), 9) for i, n in enumerate(lengths)]
        outputs = {generation.id: [] for generation in waiting}
        for first, last in ((0, 9), (9, None)):
            for generation in waiting[first:last]:
                engine.submit(generation)
            for token in engine.step():
                outputs[token.id].append(token.token)
        assert sum(map(len, outputs.values())) > 9, "the second step encodes beside decodes"
        while (ended := engine.step()) is not None:
            for token in ended:
                outputs[token.id].append(token.token)
        return outputs

    two = problem_of(directory, 2)
    plan = scored(two, "orca", [[1, 1]], 1, max_batch=64)
    with engine_on(workers, plan) as engine:
        found = tokens(engine)
    alone = build_engine(scored(problem_of(directory, 1), "orca", [[1]], 1, max_batch=64))
    assert sum(len(counts) == 9 for counts in found.values()) == 49
    assert found == tokens(alone)
    alone.close()


@pytest.mark.long
def test_waa_plans_of_an_encoder_decoder_are_simulated(checkpoint):
    two = problem_of(checkpoint("t5-tied")[0], 2)
    plan = planned(two, "waa")
    measured, _ = simulate(plan, two.profile, two.workload, examples(4000, 1500), np.random.default_rng(1))
    assert measured.throughput_rps == pytest.approx(plan.estimate.throughput_rps, rel=0.05)


@pytest.mark.parametrize("tied", [True, False])
def test_plans_of_mt5(tmp_path, tied):
    """Published ones say that their head is not tied, have one stored, and scale nothing in front of it."""
    import transformers

    sizes = {"d_model": 40, "d_kv": 12, "num_heads": 4, "d_ff": 80, "num_layers": 2}
    config = transformers.MT5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes)
    torch.manual_seed(5)
    model = transformers.MT5ForConditionalGeneration(config).eval()
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            gain = 1.6 * (12**-0.5 if name.endswith("Attention.q.weight") else 1.0)
            torch.nn.init.normal_(weight, 0.0, gain * weight.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path / "mt5")
    spec = read_spec(tmp_path / "mt5")
    assert (spec.family, spec.gated_ffn, spec.head_scale, spec.tie_embeddings) == ("t5", True, 1.0, tied)
    assert served_here(planned(problem_of(tmp_path / "mt5", 1), "orca")) == greedy(model)


CASES = [
    pytest.param(number, id=f"{family}-{number}", marks=() if number in {2, 5, 23} else pytest.mark.long)
    for number, family in ((number, list(FAMILIES)[number % len(FAMILIES)]) for number in range(40))
]


@pytest.mark.long
@pytest.mark.parametrize("number", CASES)
def test_random_checkpoints_under_every_policy(workers, tmp_path, number):
    rng = np.random.default_rng([7, number])
    family = list(FAMILIES)[number % len(FAMILIES)]
    directory, model = save(tmp_path / "model", family, random_shape(rng, family))
    expected = greedy(model)
    alone, two = problem_of(directory, 1), problem_of(directory, 2)
    for kind in POLICIES:
        if kind != "waa":
            assert served_here(planned(alone, kind)) == expected, kind
        places = placements_of(two, kind)
        if places:  # heads or layers that two devices cannot share leave none
            plan = planned(two, kind, places[rng.integers(len(places))])
            assert served_on(workers, plan) == expected, (kind, plan.stages)
