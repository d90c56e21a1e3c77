"""Tests inside vLLM: collected only where it is installed (`make test-vllm` makes such an environment)."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OPT-125M's shape with seeded weights."""
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("opt-125m")
    OPTForCausalLM(OPTConfig()).save_pretrained(directory)  # its defaults are this model's shape
    return directory
