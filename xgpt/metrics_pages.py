"""Read the /metrics pages of engines, in bounded time and memory whatever they hold."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from xgpt.connection import Failure, answer_of

MOST_BYTES = 4 << 20
MOST_LINE = 2048
"""Longer lines are skipped: the parser takes quadratic time for the labels of a line."""


def read_samples(url: str, names: Iterable[str], seconds: float, api_key: str | None = None) -> list[Sample] | None:
    """Return the samples on the page of the server at `url`, or None if there is no page within `seconds`.

    Args:
        names: beginnings of the names of samples. Others are skipped.
    """
    try:
        status, body = answer_of(f"{url.rstrip('/')}/metrics", seconds=seconds, most=MOST_BYTES, api_key=api_key)
    except Failure:
        return None
    return samples_of(body.decode(errors="replace"), names) if 200 <= status < 300 else None


def samples_of(page: str, names: Iterable[str]) -> list[Sample] | None:
    beginnings = tuple(names)
    lines = [line for line in page.splitlines() if len(line) <= MOST_LINE and line.startswith(beginnings)]
    try:
        families = text_string_to_metric_families("\n".join(lines))
        return [sample for family in families for sample in family.samples]
    except ValueError:
        return None
