"""What a vLLM command says about its schedule."""

from __future__ import annotations

import pytest

from xgpt.app.current import read_vllm_command
from xgpt.errors import InputError
from xgpt.resolve import load_cluster


@pytest.mark.parametrize(
    ("command", "devices", "seqs", "tokens"),
    [
        ("vllm serve m -tp 2 -pp 2 --max-num-seqs 64 --max-num-batched-tokens 512", (2, 2, 1), 64, 512),
        ("vllm serve m --tensor-parallel-size=4 --max_num_seqs=8 --port 80", (4, 1, 1), 8, 2048),
        ("python -m vllm.entrypoints.openai.api_server --model m --data-parallel-size 2", (1, 1, 2), 256, 2048),
        ("VLLM_X=1 vllm serve 'a b' --enable-chunked-prefill --gpu-memory-utilization 0.9", (1, 1, 1), 256, 2048),
    ],
)
def test_flags_are_read(command: str, devices: tuple[int, int, int], seqs: int, tokens: int) -> None:
    found = read_vllm_command(command, load_cluster("a40x4"))
    assert (found.tp_degree, found.num_stages, found.replicas) == devices
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (seqs, tokens)


def test_defaults_follow_the_device_and_are_said() -> None:
    large = read_vllm_command("vllm serve m", load_cluster("h200x1"))
    assert (large.max_num_seqs, large.max_num_batched_tokens) == (1024, 8192)
    assert len(large.notes) == 2
    assert not read_vllm_command(
        "vllm serve m --max-num-seqs 4 --max-num-batched-tokens 64", load_cluster("a40x4")
    ).notes


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("sglang serve m", "vllm serve"),
        ("vllm", "vllm serve"),
        ("vllm serve 'm", "quot"),
        ("vllm serve m --max-num-seqs many", "max-num-seqs"),
        ("vllm serve m --max-num-seqs", "max-num-seqs"),
        ("vllm serve m -tp 0", "tp"),
        ("vllm serve m --no-enable-chunked-prefill", "chunked"),
    ],
)
def test_what_cannot_be_read_is_refused(command: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_vllm_command(command, load_cluster("a40x4"))
