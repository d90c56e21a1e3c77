"""Weights lie in memory that the system may give in huge pages, keys and values do not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from xgpt.resolve import load_model
from xrunner.kernels import huge_pages
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
    zeros = huge_pages.zeros((2 * huge_pages.HUGE_PAGE,), torch.float32)
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
    huge_pages.keep_freed_memory()
    huge_pages.ask_for_heap()
    begin = huge_pages._heap_begin()
    assert begin is not None
    assert "hg" in mapping(begin)[1]
