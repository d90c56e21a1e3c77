"""Read the current deployment from a command, a Compose file, a pod or Helm values."""

from __future__ import annotations

from dataclasses import replace

from xgpt.comparing.current import CurrentEngine
from xgpt.comparing.launched import Launched, find_engine
from xgpt.comparing.other_engines import read_sglang, read_tensorrt_llm
from xgpt.comparing.vllm_command import read_vllm
from xgpt.core.schema import ClusterSpec

READERS = {"vllm": read_vllm, "sglang": read_sglang, "tensorrt-llm": read_tensorrt_llm}


def read_current(text: str, cluster: ClusterSpec) -> CurrentEngine:
    """Return the deployment that a command, a Compose file, a pod or Helm values start.

    Args:
        text: the command, the YAML, or the path of a file with one of them.

    Raises:
        InputError: it starts no engine that can be scored, or a flag is not known to the engine or changes the speed in
            a way that is not scored.
    """
    launched = find_engine(text)
    current = READERS[launched.engine](launched.words, cluster)
    notes = (*current.notes, *_device_note(current, launched))
    return replace(current, version=launched.version, notes=notes)


def _device_note(current: CurrentEngine, launched: Launched) -> list[str]:
    if launched.devices in (None, current.num_devices):
        return []
    return [
        f"the manifest requests {launched.devices} devices, but its engine uses {current.num_devices}; these are scored"
    ]
