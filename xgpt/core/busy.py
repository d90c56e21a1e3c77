"""Ask a server how long its workers have executed steps."""

from __future__ import annotations

import time

import httpx
from prometheus_client.parser import text_string_to_metric_families

from xgpt.core.errors import MachineError

TOLD_WITHIN_S = 1.2
"""Seconds to wait until all workers have reported. They report twice a second."""
TIMEOUT_S = 10.0


def busy_of_workers(url: str) -> dict[str, float]:
    """Return for each worker the seconds for which it has executed steps. This waits until all workers have reported.

    Raises:
        MachineError: the server does not answer.
    """
    time.sleep(TOLD_WITHIN_S)
    try:
        text = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S, trust_env=False).text
    except httpx.HTTPError as error:
        raise MachineError(f"{url}/metrics does not answer: {error}") from None
    return {
        sample.labels["process"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "xgpt_busy_seconds_total"
    }
