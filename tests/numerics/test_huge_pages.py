"""Weights lie in memory that the system may give in huge pages, keys and values do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from xgpt.resolve import load_model
from xrunner import memory
from xrunner.kv_cache import KvCache

TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not TRANSPARENT.exists(), reason="of Linux, where it is built with them"
)


def mapping(address: int) -> tuple[str, list[str]]:
    """What may be done with the memory at an address, and its flags."""
    permissions = ""
    for line in Path("/proc/self/smaps").read_text().split("\n"):
        words = line.split()
        if line and "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(edge, 16) for edge in words[0].split("-"))
            permissions = words[1] if begin <= address < end else ""
        elif permissions and line.startswith("VmFlags:"):
            return permissions, words[1:]
    raise AssertionError(f"no memory at {address:x}")


def test_large_zeros_are_private_and_ask_for_huge_pages() -> None:
    zeros = memory.zeros((2 * memory.HUGE_PAGE,), torch.float32)
    assert not zeros.any()
    permissions, flags = mapping(zeros.data_ptr())
    assert permissions == "rw-p", "systems give none for memory that processes could share"
    assert "hg" in flags


def test_keys_and_values_ask_for_none() -> None:
    shape = {"num_layers": 1, "num_kv_heads": 4, "head_dim": 64}
    spec = load_model("opt-125m")[0].model_copy(update=shape)
    cache = KvCache(spec, 512, 16, torch.float32, torch.device("cpu"))
    permissions, flags = mapping(cache.layers[0].data_ptr())
    assert permissions == "rw-p" and "hg" not in flags


def test_so_does_what_the_heap_has_grown_by() -> None:
    memory.keep_freed_memory()
    memory.ask_for_heap()
    begin = memory._heap_begin()
    assert begin is not None
    assert "hg" in mapping(begin)[1]


IN_A_THREAD = """
import threading
from pathlib import Path
from xrunner import memory

memory.keep_freed_memory()
taken = []

def take():
    import torch
    taken.append(torch.zeros(2**16))

thread = threading.Thread(target=take)
thread.start()
thread.join()
for line in Path("/proc/self/maps").read_text().splitlines():
    begin, end = (int(edge, 16) for edge in line.split()[0].split("-"))
    if begin <= taken[0].data_ptr() < end:
        print(line.split()[-1])
"""


@pytest.mark.long
def test_a_thread_that_is_made_later_shares_the_heap() -> None:
    """In an arena of its own a served engine's weights had no huge pages, and its steps took a tenth longer."""
    found = subprocess.run([sys.executable, "-c", IN_A_THREAD], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[heap]"
