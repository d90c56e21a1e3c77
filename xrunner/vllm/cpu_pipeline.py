"""A vLLM worker for pipelines on CPUs (`--worker-cls`)."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class CpuPipelineWorker(CPUWorker):
    """Runs one step before the first real one, as vLLM's GPU workers do.

    On CPUs, vLLM 0.32 omits this step if steps are not compiled and the size of the K/V memory is given. Then the
    stages after the first have no buffer for received hidden states, and their first step fails.
    """

    model_runner: Any

    def determine_available_memory(self) -> int:
        self.model_runner.profile_run()
        available: int = super().determine_available_memory()
        return available
