"""An engine that launches a prompt's kernels one by one holds its device meanwhile: other requests wait."""

import pytest

from xgpt.checkpoints.files import spec_of
from xgpt.resolve import load_cluster, load_engine, load_model
from xprofiler import analytic, launches
from xsimulator.costs.step_cost import LaneCost, StepCounts
from xsimulator.stages import whole

FLASH = {
    "model_type": "glm4_moe_lite",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
}


@pytest.mark.parametrize("name", ["llama-3.1-70b", "qwen3-235b-a22b"])
def test_steps_with_prompts_last_longer_by_their_launches(name: str) -> None:
    (spec, _), engine, cluster = load_model(name), load_engine("sglang"), load_cluster("h200x8")
    assert engine.launch_s > 0

    def step_s(launch_s: float, step: StepCounts) -> float:
        of = engine.model_copy(update={"launch_s": launch_s})
        profile = analytic.profile(spec, cluster, "bfloat16", of)
        return LaneCost(spec, profile, whole(spec, 8), engine=of).step(step)[0]

    prompts, decodes = StepCounts.of(((0, 500, 1), (0, 300, 1)), []), StepCounts.of((), [700] * 16)
    number = sum(launches.of_layer(kind, 8) * len(kind.layers) for kind in spec.kinds)
    more = step_s(engine.launch_s, prompts) - step_s(0.0, prompts)
    assert more == pytest.approx(number * engine.launch_s, rel=1e-6)
    assert step_s(engine.launch_s, decodes) == step_s(0.0, decodes)


def test_a_layer_with_experts_launches_more_kernels_than_a_dense_one() -> None:
    spec = spec_of(FLASH, "glm-4.7-flash")  # latent attention in a family that only other engines run
    dense, experts = (launches.of_layer(kind, 1) for kind in spec.kinds)
    assert sum(spec.sizes.whole(kind) * len(kind.layers) for kind in spec.kinds) == pytest.approx(29.3e9, rel=0.01)
    assert experts > dense > launches.of_layer(load_model("llama-3.1-8b")[0].kinds[0], 1)
