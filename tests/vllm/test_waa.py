"""WAA on two vLLMs, with K/V through files and over NIXL: the tokens of one, and how long the hand-over takes."""

from __future__ import annotations

import statistics
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.vllm.offline import Requests
from tests.vllm.plans import exportable, here, waa_plan
from xgpt.core.schema import StepRecord, WaaSettings
from xrunner.generation import Generation
from xrunner.vllm.command import CPU_BLOCK_SIZE
from xrunner.vllm.engine import VllmEngine
from xrunner.vllm.process import PYTHON_VARIABLE
from xrunner.vllm.waa import NIXL

PLAN = here(waa_plan())


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
def test_tokens_are_those_of_one_vllm(
    connector: str,
    checkpoint: Path,
    requests: Requests,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    if connector == "NixlConnector":
        monkeypatch.setattr("xrunner.vllm.waa.connector_of", lambda plan, directory: NIXL)
    log: list[StepRecord] = []
    engine = VllmEngine(exportable(PLAN, str(checkpoint)), on_step=log.append)
    tokens: list[list[int]] = [[] for _ in expected]
    try:
        for id_, (prompt, length) in enumerate(zip(requests.prompts, requests.outputs, strict=True)):
            engine.submit(Generation(id_, tuple(prompt), length))
        while engine.pool.running or engine.pool.waiting:
            for token in engine.step() or []:
                assert token.finish != "error"
                tokens[token.id].append(token.token)
            engine.wait(0.1)
    finally:
        engine.close()
    assert tokens == expected

    encode, decode = ([record for record in log if record.lane == lane] for lane in ("encode", "decode"))
    assert isinstance(PLAN.policy, WaaSettings)
    assert max(len(record.decode) + len(record.encode) for record in decode) <= PLAN.policy.max_decode_batch
    # What the decode lane computes of a prompt is the part of its last block alone.
    computed = [length for record in decode for _, _, length in record.encode]
    assert sorted(computed) == sorted(left_to_compute(len(prompt), connector) for prompt in requests.prompts)
    assert sum(length for record in encode for _, _, length in record.encode) == sum(map(len, requests.prompts))
    encoded_ns = {id_: record.end_ns for record in encode for id_, _, _ in record.encode}
    hand_over = [(record.end_ns - encoded_ns[id_]) / 1e9 for record in decode for id_, _, _ in record.encode]
    loads = [(record.end_ns - record.start_ns) / 1e9 for record in decode if record.encode]
    with capsys.disabled():
        print(
            f"hand-over: median {statistics.median(hand_over):.3f} s, longest {max(hand_over):.3f} s; "
            f"decode steps that load K/V take {statistics.median(loads):.3f} s"
        )
