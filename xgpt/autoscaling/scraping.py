"""Read a fleet's live load from the /metrics of its replicas."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

from prometheus_client.samples import Sample

from xgpt.core.errors import InputError
from xgpt.core.network import address_text
from xgpt.metrics_pages import read_samples

ENDED = "xgpt_requests_total"
RUNNING, WAITING = "xgpt_requests_running", "xgpt_requests_waiting"
PROMPT, OUTPUT = "xgpt_prompt_tokens_total", "xgpt_output_tokens_total"
BEGAN = "xgpt_prompt_tokens_created"
"""A metric that prometheus_client adds: the time at which a counter began, which is the start of the server."""
READ = (ENDED, RUNNING, WAITING, PROMPT, OUTPUT, BEGAN)
TIMEOUT_S = 2.0
FORGET_S = 3600.0
"""Seconds after which the counters of a replica that has not answered are forgotten."""
AT_ONCE = 16
"""Number of replicas that are read at the same time."""


class Counts(NamedTuple):
    """A replica's counters, which start at 0 when the replica starts, and its waiting requests.

    Attributes:
        prompt_tokens: number of prompt tokens of the accepted requests.
        age_s: seconds since the replica's start, or infinity if not known.
    """

    arrived: float
    ended: float
    prompt_tokens: float
    output_tokens: float
    waiting: float
    age_s: float


NOTHING = Counts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class ScrapedTraffic(NamedTuple):
    """The traffic of all replicas between two readings of their metrics.

    Attributes:
        seconds: time since the previous reading that a replica answered. 0 means that there was no such reading.
        ready: for each kind, how many replicas answered the latest reading. # [kinds]
    """

    seconds: float
    num_requests: float
    ended: float
    prompt_tokens: float
    output_tokens: float
    waiting: float
    ready: tuple[int, ...]


class Target(NamedTuple):
    """The URL of replicas of one kind. With http, each address of the URL's host is a replica. With https, the host is
    one replica.

    Attributes:
        kind: index of the kind in the fleet.
    """

    kind: int
    url: str


def target_of(text: str, kinds: Sequence[str]) -> Target:
    """Return the target that a text of the form KIND=URL names. KIND may be left out if the fleet has only one kind.

    Raises:
        InputError: the kind is not known, or the URL is not an http or https URL.
    """
    before, separator, rest = text.partition("http")
    name, url = before.removesuffix("="), (separator + rest).removesuffix("/metrics").rstrip("/")
    try:
        is_url = urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).hostname)
        _ = urlsplit(url).port
    except ValueError:
        is_url = False
    if not is_url or (before and not before.endswith("=")):
        raise InputError("scrape", text, "write [KIND=]URL, as in http://HOST:PORT")
    if not name and len(kinds) == 1:
        return Target(0, url)
    if name not in kinds:
        raise InputError("scrape", text, f"write KIND=URL; the fleet has the kinds {', '.join(kinds)}")
    return Target(kinds.index(name), url)


class LoadReader:
    """Reads the load of a fleet's replicas."""

    def __init__(self, targets: Sequence[Target], num_kinds: int, api_key: str | None) -> None:
        self._targets, self._num_kinds = targets, num_kinds
        self._api_key = api_key
        self._before: dict[str, tuple[float, Counts]] = {}
        """Time and counters of each replica's last answer, even if the replica did not answer the last reading."""
        self._read_s: float | None = None

    def read(self, now_s: float) -> ScrapedTraffic | None:
        """Read the metrics of all replicas. Return the traffic since the previous reading that a replica answered, or
        None if no replica answers now.

        The first reading only starts the counts: its traffic is 0.

        Args:
            now_s: the present time on a monotonic clock.
        """
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = list(pool.map(self._counts, self._addresses()))
        now = {url: (kind, counts) for kind, url, counts in found if counts is not None}
        if not now:
            return None
        seconds = 0.0 if self._read_s is None else now_s - self._read_s
        changes = [_recent(self._before.get(url), now_s, counts, seconds) for url, (_, counts) in now.items()]
        self._read_s = now_s
        self._before |= {url: (now_s, counts) for url, (_, counts) in now.items()}
        # Replicas come and go with new addresses.
        self._before = {url: last for url, last in self._before.items() if now_s - last[0] < FORGET_S}
        ready = [kind for kind, _ in now.values()]
        waiting = sum(counts.waiting for _, counts in now.values())
        arrived, ended, prompt, output = (sum(column) for column in zip(*changes, strict=True))
        by_kind = tuple(ready.count(kind) for kind in range(self._num_kinds))
        return ScrapedTraffic(seconds, arrived, ended, prompt, output, waiting, by_kind)

    def _addresses(self) -> Iterator[tuple[int, str]]:
        """Yield the kind and the URL of each replica. Skip host names that do not resolve.

        If a host has both IPv4 and IPv6 addresses, only the IPv4 addresses are used. Otherwise a replica would count
        twice.
        """
        for kind, url in self._targets:
            parts = urlsplit(url)
            if parts.scheme == "https":  # the certificate is for the host name, not for an address
                yield kind, url
                continue
            with suppress(OSError):
                found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
                each = {(family == socket.AF_INET6, str(address[0]), int(address[1])) for family, *_, address in found}
                for is_ipv6, host, port in sorted(each):
                    if is_ipv6 == min(each)[0]:
                        yield kind, f"http://{address_text(host, port)}{parts.path}"

    def _counts(self, address: tuple[int, str]) -> tuple[int, str, Counts | None]:
        kind, url = address
        samples = read_samples(url, READ, TIMEOUT_S, self._api_key)
        return kind, url, None if samples is None else read_counts(samples)


def read_counts(samples: Iterable[Sample]) -> Counts | None:
    """Return a replica's counters from its page, or None if counters are missing, negative or not finite."""
    found: dict[str, float] = {}
    for sample in samples:
        found[sample.name] = found.get(sample.name, 0.0) + sample.value
    if RUNNING not in found or WAITING not in found:
        return None
    ended = found.get(ENDED, 0.0)
    arrived = ended + found[RUNNING] + found[WAITING]
    counts = (arrived, ended, found.get(PROMPT, 0.0), found.get(OUTPUT, 0.0), found[WAITING])
    age_s = time.time() - found[BEGAN] if math.isfinite(found.get(BEGAN, math.nan)) else math.inf
    return Counts(*counts, age_s) if all(0 <= count < math.inf for count in counts) else None


def _recent(before: tuple[float, Counts] | None, now_s: float, counts: Counts, seconds: float) -> list[float]:
    """Return four numbers for a replica and the last `seconds`: requests that arrived, requests that ended, prompt
    tokens, and output tokens.

    Requests are assumed to be spread evenly over the time since the replica's previous reading or, if the replica has
    started since, over the time since its start.
    """
    since_s, base = (math.inf, NOTHING) if before is None else (now_s - before[0], before[1])
    if base.ended > counts.ended or before is None:
        since_s, base = min(since_s, counts.age_s), NOTHING
    share = seconds and seconds / max(since_s, seconds)
    return [share * max(0.0, b - a) for a, b in zip(base[:4], counts[:4], strict=True)]
