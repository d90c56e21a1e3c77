"""Plans of whole batches, served in rows: the tokens of `transformers`, K/V memory as rows take it, and refusals."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
import torch

import xgpt
import xrunner.tcb.rows as row_attention
from tests.fakes import fake_app, running
from tests.numerics.served import MAX_OUTPUT, PROMPTS, greedy, run
from tests.numerics.test_worker import refuse_to_draw
from tests.planned import CPU, SHORT, cpus, planned, problem_of
from tests.rings import ALL, few
from xgpt.core.errors import InputError
from xgpt.core.policies import Pool, Request, build, build_rows
from xgpt.core.policies.tcb import lay_out
from xgpt.core.schema import Pinned, Plan
from xgpt.serving.engine_process import build_engine
from xgpt.serving.serve import ServeRequest
from xrunner.generation import Generation, SamplingParams

LAYOUTS = ("padded", "rows", "slots")


def static_plan(directory, **changes) -> Plan:
    plan = planned(problem_of(directory, 1), "static")
    policy = plan.policy.model_copy(update={"batch": 8})
    return plan.model_copy(update={"policy": policy, **changes})


@pytest.mark.parametrize("name", few(["opt-tied", "t5-tied", "llama-grouped"], 2))
@pytest.mark.parametrize("batching", LAYOUTS)
def test_tokens_are_those_of_transformers(checkpoint, name, batching):
    directory, model = checkpoint(name)
    assert run(build_engine(static_plan(directory), batching=batching)) == greedy(model)


@pytest.mark.parametrize("name", few(["opt-tied", "t5-tied"]))
def test_tokens_are_the_same_where_the_next_batch_fills_slots(checkpoint, name):
    directory, model = checkpoint(name)
    pinned = Pinned(policy="static", fixed={"row_batches": 2})
    policy = static_plan(directory).policy.model_copy(update={"batch": 4})
    engine = build_engine(static_plan(directory, pinned=pinned, policy=policy), batching="slots")
    for id_, prompt in enumerate(PROMPTS):
        engine.submit(Generation(id_, prompt, MAX_OUTPUT, output_length=1 + id_ % MAX_OUTPUT))
    outputs, most = [[] for _ in PROMPTS], 0
    while (step := engine.step()) is not None:
        most = max(most, len(engine.executor.inside))
        for token in step:
            outputs[token.id].append(token.token)
    assert outputs == [output[: 1 + id_ % MAX_OUTPUT] for id_, output in enumerate(greedy(model))]
    assert most == 2


@pytest.mark.parametrize("name", few(["opt-tied", "t5-tied"]))
def test_drawn_tokens_and_log_probabilities_are_those_of_the_flat_batch(checkpoint, name):
    found = {}
    for batching in ("flat", *LAYOUTS):
        engine = build_engine(static_plan(checkpoint(name)[0]), batching=batching)
        for id_, prompt in enumerate(PROMPTS):
            sampling = SamplingParams(temperature=0.7, seed=id_, logprobs=1, repetition_penalty=1.2)
            engine.submit(Generation(id_, prompt, MAX_OUTPUT, sampling=sampling if id_ % 2 else SamplingParams()))
        tokens = []
        while (step := engine.step()) is not None:
            tokens += [(t.id, t.token, t.logprobs and round(t.logprobs.chosen, 2)) for t in step]
        found[batching] = sorted(tokens)
    assert len(found["flat"]) == len(PROMPTS) * MAX_OUTPUT
    assert all(tokens == found["flat"] for tokens in found.values())


def memory_of(directory, batching):
    """K/V blocks set aside after each step of one batch, of whose requests most end early; and its tokens."""
    engine = build_engine(static_plan(directory), batching=batching)
    for id_, prompt in enumerate(PROMPTS[:8]):
        engine.submit(Generation(id_, prompt, 16, output_length=16 if id_ == 5 else 2 + id_))
    used, tokens = [], []
    while (step := engine.step()) is not None:
        used.append(engine.pool.reserved_blocks)
        tokens += step
    return used, sorted(tokens, key=lambda t: t.id)


def test_slots_free_their_memory_early_and_rows_at_the_end(checkpoint):
    directory = checkpoint("opt-tied")[0]
    memory = {batching: memory_of(directory, batching) for batching in LAYOUTS}
    for batching in ("padded", "rows"):
        used = memory[batching][0]
        assert set(used[:-1]) == {used[0]} and used[-1] == 0
    slots = memory["slots"][0]
    assert slots == sorted(slots, reverse=True) and len(set(slots)) > 3 and slots[-2] < slots[0] / 2
    assert memory["slots"][1] == memory["rows"][1] == memory["padded"][1]


def test_a_batch_takes_no_more_than_the_plans_memory(checkpoint):
    """Rows take more than their requests, so fewer enter; one that fits alone always does."""
    plan = static_plan(checkpoint("opt-tied")[0])
    stages = tuple(stage.model_copy(update={"kv_blocks": 20}) for stage in plan.stages)
    plan = plan.model_copy(update={"stages": stages})
    rng = np.random.default_rng(2)
    overlapping = plan.model_copy(update={"pinned": Pinned(policy="static", fixed={"row_batches": 2})})
    for batching, plan in (*((name, plan) for name in LAYOUTS), ("slots", overlapping)):
        schedule = build_rows(plan, batching)
        requests = [Request(i, int(n), int(m)) for i, (n, m) in enumerate(rng.integers(1, 60, (60, 2)))]
        for one in requests:
            schedule.submit(one)
        seen, met = [], 0
        while (step := schedule.next_step("both")) is not None:
            ids = list(step.ids)
            if step.encode:
                batch = [requests[id_] for id_ in ids]
                layout = lay_out(batching, batch, 60)
                tokens = layout.slot_tokens + layout.most_a_slot * max(one.max_output for one in batch)
                own_blocks = layout.num_slots * -(-tokens // plan.block_size)
                others = [rows.blocks for number, rows in schedule.pool._rows.items() if number != step.microbatch]
                assert sum(others) + own_blocks == schedule.pool.reserved_blocks <= 20
                met += bool(others)
                seen += ids
            done = [i for i in ids if requests[i].generated + 1 == requests[i].max_output and not is_held(schedule, i)]
            schedule.settle(step, done)
        assert sorted(seen) == list(range(60)) and schedule.pool.reserved_blocks == 0
        assert bool(met) == (plan is overlapping), "the next batch enters where slots have left"


def is_held(schedule, id_) -> bool:
    return any(id_ in batch.held for batch in schedule.pool.batches)


@pytest.mark.parametrize("name", few(["opt-tied", "t5-tied", "llama-grouped"]))
@pytest.mark.parametrize(("dtype", "kv_dtype"), few([("float32", "bfloat16"), ("bfloat16", None), ("int8", None)]))
def test_rows_keep_what_the_plan_counts(checkpoint, name, dtype, kv_dtype, monkeypatch):
    """They kept float32: up to twice the memory of a plan whose keys and values are bfloat16."""
    plan = rounded_plan(checkpoint(name)[0], dtype, kv_dtype)
    if not ALL:  # numba compiles attention to K/V in bfloat16 for half a minute
        monkeypatch.setattr("xrunner.build.default_backend", lambda *_: "reference")
    of_block = plan.block_size * plan.model.kv_bytes_per_token(plan.precision.kv)
    expected = run(build_engine(plan))
    monkeypatch.setattr(row_attention, "WIDENED_BYTES", 2**14)
    for batching in LAYOUTS:
        engine = build_engine(plan, batching=batching)
        for id_, prompt in enumerate(PROMPTS):
            engine.submit(Generation(id_, prompt, MAX_OUTPUT))
        outputs = [[] for _ in PROMPTS]
        while (step := engine.step()) is not None:
            for token in step:
                outputs[token.id].append(token.token)
            if engine.executor.inside:
                kept = [cache._kv for each in engine.executor.inside.values() for cache in each.rows._caches]
                assert {x.dtype for x in kept} == {torch.bfloat16}
                assert 0 < sum(x.nbytes for x in kept) <= engine.pool.reserved_blocks * of_block
        assert outputs == expected


def rounded_plan(directory, dtype, kv_dtype) -> Plan:
    """Whole batches, as `xgpt plan` finds them for a processor that multiplies in eight bits, too."""
    device = CPU.model_copy(update={"flops_per_s": dict.fromkeys(("float32", "bfloat16", "int8"), 50e9)})
    cluster = cpus(1).model_copy(update={"device": device})
    return xgpt.plan(
        model=directory,
        cluster=cluster,
        workload=SHORT,
        policy="static",
        dtype=dtype,
        kv_dtype=kv_dtype,
        latency_bound_s=None,
    )


@pytest.mark.parametrize("batching", LAYOUTS)
def test_a_request_whose_token_cannot_be_chosen_fails_alone(checkpoint, batching, monkeypatch):
    """It was a failed step, and all of the batch began anew."""
    refuse_to_draw(monkeypatch)
    engine = build_engine(static_plan(checkpoint("opt-tied")[0]), batching=batching)
    for id_, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(temperature=0.7, top_k=9 if id_ == 1 else 5, seed=id_)
        engine.submit(Generation(id_, prompt, MAX_OUTPUT, sampling=sampling))
    ended = {}
    while (step := engine.step()) is not None:
        ended |= {token.id: token.error for token in step if token.finish}
    reason = "no token can be chosen: OverflowError: int too big to convert"
    assert ended == {id_: reason if id_ == 1 else "" for id_ in range(len(PROMPTS))}


@pytest.mark.parametrize("batching", LAYOUTS)
def test_a_cancelled_request_leaves_the_others_their_tokens(checkpoint, batching):
    directory, model = checkpoint("opt-tied")
    engine = build_engine(static_plan(directory), batching=batching)
    for id_, prompt in enumerate(PROMPTS):
        engine.submit(Generation(id_, prompt, MAX_OUTPUT))
    outputs = {id_: [] for id_ in range(len(PROMPTS))}
    while (step := engine.step()) is not None:
        for token in step:
            outputs[token.id].append(token.token)
        if len(outputs[3]) == 4:
            engine.cancel(3)
    expected = greedy(model)
    assert len(outputs.pop(3)) < MAX_OUTPUT
    assert outputs == {id_: expected[id_] for id_ in outputs}
    assert engine.pool.is_idle and engine.pool.reserved_blocks == 0


@pytest.mark.parametrize("batching", LAYOUTS)
def test_the_endpoint_answers_from_rows(checkpoint, batching):
    directory, model = checkpoint("opt-tied")
    engine = build_engine(static_plan(directory), batching=batching)
    with running(fake_app(engine, spec=engine_spec(directory))) as url:
        body = {
            "model": "fake",
            "prompt": [list(prompt) for prompt in PROMPTS],
            "max_tokens": MAX_OUTPUT,
            "temperature": 0,
        }
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        answer.raise_for_status()
        lines = httpx.get(f"{url}/metrics").text.splitlines()
    assert [choice["token_ids"] for choice in answer.json()["choices"]] == greedy(model)
    assert "xgpt_kv_blocks_used 0.0" in lines


def engine_spec(directory):
    return problem_of(directory, 1).model


def test_what_cannot_run_in_rows_is_refused(checkpoint):
    directory = checkpoint("opt-tied")[0]
    orca = planned(problem_of(directory, 1), "orca")
    with pytest.raises(InputError, match="the plan is orca on 1 device; rows need a plan of whole batches"):
        ServeRequest(batching="rows").check_batching(orca)
    static = static_plan(directory)
    parts = static.model_copy(update={"policy": static.policy.model_copy(update={"encode_microbatches": 2})})
    with pytest.raises(InputError, match="static on 1 device, which encodes a batch in 2 parts; rows need"):
        ServeRequest(batching="rows").check_batching(parts)
    with pytest.raises(InputError, match="--engine vllm runs only flat batches"):
        ServeRequest(batching="slots", engine="vllm").check_batching(static_plan(directory))
    ServeRequest(batching="slots").check_batching(static_plan(directory))
    with pytest.raises(InputError, match=r"has model\.sliding_window, which rows cannot run: use flat"):
        ServeRequest(batching="rows").check_batching(static_plan(checkpoint("gpt_oss-grouped")[0]))
    assert type(build(static_plan(directory)).pool) is Pool
