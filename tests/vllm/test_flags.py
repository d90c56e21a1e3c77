"""vLLM's own parser and checks take the flags that we render."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import yaml
from torch.distributed import TCPStore
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.exports import export
from tests.vllm.plans import exportable, here, plan_with, waa_plan
from xgpt.core.schema import ChunkedSettings, OrcaSettings, Plan, RraSettings
from xgpt.exporting.groups import Target
from xrunner.vllm.command import HOST, Launch, launch
from xrunner.vllm.host import parser, store
from xrunner.vllm.waa import waa_launches


def engine_arguments(started: Launch) -> AsyncEngineArgs:
    words = started.command("python3", "/tmp/nowhere")
    assert words[:3] == ["python3", "-m", HOST]
    return AsyncEngineArgs.from_cli_args(parser().parse_args(words[3:]))


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
    given = engine_arguments(launch(exportable(here(plan), str(checkpoint)), plan_path="plan.json"))
    assert given.model == str(checkpoint)
    assert given.scheduler_cls == "xrunner.vllm.scheduler.XgptScheduler"
    assert given.additional_config == {"xgpt": {"plan": "plan.json"}}
    config = given.create_engine_config()
    assert config.cache_config.num_gpu_blocks_override is None
    assert not config.scheduler_config.async_scheduling


@pytest.mark.parametrize("plan", [waa_plan(), here(waa_plan())], ids=["on GPUs", "on CPUs"])
def test_lanes_of_waa(plan: Plan, checkpoint: Path, tmp_path: Path) -> None:
    for started in waa_launches(exportable(plan, str(checkpoint)), tmp_path):
        config = engine_arguments(started).kv_transfer_config
        assert config is not None
        assert config.is_kv_producer == (started.lane == "encode")
        assert config.is_kv_consumer == (started.lane == "decode")


@pytest.mark.parametrize("target", ["dynamo", "llm-d"])
@pytest.mark.parametrize("plan", [plan_with(RraSettings(encode_batch=6, decode_iterations=5)), waa_plan()])
def test_what_is_exported_to_platforms(plan: Plan, target: Target, checkpoint: Path) -> None:
    text = export(exportable(plan, str(checkpoint)), target)["xgpt.yaml"]
    specs = [item["spec"] for item in yaml.safe_load_all(text) if item and "spec" in item]
    pods = [component["podTemplate"] for spec in specs for component in spec.get("components", ())]
    pods += [spec["template"] for spec in specs if "template" in spec]
    for pod in pods:
        program, *words = pod["spec"]["containers"][0]["command"]
        if program == "vllm":
            words[0] = "--model"
        elif "dynamo.vllm" in words:
            del words[:2]
        else:
            continue
        if "--disaggregation-mode" in words:  # Dynamo's own
            at = words.index("--disaggregation-mode")
            del words[at : at + 2]
        words[1] = str(checkpoint)
        given = AsyncEngineArgs.from_cli_args(make_arg_parser(FlexibleArgumentParser()).parse_args(words))
        assert (given.model, given.served_model_name) == (str(checkpoint), [plan.model.name])
        assert (given.kv_transfer_config is None) == (len(plan.policy.lanes) == 1)


def test_the_store_of_several_machines_listens_on_the_first_one_s_address_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    kept = store("127.0.0.1", port)
    assert TCPStore("127.0.0.1", port, is_master=False).add("workers", 1) == 1
    assert kept.add("workers", 1) == 2
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5).close()
