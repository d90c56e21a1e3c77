"""Plans served on this machine: the tokens of a few prompts, and what `transformers` makes of them."""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch

from tests.numerics.checkpoints import VOCABULARY
from xgpt.core import policies
from xgpt.serving.engine_process import build_engine
from xrunner.cluster.deployment import Deployment
from xrunner.cluster.executor import RemoteExecutor
from xrunner.engine import Engine
from xrunner.generation import Generation

RNG = np.random.default_rng(11)
PROMPTS = [tuple(RNG.integers(0, VOCABULARY, n).tolist()) for n in (1, 3, 15, 16, 17, 31, 32, 33, 48, 60, 7, 20)]
MAX_OUTPUT = 10
REPLICAS_WAIT_S = 60.0


@cache
def greedy(model):
    """What transformers makes of each prompt."""
    outputs = []
    for prompt in PROMPTS:
        fed = [model.config.decoder_start_token_id] if model.config.is_encoder_decoder else list(prompt)
        begun = len(fed)
        for _ in range(MAX_OUTPUT):
            with torch.inference_mode():
                if model.config.is_encoder_decoder:
                    logits = model(torch.tensor([prompt]), decoder_input_ids=torch.tensor([fed])).logits
                else:
                    logits = model(torch.tensor([fed])).logits
            fed.append(int(logits[0, -1].argmax()))
        outputs.append(fed[begun:])
    return outputs


def run(engine):
    """Tokens of all prompts; a step that does not come ends the test."""
    outputs = [[] for _ in PROMPTS]
    for id_, prompt in enumerate(PROMPTS):
        engine.submit(Generation(id_, prompt, MAX_OUTPUT))
    waiting_since = time.monotonic()
    running = len(PROMPTS)
    while running:
        tokens = engine.step()
        if tokens is None:
            waits = not isinstance(engine, Engine) and time.monotonic() < waiting_since + REPLICAS_WAIT_S
            assert waits, "the engine has nothing to run, and requests wait"
            engine.wait(1.0)
            continue
        waiting_since = time.monotonic()
        for token in tokens:
            outputs[token.id].append(token.token)
            running -= token.finish is not None
    return outputs


@contextmanager
def engine_on(fleet, plan):
    """The engine of a plan for the fleet's two devices."""
    assert plan.devices_per_replica == 2
    executor = RemoteExecutor(fleet, Deployment.of(plan))
    executor.deploy()
    try:
        yield Engine(policies.build(plan), executor)
    finally:
        executor.disconnect()


def served_on(fleet, plan):
    """Tokens of a plan for the fleet's two devices."""
    with engine_on(fleet, plan) as engine:
        return run(engine)


def served_here(plan):
    """Tokens of a plan for one device, or for replicas of one each."""
    engine = build_engine(plan)
    try:
        return run(engine)
    finally:
        engine.close()
