"""The flags that `compare --current` knows are those of vLLM's own parser, and read as it reads them."""

from __future__ import annotations

import argparse

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from xgpt.comparing.flags import tables, verdicts
from xgpt.comparing.launched import read_current
from xgpt.comparing.vllm_command import TABLE
from xgpt.resolve import load_cluster, load_engine
from xrunner.vllm import TESTED_VERSION


def takes(action: argparse.Action) -> str:
    if isinstance(action, argparse.BooleanOptionalAction):
        return "switch"
    found: dict[int | str | None, str] = {0: "nothing", None: "value", "?": "optional", "+": "many"}
    return found[action.nargs]


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser())


def test_flags_are_those_of_the_parser(parser: FlexibleArgumentParser) -> None:
    assert tables()["versions"]["vllm"] == TESTED_VERSION
    flags, aliases = {}, {}
    for action in parser._actions:
        names = [name for name in action.option_strings if not name.startswith("--no-")]
        first = next((name for name in names if name.startswith("--")), "--help")
        if first != "--help":
            flags[first[2:]] = takes(action)
            aliases |= {name: first[2:] for name in names if name != first}
    assert flags == TABLE.takes
    assert aliases == TABLE.aliases


def test_neutral_values_hold_the_default(parser: FlexibleArgumentParser) -> None:
    defaults = {action.option_strings[0][2:]: action.default for action in parser._actions if action.option_strings}
    for name, (_, neutral) in (verdicts("vllm", "refused") | verdicts("vllm", "noted")).items():
        default = defaults.get(name)  # None: a flag of earlier versions
        if isinstance(neutral, dict) or default is None or not isinstance(default, str | int | float | bool):
            continue
        text = {True: "yes", False: "no"}.get(default, str(default)) if isinstance(default, bool) else str(default)
        assert text in neutral or not default, name


def test_shares_and_numbers_are_read_alike(parser: FlexibleArgumentParser) -> None:
    usual = load_engine("vllm").memory_share
    assert AsyncEngineArgs().gpu_memory_utilization == usual
    for flags in (
        "--max-num-batched-tokens 1.5k --max-num-seqs 8 -tp 2 -pp=2 -dp 1",
        "--max_num_batched_tokens=2K --max-num-seqs=16 --device-memory-utilization 0.5",
        "--max-num-batched-tokens 2048 --max-num-seqs 4 --api-key a b --no-enable-log-requests -O2",
    ):
        theirs = parser.parse_args(["--model", "m", *flags.split()])
        ours = read_current(f"vllm serve m {flags}", load_cluster("a40x4"))
        assert (ours.tp_degree, ours.num_stages) == (theirs.tensor_parallel_size, theirs.pipeline_parallel_size)
        assert (ours.max_num_seqs, ours.max_num_batched_tokens) == (theirs.max_num_seqs, theirs.max_num_batched_tokens)
        assert (ours.usable_memory or usual) == theirs.gpu_memory_utilization
