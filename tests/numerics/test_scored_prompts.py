"""Log probabilities of prompts: the engine's are those of the model, however steps cut a prompt."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from xgpt.checkpoints.files import read_spec
from xgpt.core.policies import LaneSettings, OneLane, Pool
from xrunner import worker as workers
from xrunner.build import WorkerSettings, build_worker
from xrunner.engine import Engine
from xrunner.generation import Generation, SamplingParams

SCORED = SamplingParams(logprobs=2, prompt_logprobs=2)


@pytest.mark.parametrize(("budget", "at_once"), [(7, 128), (64, 128), (64, 5)])
def test_prompts_are_scored_however_they_are_cut(small_opt, monkeypatch, budget, at_once):
    """Some others that are not have left the same blocks; each prompt is scored once, with its first token."""
    monkeypatch.setattr(workers, "SCORED_TOKENS", at_once)
    directory, model = small_opt
    worker = build_worker(
        WorkerSettings(spec=read_spec(directory), dtype="float32", num_blocks=60, block_size=8, checkpoint=directory)
    )
    schedule = OneLane(LaneSettings(mix=True, token_budget=budget, max_batch=8), Pool(60, 8))
    engine = Engine(schedule, worker, reuse=True)
    assert engine.scores_prompts
    shared = tuple(np.random.default_rng(2).integers(0, 211, 40).tolist())
    prompts = [shared[:1], shared[:9], shared, shared, (*shared[:24], 5)]
    plain = {}
    for round_ in range(2):  # in the second, all prompts' blocks are there
        for index, prompt in enumerate(prompts):
            sampling = SCORED if (index + round_) % 2 == 0 else SamplingParams()
            engine.submit(Generation(10 * round_ + index, prompt, 3, sampling=sampling))
        by_request, outputs = {}, {}
        while (tokens := engine.step()) is not None:
            for token in tokens:
                outputs.setdefault(token.id % 10, []).append(token.token)
                if token.logprobs is not None:
                    by_request.setdefault(token.id % 10, []).append(token.logprobs.prompt)
        assert outputs == (plain or outputs)
        plain = outputs
        assert sorted(by_request) == [index for index in range(len(prompts)) if (index + round_) % 2 == 0]
        for index, (scores, *rest) in by_request.items():
            assert rest == [(), ()]
            prompt = torch.tensor(prompts[index])
            with torch.inference_mode():
                expected = model(prompt[None]).logits[0, :-1].log_softmax(dim=-1)
            logprobs = expected.gather(-1, prompt[1:, None])[:, 0].tolist()
            assert [score.chosen for score in scores] == pytest.approx(logprobs, abs=1e-3)
            best = expected.topk(2, dim=-1).values.tolist()
            assert [[value for _, value in score.top] for score in scores] == [pytest.approx(b, abs=1e-3) for b in best]
    assert schedule.pool.memory.decodes.num_used == 0
