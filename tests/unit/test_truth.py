"""The loads that benchmarks.truth predicts, and its table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.truth import experts, memory
from benchmarks.truth.inferencex import started
from benchmarks.truth.loads import Served, all_at_once, closed_loop, open_loop
from benchmarks.truth.score import by_chance, table
from benchmarks.truth.sources import ALIGNED, Row, budget_of, cell_of, of_backend, repeated
from xgpt.resolve import load_engine
from xsimulator.costs.step_cost import StepCounts

INPUT, OUTPUT = 512, 64
SERVED = Served("llama-3.1-8b", "h100x8", "bfloat16", 2, "xgpt", 64, 8192, imported=False)
AHEAD = Served("llama-3.1-8b", "h100x8", "bfloat16", 2, "vllm-0.15", 64, 8192, imported=False)


WAITS = {"few tokens": INPUT, "many tokens": 8000}


def prompts_s(count: int) -> float:
    return sum(SERVED.cost.step(StepCounts.of([(0, INPUT, 1)] * count, [])))


def test_one_client_waits_for_its_own_prompt_alone() -> None:
    times, _ = closed_loop(SERVED, 1, [INPUT] * 5, [OUTPUT] * 5)
    assert times.ttft_s == pytest.approx(prompts_s(1))
    steps = [sum(SERVED.cost.step(StepCounts.of([], [INPUT + i]))) for i in range(1, OUTPUT)]
    assert times.tpot_s == pytest.approx(np.mean(steps), rel=1e-3)


def test_clients_that_start_together_share_steps() -> None:
    """Thirty-two prompts of 512 tokens are two steps of 8,192; equal requests then stay in step for good."""
    times, _ = closed_loop(SERVED, 32, [INPUT] * 320, [OUTPUT] * 320)
    assert 0.9 * prompts_s(16) < np.mean(times.ttft_s) < 1.5 * prompts_s(16)


def test_an_arrival_waits_for_the_step_that_is_decided_already() -> None:
    """Half a step and its own; where steps are decided ahead, one more, and what its engine takes outside of steps."""
    plain, ahead = (open_loop(served, 4.0, (INPUT, 256), [INPUT - 16] * 400, seed=0) for served in (SERVED, AHEAD))
    step_s, path_s = float(np.mean(ahead.tpot_s)), AHEAD.path_s(INPUT)
    more_s = float(np.mean(ahead.ttft_s) - np.mean(plain.ttft_s))
    assert more_s == pytest.approx(path_s + step_s, rel=0.3)


def test_prompts_wait_for_others_as_long_as_the_engine_was_told() -> None:
    """Clients that keep apart wait for twenty steps, unless those are short of prompts: one client waits for none."""
    outputs = [64, 150, 236, 322] * 10
    scripts = {name: (("batch_wait_steps", 20), ("batch_wait_tokens", tokens)) for name, tokens in WAITS.items()}
    runs = {
        name: closed_loop(replace(SERVED, changes=changes), 4, [INPUT] * 40, outputs)[0]
        for name, changes in scripts.items()
    }
    first_s = {name: float(np.median(changes.ttft_s)) for name, changes in runs.items()}
    tpot_s = float(np.mean(runs["few tokens"].tpot_s))
    assert first_s["many tokens"] - first_s["few tokens"] == pytest.approx(20 * tpot_s, rel=0.2)
    alone, _ = closed_loop(replace(SERVED, changes=scripts["many tokens"]), 1, [INPUT] * 5, [OUTPUT] * 5)
    assert alone.ttft_s == pytest.approx(prompts_s(1))


def test_cached_tokens_are_not_encoded_again() -> None:
    cold, warm = (open_loop(SERVED, 4.0, (4096, 16), [cached] * 100, seed=0) for cached in (0, 4080))
    assert np.mean(warm.ttft_s) < 0.5 * np.mean(cold.ttft_s)
    assert np.mean(warm.tpot_s) < np.mean(cold.tpot_s)


def test_blocks_are_those_that_the_engine_logged() -> None:
    """The goal is 3%; of Mixtral, nothing was fitted."""
    rows = list(memory.rows(Path()))
    errors = {(row.group, row.is_fitted): row.errors()["blocks"] for row in rows}
    assert len(errors) == 4 and ("mixtral-8x7b", False) in errors
    assert all(abs(error) < 0.005 for error in errors.values()), errors


def test_requests_at_hand_keep_the_engine_busy() -> None:
    few, many = (all_at_once(SERVED, [INPUT] * count, [OUTPUT] * count) for count in (8, 256))
    assert many > 3 * few


def test_what_an_engine_was_set_to_reaches_its_step_times() -> None:
    slow, prompt = replace(AHEAD, changes=(("step_s", 1.0),)), StepCounts.of([(0, 2048, 1)], [])
    usual = load_engine(AHEAD.engine).step_s or 0.0
    assert sum(slow.cost.step(prompt)) - sum(AHEAD.cost.step(prompt)) == pytest.approx(1.0 - usual)


@pytest.mark.parametrize(
    ("changed", "model", "expected"),
    [
        ({}, "minimax-m2", (4, 8192, None, 0.95)),
        ({"system": "h100_sxm"}, "minimax-m2", (1, 8192, None, None)),
        (
            {"system": "b200_sxm", "silicon_data_source": "x; measured=2026-04-03"},
            "minimax-m2",
            (1, 2048, "float8", None),
        ),
        ({"system": "b200_sxm"}, "gpt-oss-120b", (1, 8192, "float8", None)),
        ({"backend": "trtllm", "silicon_data_source": "measured=2025-11-02"}, "gpt-oss-120b", (4, 20000, None, 0.85)),
        ({"backend": "trtllm", "silicon_data_source": "measured=2025-12-15"}, "gpt-oss-120b", (1, 20000, None, 0.85)),
    ],
)
def test_rows_are_predicted_as_their_scripts_started_the_engine(
    changed: dict[str, str], model: str, expected: tuple[int, int, str | None, float | None]
) -> None:
    raw = {"system": "h200_sxm", "backend": "vllm", "backend_version": "0.18.0", "batch_size": "16", "isl": "1024"}
    raw |= {"silicon_data_source": "source_file=x; measured=2026-03-28T00:00"} | changed
    found = started(raw, model, tp=4, ep=1)
    assert (found.ep, found.token_budget, found.kv_dtype, dict(found.changes).get("memory_share")) == expected


def test_the_table_has_rows_that_nothing_was_fitted_to_in_a_column_of_their_own() -> None:
    rows = [Row("a", "x", True, {"TPOT": 1.0}, {"TPOT": 1.1}), Row("a", "y", False, {"TPOT": 2.0}, {"TPOT": 1.0})]
    lines = table(rows).splitlines()
    assert lines[2:] == ["| a |  |  | TPOT | 1 | 50.0 | 50.0 | -50.0 | 1 | 10.0 | 10.0 |"]


def test_rows_are_counted_by_load_engine_and_family() -> None:
    cell = cell_of(replace(SERVED, engine="sglang-0.5"), "closed loop", 8)
    assert cell == ("closed loop", "sglang", "dense", "h100-80gb-hbm3", "analytic", "up to 8 requests")
    assert Row("a", "x", False, {}, cell=cell).kind == ("closed loop, datasheet", "sglang", "dense")


def test_scripts_that_wait_for_batches() -> None:
    """InferenceX's of TensorRT-LLM, at 1,024 tokens in and out on fewer than eight devices."""
    raw = {"backend": "trtllm", "silicon_data_source": "", "isl": "1024", "osl": "1024", "tp_size": "4"}
    waits = [
        dict(of_backend(raw | change)).get("batch_wait_steps") for change in ({}, {"tp_size": "8"}, {"osl": "8192"})
    ]
    assert waits == [20, None, None]


def test_sglang_mixes_where_its_rules_say_so() -> None:
    """And a step's prompts are of one and 1,500 tokens more, or as many as it cuts them to by itself."""
    raw = {"backend": "sglang", "silicon_data_source": ALIGNED, "isl": "1000", "batch_size": "64"}
    settings = {
        version: dict(of_backend(raw | {"backend_version": version})) for version in ("0.5.1.post1", "0.5.6.post2")
    }
    assert settings == {"0.5.1.post1": {}, "0.5.6.post2": {"mixes": True}}
    assert [budget_of(raw | {"isl": length}) for length in ("1000", "8000")] == [2500, 8192]


def test_prompts_that_come_in_turns_are_found_where_memory_holds_them() -> None:
    found = repeated(350, (575, 248), 20_000).tolist()
    assert found == [0] * 100 + [560] * 250
    assert not any(repeated(350, (575, 248), 3000))


@pytest.mark.parametrize(("config", "devices", "clients"), [("734", (4, 1, 4), "512"), ("727", (4, 1, 4), "128")])
def test_clients_that_a_row_divided_in_error_are_all_of_one_replica(
    config: str, devices: tuple[int, int, int], clients: str
) -> None:
    """The wheel states attention by data for every row of vLLM with divided experts; InferenceX ran two
    configurations so.
    """
    raw = {
        "backend": "vllm",
        "tp_size": "4",
        "attention_dp_size": "4",
        "moe_tp_size": "1",
        "moe_ep_size": "16",
        "batch_size": "128",
        "silicon_data_source": f"db-dump; config_id={config}; silicon_concurrency=512; measured=2026-04-21",
    }
    assert experts.degrees_of(raw) == devices
    assert experts.with_all_clients(raw)["batch_size"] == clients


def test_shares_of_few_rows_miss_their_aim_by_chance() -> None:
    said = by_chance([(1.0, 10, 5), (0.9, 10, 5)])
    assert "Of 2 shares with at least 10 rows, 1 are outside 80% to 95%: 0 below, 1 above" in said
    outside = 1 - (45 * 0.9**8 * 0.1**2 + 10 * 0.9**9 * 0.1)
    assert f"would put {2 * outside:.1f} outside if rows were independent" in said
