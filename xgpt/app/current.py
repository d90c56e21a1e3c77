"""What somebody runs now, read off the command that starts it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from itertools import pairwise

from xgpt.errors import InputError
from xgpt.schema import ClusterSpec

LARGE_DEVICE_BYTES = 70 * 2**30
"""vLLM's defaults are larger on such devices, A100 left out."""

_COUNTS = {
    "tensor-parallel-size": "tp_degree",
    "tp": "tp_degree",
    "pipeline-parallel-size": "num_stages",
    "pp": "num_stages",
    "data-parallel-size": "replicas",
    "dp": "replicas",
    "max-num-seqs": "max_num_seqs",
    "max-num-batched-tokens": "max_num_batched_tokens",
}
_LAUNCHERS = (("vllm", "serve"), ("-m", "vllm.entrypoints.openai.api_server"))


@dataclass(frozen=True)
class Deployment:
    """An engine with chunked prompts as it was started.

    Attributes:
        num_stages: pipeline stages of a replica, `tp_degree` devices each.
        max_num_seqs: requests in a step at most.
        max_num_batched_tokens: tokens in a step at most.
        notes: what was assumed.
    """

    tp_degree: int
    num_stages: int
    replicas: int
    max_num_seqs: int
    max_num_batched_tokens: int
    notes: tuple[str, ...]

    @property
    def num_devices(self) -> int:
        return self.tp_degree * self.num_stages * self.replicas


def read_vllm_command(command: str, cluster: ClusterSpec) -> Deployment:
    """The schedule that a `vllm serve` command asks for; flags that do not change the schedule are passed over.

    Raises:
        InputError: the command starts something else, a count is none, or chunked prompts are switched off.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError("--current", command, f"{error}; quote it as a shell would take it") from None
    if not any(pair in _LAUNCHERS for pair in pairwise(words)):
        raise InputError("--current", command, "give a command that starts with vllm serve")
    counts, flags = _read_flags(words)
    if "no-enable-chunked-prefill" in flags:
        raise InputError("--current", "--no-enable-chunked-prefill", "only engines with chunked prompts can be scored")
    large = cluster.device.memory_bytes >= LARGE_DEVICE_BYTES and "a100" not in cluster.device.name.lower()
    defaults = {"max_num_seqs": 1024 if large else 256, "max_num_batched_tokens": 8192 if large else 2048}
    notes = [
        f"{name.replace('_', '-')} {value}: vLLM's default on this device"
        for name, value in defaults.items()
        if name not in counts
    ]
    one_each = {"tp_degree": 1, "num_stages": 1, "replicas": 1}
    return Deployment(**{**one_each, **defaults, **counts}, notes=tuple(notes))


def _read_flags(words: list[str]) -> tuple[dict[str, int], set[str]]:
    """(counts by field, names of flags): `--flag value`, `--flag=value`, `-tp 4`, dashes or underscores."""
    counts: dict[str, int] = {}
    flags: set[str] = set()
    for i, word in enumerate(words):
        if not word.startswith("-"):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("_", "-")
        flags.add(name)
        field = _COUNTS.get(name)
        if field is None:
            continue
        text = value if equals else words[i + 1] if i + 1 < len(words) else ""
        if not text.isdecimal() or int(text) == 0:
            raise InputError(f"--current: --{name}", text, "give a whole number, at least 1")
        counts[field] = int(text)
    return counts, flags
