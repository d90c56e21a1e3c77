"""Recommendations from replicas that answer: what is read from them, what is published, what a lost answer does."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import httpx
import pytest

import xgpt
from tests.fleets import fleet_of
from tests.rings import LOOPBACKS
from xgpt.autoscaling.recommend import _Live, began_at
from xgpt.autoscaling.scraping import READ, LoadReader, ScrapedTraffic, Target, read_counts, target_of
from xgpt.core.errors import InputError, MachineError
from xgpt.metrics_pages import samples_of
from xgpt.requests import AutoscaleRequest
from xscheduler.fleet.recommender import Recommender


class Replica:
    """A server that says how many requests it has had."""

    def __init__(self) -> None:
        self.ended = self.waiting = 0
        self.began_s: float | None = None
        self.answers = True
        self.keys: set[str | None] = set()

    def text(self) -> str:
        if not self.answers:
            return "nothing"
        began = "" if self.began_s is None else f"xgpt_prompt_tokens_created {self.began_s}\n"
        return began + (
            f'xgpt_requests_total{{finish_reason="stop"}} {self.ended}.0\n'
            f"xgpt_requests_running 0.0\nxgpt_requests_waiting {self.waiting}.0\n"
            f"xgpt_prompt_tokens_total {100 * (self.ended + self.waiting)}.0\n"
            f"xgpt_output_tokens_total {10 * self.ended}.0\n"
        )


@contextmanager
def serving(replica: Replica) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            replica.keys.add(self.headers["Authorization"])
            body = replica.text().encode()
            self.send_response(200 if self.path == "/metrics" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://localhost:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_arrivals_are_counted_between_readings_and_anew_after_a_restart() -> None:
    one, other = Replica(), Replica()
    one.ended = 1000
    with serving(one) as url, serving(other) as url_2:
        reader = LoadReader([Target(0, url), Target(1, url_2)], 2, "secret")
        # The time in which the thousand have come is not known.
        assert reader.read(100.0) == ScrapedTraffic(0.0, 0, 0, 0, 0, 0, (1, 1))
        one.ended, other.ended, other.waiting = 1030, 20, 5
        assert reader.read(115.0) == ScrapedTraffic(15.0, 55, 50, 5500, 500, 5, (1, 1))
        one.ended, other.waiting = 7, 0  # it has been restarted
        assert reader.read(130.0) == ScrapedTraffic(15.0, 7, 7, 700, 70, 0, (1, 1))
        assert one.keys == {"Bearer secret"}
    assert LoadReader([Target(0, url)], 1, None).read(0.0) is None


def test_a_replica_that_missed_a_reading_is_counted_over_the_time_since_its_last_one() -> None:
    replica = Replica()
    with serving(replica) as url, serving(Replica()) as there:
        reader = LoadReader([Target(0, url), Target(0, there)], 1, None)
        replica.ended = 500
        reader.read(0.0)
        replica.answers = False
        assert reader.read(15.0) == ScrapedTraffic(15.0, 0, 0, 0, 0, 0, (1,))
        replica.answers, replica.ended = True, 520
        assert reader.read(30.0) == ScrapedTraffic(15.0, 10, 10, 1000, 100, 0, (2,))


def test_replicas_that_have_gone_are_forgotten() -> None:
    """Each pod has a new address; counters of all addresses were kept for ever."""
    replica = Replica()
    with serving(replica) as url, serving(Replica()) as there:
        reader = LoadReader([Target(0, url), Target(0, there)], 1, None)
        reader.read(0.0)
        replica.answers = False
        reader.read(3000.0)
        assert len(reader._before) == 2
        reader.read(4000.0)
    assert len(reader._before) == 1


@pytest.mark.parametrize(("began_s_ago", "arrived"), [(None, 0), (10_000, 1500), (5, 1_000_000)])
def test_a_replica_that_is_first_seen_late_is_counted_over_the_time_since_its_start(
    began_s_ago: float | None, arrived: float
) -> None:
    """All of its million requests once counted as those of one reading."""
    replica = Replica()
    replica.answers, replica.ended = False, 1_000_000
    with serving(replica) as url, serving(Replica()) as there:
        reader = LoadReader([Target(0, url), Target(0, there)], 1, None)
        reader.read(0.0)
        replica.answers, replica.began_s = True, began_s_ago and time.time() - began_s_ago
        traffic = reader.read(15.0)
    assert traffic is not None and traffic.num_requests == pytest.approx(arrived, rel=0.01)


@pytest.mark.parametrize("missed", [0, 40])
def test_missed_readings_and_a_clock_that_is_set_back_leave_a_steady_load_as_it_is(
    missed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests of ten minutes without an answer once counted as those of 15 s."""
    now_s, wanted, fleet, replica = 900.0, [], fleet_of([4.0] * 12), Replica()
    clock = SimpleNamespace(monotonic=lambda: now_s, time=lambda: now_s - 3600 * (now_s > 1200))
    monkeypatch.setattr("xgpt.autoscaling.recommend.time", clock)
    with serving(replica) as url:
        request = AutoscaleRequest(scrape=(url,))
        live = _Live(fleet, request, Recommender(fleet), LoadReader([Target(0, url)], 1, None), 0.0)
        for number in range(60):
            replica.answers = not 10 <= number < 10 + missed
            found, note = live.look()
            assert found is not None and (number == 0 or "4 requests/s arrive" in note or not replica.answers)
            wanted.append(found.replicas[0])
            now_s, replica.ended = now_s + 15, replica.ended + 60
    assert set(wanted) <= {2, 3}


def test_a_recommender_that_restarts_lets_no_ready_replica_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first recommendation was the planned number, and autoscalers end surplus replicas at once."""
    now_s, fleet, replica = 900.0, fleet_of([4.0] * 12), Replica()
    monkeypatch.setattr("xgpt.autoscaling.recommend.time", SimpleNamespace(monotonic=lambda: now_s))
    with ExitStack() as opened:
        urls = [opened.enter_context(serving(replica)) for _ in range(8)]
        reader = LoadReader([Target(0, url) for url in urls], 1, None)
        live = _Live(fleet, AutoscaleRequest(scrape=urls), Recommender(fleet), reader, 0.0)
        for _ in range(3):
            found, _ = live.look()
            assert found is not None and found.replicas[0] >= 8
            now_s, replica.ended = now_s + 15, replica.ended + 28


def test_prompts_that_wait_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tokens were divided by the number of ended requests, so a queue made prompts look longer."""
    now_s, fleet, replica = 900.0, fleet_of([4.0] * 12), Replica()
    monkeypatch.setattr("xgpt.autoscaling.recommend.time", SimpleNamespace(monotonic=lambda: now_s))
    with serving(replica) as url:
        reader = LoadReader([Target(0, url)], 1, None)
        live = _Live(fleet, AutoscaleRequest(scrape=(url,)), Recommender(fleet), reader, 0.0)
        reader.read(now_s)
        replica.ended, replica.waiting = 100, 300
        traffic = reader.read(now_s + 15)
        assert traffic is not None and live._lengths(now_s + 15, traffic) == (100.0, 10.0, 100)


@pytest.mark.parametrize(
    "text",
    [
        *("", "# nothing", "xgpt_requests_running 1.0", "<html>", "xgpt_requests_waiting x"),
        *(f"xgpt_requests_running 1.0\nxgpt_requests_waiting {number}\n" for number in ("NaN", "+Inf", "-5")),
    ],
)
def test_what_is_no_replica_has_no_counts(text: str) -> None:
    samples = samples_of(text, READ)
    assert samples is None or read_counts(samples) is None


HEAD = b"HTTP/1.1 200 OK\r\n"
HOSTILE = {
    "a head without an end": (HEAD, b"x"),
    "a page without an end": (HEAD + b"Content-Length: 9999999999\r\n\r\n", b"x" * (1 << 20)),
    "a page that comes slowly": (HEAD + b"Content-Length: 1000\r\n\r\n", b"x"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_replica_does_not_hold_up_the_reading_of_the_others(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that sent a byte a second once did, for ever, and one whose page has no end took all memory."""
    monkeypatch.setattr("xgpt.autoscaling.scraping.TIMEOUT_S", 0.6)
    first, again = HOSTILE[name]

    def drip() -> None:
        client, _ = listener.accept()
        with client, suppress(OSError):
            client.sendall(first)
            while True:
                client.sendall(again)
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listener, serving(Replica()) as url:
        thread = threading.Thread(target=drip)
        thread.start()
        reader = LoadReader([Target(0, f"http://127.0.0.1:{listener.getsockname()[1]}"), Target(0, url)], 1, None)
        begin_s = time.monotonic()
        assert reader.read(0.0) == ScrapedTraffic(0.0, 0, 0, 0, 0, 0, (1,))
        assert time.monotonic() - begin_s < 5
        thread.join()


def test_targets_name_kinds() -> None:
    kinds = ["h100x8/1", "a100x16/2"]
    assert target_of("a100x16/2=http://pods:8000/metrics", kinds) == Target(1, "http://pods:8000")
    assert target_of("https://[::1]:8000/", kinds[:1]) == Target(0, "https://[::1]:8000")
    for text in ("http://pods:8000", "a40x4=http://pods", "h100x8/1=pods:8000", "h100x8/1=http://", "", "=http://x:y"):
        with pytest.raises(InputError, match="scrape"):
            target_of(text, kinds)


def until(published: Callable[[], str], words: str) -> None:
    ends_s = time.monotonic() + 20
    while words not in published():
        assert time.monotonic() < ends_s, published()
        time.sleep(0.1)


@pytest.mark.parametrize("host", LOOPBACKS)
def test_the_wanted_replicas_are_published_as_the_load_grows(host: str) -> None:
    replica, notes, stop = Replica(), list[str](), threading.Event()
    with serving(replica) as url:
        asked = {"scrape": [url], "look_s": 0.2, "host": host, "port": 0, "stop": stop, "on_note": notes.append}
        running = threading.Thread(target=xgpt.autoscale, args=(fleet_of([2.0] * 12),), kwargs=asked)
        running.start()
        try:
            while not notes:
                time.sleep(0.05)
            address = notes[0].removeprefix("publishing recommendations at ")

            def published() -> str:
                return httpx.get(address, trust_env=False).text

            until(published, "xgpt_replicas_ready{")
            labels = '{fleet="xgpt-llama-3-1-8b",kind="0",name="kind0"}'
            until(published, f"xgpt_replicas_wanted{labels} 1.0")
            until(published, f"xgpt_replicas_ready{labels} 1.0")
            replica.waiting = 100_000
            until(
                lambda: published().replace(f"xgpt_replicas_wanted{labels} 1.0", "as before"), "xgpt_replicas_wanted{"
            )
        finally:
            stop.set()
            running.join()
    assert any("100000 wait" in note for note in notes)


def test_a_load_that_is_given_as_a_number_needs_no_replicas() -> None:
    fleet = fleet_of([4.0] * 12)
    few, many = (xgpt.autoscale(fleet, arrival_rate_per_s=rate, once=True) for rate in (4, 40))
    assert few is not None and many is not None
    assert 2 <= few.replicas[0] <= 4 and 20 <= many.replicas[0] <= 28


def test_what_cannot_be_looked_at_is_refused() -> None:
    fleet = fleet_of([2.0])
    with pytest.raises(InputError, match="give the URLs of the replicas, or the load"):
        xgpt.autoscale(fleet)
    with pytest.raises(InputError, match="not both"):
        xgpt.autoscale(fleet, scrape=["http://x"], arrival_rate_per_s=1)
    with pytest.raises(MachineError, match="no replica answers"):
        xgpt.autoscale(fleet, scrape=["http://127.0.0.1:9"], once=True)


def test_the_planned_day_begins_at_its_last_hour() -> None:
    noon_s = 86400 * 20_000 + 12 * 3600
    assert began_at(noon_s, None) == noon_s
    assert began_at(noon_s, "00:00") == noon_s - 12 * 3600
    assert began_at(noon_s, "13:30") == noon_s - 22.5 * 3600
