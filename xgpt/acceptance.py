"""Read how often draft tokens are accepted, from shares or from a server's metrics page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from xgpt.core.errors import InputError

FEW_AHEAD = 8
"""A single acceptance share applies to this many draft tokens."""
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)", re.MULTILINE)
"""Matches a sample in a metrics page: name, labels and value."""
VLLM = "vllm:spec_decode_num_"
SGLANG = "sglang:spec_accept_length"


def shares_of(given: float | tuple[float, ...] | str, tokens: int | None) -> tuple[float, ...]:
    """Return the shares of steps in which at least one draft token is accepted, at least two, and so on.

    Args:
        given: several shares; one probability, for a draft token whose predecessors were all accepted; or a metrics
            page.
        tokens: number of draft tokens, or None if not known.

    Raises:
        InputError: the acceptance is malformed.
    """
    if isinstance(given, tuple):
        return given
    if isinstance(given, str):
        return from_metrics(Path(given))
    if not 0 <= given <= 1:
        raise InputError("acceptance", given, "a share must be from 0 to 1")
    return _constant(given, tokens or FEW_AHEAD)


def _constant(share: float, positions: int) -> tuple[float, ...]:
    return tuple(share**position for position in range(1, positions + 1))


def from_metrics(path: Path) -> tuple[float, ...]:
    """Return the acceptance of each draft token from a metrics page of vLLM or SGLang.

    vLLM counts drafts, and accepted tokens by position. SGLang states only the mean number of tokens in a step, from
    which the same share is computed for all positions.

    Raises:
        InputError: the file does not exist, or the page counts no drafts.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        says = f"it cannot be read: {error.strerror}; give a share such as 0.75, or the file of a server's metrics page"
        raise InputError("acceptance", str(path), says) from None
    drafts, accepted, steps = 0.0, dict[int, float](), list[float]()
    for name, labels, value in _samples(text):
        position = re.search(r'position="(\d+)"', labels)
        if name in (f"{VLLM}drafts_total", f"{VLLM}drafts"):
            drafts += value
        elif name.startswith(f"{VLLM}accepted_tokens_per_pos") and not name.endswith("_created") and position:
            accepted[int(position[1])] = accepted.get(int(position[1]), 0.0) + value
        elif name == SGLANG:
            steps.append(value)
    if drafts and accepted:
        shares = [accepted.get(position, 0.0) / drafts for position in range(max(accepted) + 1)]
        return tuple(min(1.0, *shares[: position + 1]) for position in range(len(shares)))
    if steps:
        return _constant(_share_of(sum(steps) / len(steps)), FEW_AHEAD)
    raise InputError(
        "acceptance",
        str(path),
        f"it counts no drafts (vLLM: {VLLM}drafts_total and {VLLM}accepted_tokens_per_pos; SGLang: {SGLANG}): give the "
        "metrics page of a server that has answered requests with speculative decoding",
    )


def _samples(text: str) -> Iterator[tuple[str, str, float]]:
    for name, labels, value in SAMPLE.findall(text):
        try:
            yield name, labels, float(value)
        except ValueError:
            continue


def _share_of(tokens_per_step: float) -> float:
    """Return the share p for which 1 + p + p^2 + ... is the mean number of tokens in a step."""
    return max(0.0, 1 - 1 / max(tokens_per_step, 1.0))
