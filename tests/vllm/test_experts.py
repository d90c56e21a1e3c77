"""A checkpoint with experts: our rule inside vLLM gives the tokens of vLLM's own scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.offline import ROOM, draw_requests, generate, start
from tests.vllm.plans import plan_with
from xgpt.core.io import dump_json, read_step_log
from xgpt.core.schema import ChunkedSettings
from xrunner.vllm.lane import build_lane
from xsimulator.events import replay

SHAPE = {
    "vocab_size": 50272,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("with-experts")
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE))
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, 0.0, 1.5 * weight.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    return directory


def test_tokens_are_vllms_and_steps_the_rules(with_experts: Path, tmp_path: Path) -> None:
    requests = draw_requests()
    llm = start(with_experts, "vllm.v1.core.sched.scheduler.Scheduler", {})
    expected = generate(llm, requests)
    llm.llm_engine.engine_core.shutdown()

    plan, path, log = (
        plan_with(ChunkedSettings(token_budget=96, max_batch=12)),
        tmp_path / "plan.json",
        tmp_path / "log",
    )
    path.write_text(dump_json(plan))
    llm = start(with_experts, "xrunner.vllm.scheduler.XgptScheduler", {"plan": str(path), "step_log": str(log)})
    tokens = generate(llm, requests)
    llm.llm_engine.engine_core.shutdown()
    assert tokens == expected
    assert len({token for output in tokens for token in output}) > 100, "tokens too alike to mean anything"
    records = read_step_log(log)
    steps = [(record.encode, record.decode, record.finished) for record in records]
    assert [(r.encode, r.decode, r.finished) for r in replay(build_lane(plan, ROOM), records)] == steps
