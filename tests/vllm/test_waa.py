"""WAA on two vLLMs, with K/V through files and over NIXL: the tokens of one, and how long the hand-over takes."""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from tests.vllm.offline import Requests
from tests.vllm.plans import here, waa_plan
from xgpt.app.serving_vllm import free_port, running
from xgpt.client import ClientRequest, replay
from xgpt.io import read_step_log
from xgpt.schema import WaaSettings
from xrunner.vllm.command import CPU_BLOCK_SIZE, NIXL_PORT_VARIABLE, launch_lane
from xrunner.vllm.front import create_app
from xrunner.vllm.process import PYTHON_VARIABLE

HOST = "127.0.0.1"
PLAN = here(waa_plan())


@contextmanager
def in_thread(app: uvicorn.Config) -> Iterator[None]:
    server = uvicorn.Server(app)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            pass
        yield
    finally:
        server.should_exit = True
        thread.join()


def left_to_compute(prompt: int, connector: str) -> int:
    """Tokens of a prompt that the connector does not bring.

    NixlConnector brings all but the last. ExampleConnector brings whole blocks, and leaves at least two tokens. Where
    one token is left over in the last block, it looks for the prompt's files by another length than it wrote them by,
    and finds none.
    """
    if connector == "NixlConnector":
        return 1
    return prompt if prompt % CPU_BLOCK_SIZE == 1 else (prompt - 2) % CPU_BLOCK_SIZE + 2


@pytest.mark.parametrize(
    "connector",
    [
        "ExampleConnector",
        pytest.param("NixlConnector", marks=pytest.mark.skipif(find_spec("nixl") is None, reason="needs nixl")),
    ],
)
def test_tokens_and_hand_over(
    connector: str,
    checkpoint: Path,
    requests: Requests,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    transfer: dict[str, Any] = {"kv_connector": connector}
    if connector == "ExampleConnector":
        transfer["kv_connector_extra_config"] = {"shared_storage_path": str(tmp_path)}
    urls = {}
    with ExitStack() as stack:
        for lane in ("encode", "decode"):
            port = free_port(HOST)
            config = {"step_log": str(tmp_path / f"{lane}.jsonl")}
            started = launch_lane(PLAN, lane, transfer, model=str(checkpoint), host=HOST, port=port, config=config)
            started = replace(started, variables={**started.variables, NIXL_PORT_VARIABLE: str(free_port(HOST))})
            stack.enter_context(running(started, HOST, port, tmp_path / f"{lane}.log"))
            urls[lane] = f"http://{HOST}:{port}"
        port = free_port(HOST)
        front = create_app(PLAN, urls["encode"], urls["decode"])
        stack.enter_context(
            in_thread(uvicorn.Config(front, host=HOST, port=port, log_level="warning", log_config=None))
        )
        url = f"http://{HOST}:{port}"
        sent = [
            ClientRequest(prompt, output_length=n, max_tokens=n)
            for prompt, n in zip(requests.prompts, requests.outputs, strict=True)
        ]
        results = asyncio.run(replay(url, sent, concurrency=len(sent), stream=False))
        assert [result.error for result in results if result.error] == []
        assert [result.token_ids for result in results] == expected
        hand_over = httpx.get(f"{url}/hand_over", trust_env=False).json()["seconds"]

    encode, decode = (read_step_log(tmp_path / f"{lane}.jsonl") for lane in ("encode", "decode"))
    assert isinstance(PLAN.policy, WaaSettings)
    assert max(len(record.decode) + len(record.encode) for record in decode) <= PLAN.policy.max_decode_batch
    # What the decode lane computes of a prompt is the part of its last block alone.
    computed = [length for record in decode for _, _, length in record.encode]
    assert sorted(computed) == sorted(left_to_compute(len(prompt), connector) for prompt in requests.prompts)
    assert sum(length for record in encode for _, _, length in record.encode) == sum(map(len, requests.prompts))
    loads = [(record.end_ns - record.start_ns) / 1e9 for record in decode if record.encode]
    with capsys.disabled():
        print(
            f"hand-over: median {statistics.median(hand_over):.3f} s, longest {max(hand_over):.3f} s; "
            f"decode steps that load K/V take {statistics.median(loads):.3f} s"
        )
