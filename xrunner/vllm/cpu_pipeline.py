"""A worker of vLLM's for pipelines on CPUs (`--worker-cls`)."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class CpuPipelineWorker(CPUWorker):
    """Runs a step before the first one, as workers on GPUs do.

    vLLM 0.32 leaves that out on CPUs where steps are not compiled and the size of the K/V memory is given; then a stage
    after the first has no buffer for the hidden states that it receives, and its first step fails.
    """

    model_runner: Any

    def determine_available_memory(self) -> int:
        self.model_runner.profile_run()
        available: int = super().determine_available_memory()
        return available
