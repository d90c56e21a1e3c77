"""vLLM's own parser and checks take the flags that we render."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.vllm.plans import here, plan_with, waa_plan
from xgpt.app.exporting import FILES
from xgpt.schema import ChunkedSettings, OrcaSettings, Plan, RraSettings
from xrunner.vllm.command import Launch, launch, launch_lane


def engine_arguments(started: Launch) -> AsyncEngineArgs:
    parser = make_arg_parser(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", started.model, *started.arguments]))


@pytest.mark.parametrize(
    "plan",
    [
        plan_with(RraSettings(encode_batch=6, decode_iterations=5)),
        plan_with(ChunkedSettings(token_budget=96, max_batch=12)),
        plan_with(OrcaSettings(max_batch=40), kv="quantile"),
    ],
    ids=["rra", "chunked", "orca"],
)
def test_single_lane(plan: Plan, checkpoint: Path) -> None:
    given = engine_arguments(
        launch(here(plan), plan_path="plan.json", model=str(checkpoint), host="0.0.0.0", port=8000)
    )
    assert given.scheduler_cls == "xrunner.vllm.scheduler.XgptScheduler"
    assert given.additional_config == {"xgpt": {"plan": "plan.json"}}
    config = given.create_engine_config()
    assert config.cache_config.num_gpu_blocks_override == 401
    assert not config.scheduler_config.async_scheduling


@pytest.mark.parametrize("lane", ["encode", "decode"])
def test_lanes_of_waa(lane: str, checkpoint: Path) -> None:
    config = engine_arguments(launch_lane(here(waa_plan()), lane, FILES, model=str(checkpoint))).create_engine_config()
    assert config.kv_transfer_config is not None
    assert config.kv_transfer_config.is_kv_producer == (lane == "encode")
