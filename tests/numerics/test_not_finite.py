"""A request whose logits are NaN fails alone: nothing is said of it, and the others' tokens stay as they are."""

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.numerics.checkpoints import OPT_SHAPES, VOCABULARY, save
from tests.planned import placements_of, planned, problem_of
from xgpt.core import policies
from xgpt.serving.engine_process import build_engine
from xrunner.cluster.deployment import Deployment
from xrunner.cluster.executor import RemoteExecutor
from xrunner.engine import Engine
from xrunner.generation import GREEDY, NO_TOKEN, Generation, SamplingParams

POISON = 7
"""A token whose embedding overflows in the first norm."""
RNG = np.random.default_rng(4)
PROMPTS = [RNG.integers(8, VOCABULARY, n).tolist() for n in (5, 20, 33, 16, 9)]
POISONED = {1: 3, 3: 15}
"""Requests, and where the token stands in their prompts."""
SAMPLED = SamplingParams(temperature=0.9, seed=5, frequency_penalty=0.3, logprobs=2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory, _ = save(tmp_path_factory.mktemp("poisoned"), "opt", OPT_SHAPES["tied"] | {"tie_word_embeddings": False})
    path = directory / "model.safetensors"
    tensors = load_file(path)
    row = tensors["model.decoder.embed_tokens.weight"][POISON]
    row[::2], row[1::2] = 3e38, -3e38
    save_file(tensors, path, {"format": "pt"})
    return directory


def run(engine, sampling, poisoned):
    """Tokens and ends of all requests."""
    outputs, ends = [[] for _ in PROMPTS], {}
    for id_, prompt in enumerate(PROMPTS):
        prompt = list(prompt)
        if id_ in poisoned:
            prompt[poisoned[id_]] = POISON
        engine.submit(Generation(id_, tuple(prompt), 6, sampling=sampling))
    while len(ends) < len(PROMPTS):
        for token in engine.step():
            outputs[token.id].append(token.token)
            if token.finish:
                ends[token.id] = token.finish
    return outputs, ends


def check(serve, sampling):
    expected, _ = run(serve(), sampling, {})
    outputs, ends = run(serve(), sampling, POISONED)
    for id_, output in enumerate(outputs):
        assert output == ([NO_TOKEN] if id_ in POISONED else expected[id_])
        assert ends[id_] == ("error" if id_ in POISONED else "length")


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["rra", "chunked", "orca", "static"])
def test_on_one_device(directory, kind, sampling):
    plan = planned(problem_of(directory, 1), kind)
    check(lambda: build_engine(plan), sampling)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batching", ["padded", "rows", "slots"])
def test_in_rows(directory, batching, sampling):
    plan = planned(problem_of(directory, 1), "static")
    check(lambda: build_engine(plan, batching=batching), sampling)


@pytest.mark.long
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["static", "waa"])
def test_on_two_devices(directory, workers, kind, sampling):
    problem = problem_of(directory, 2)
    for placement in {place.layouts: place for place in placements_of(problem, kind)}.values():
        plan = planned(problem, kind, placement)
        executor = RemoteExecutor(workers, Deployment.of(plan))

        def serve(executor=executor, plan=plan):
            executor.deploy()
            return Engine(policies.build(plan), executor)

        try:
            check(serve, sampling)
        finally:
            executor.disconnect()
