"""Which clients are served, and what is refused before a body is read."""

import io
import json
import logging
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes import FakeExecutor, eventually, fake_app, fake_engine, running
from xgpt.core.errors import InputError
from xgpt.core.schema import Account
from xrunner.logs import log_json
from xrunner.server.access.hosts import AllowedHosts, check_exposure
from xrunner.server.access.keys import ApiKeys, Key

KEY, OTHER = "correct-horse-battery", "staple-staple-staple"
BODY = {"model": "fake", "prompt": [5, 6, 7], "max_tokens": 4}


@pytest.fixture(scope="module")
def executor() -> FakeExecutor:
    return FakeExecutor(step_s=0.01)


@pytest.fixture(scope="module")
def url(executor: FakeExecutor) -> Iterator[str]:
    app = fake_app(
        fake_engine(executor), keys=ApiKeys.parse(f"{OTHER}\n{KEY}"), hosts=AllowedHosts("127.0.0.1", ["llm.lan"])
    )
    with running(app) as url:
        yield url


def ask(url: str, path: str = "/v1/completions", body: object = BODY, **headers: str) -> httpx.Response:
    given = {"authorization": f"Bearer {KEY}"} | {name.replace("_", "-"): value for name, value in headers.items()}
    with httpx.Client(trust_env=False, timeout=10) as client:
        if path.startswith("/v1/"):
            return client.post(url + path, json=body, headers=given)
        return client.get(url + path, headers=given)


@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer wrong-wrong-wrong", f"Token {KEY}", "Basic §", KEY])
def test_without_a_key_nothing_but_the_probes_answers(url: str, authorization: str) -> None:
    headers = {"authorization": authorization.encode()} if authorization else {}
    for path in ("/v1/models", "/metrics", "/plan", "/openapi.json", "/nowhere"):
        answer = httpx.get(url + path, headers=headers, trust_env=False)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert answer.json()["error"]["type"] == "authentication_error"
    for path in ("/health", "/ready"):
        assert httpx.get(url + path, headers=headers, trust_env=False).status_code == 200


def test_each_key_is_accepted_also_from_browsers(url: str) -> None:
    basic = b64encode(f"anyone:{OTHER}".encode()).decode()
    for authorization in (f"Bearer {KEY}", f"bearer {OTHER}", f"Basic {basic}"):
        assert ask(url, authorization=authorization).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:1", 200), ("localhost", 200), ("[::1]:80", 200), ("LLM.lan.", 200), ("evil.example", 421), ("[", 421)],
)
def test_the_host_must_be_ours(url: str, host: str, status: int) -> None:
    assert ask(url, host=host).status_code == status


def test_pages_of_other_sites_are_refused_and_get_no_cors(url: str) -> None:
    assert ask(url, origin=url).status_code == 200
    for origin in ("https://evil.example", "null", "http://localhost:3000"):
        assert ask(url, origin=origin).status_code == 403
    preflight = httpx.options(
        f"{url}/v1/completions",
        headers={"authorization": f"Bearer {KEY}", "access-control-request-method": "POST"},
        trust_env=False,
    )
    assert preflight.status_code == 405
    assert not [name for name in preflight.headers if name.startswith("access-control")]


def test_pages_of_allowed_origins_get_cors(executor: FakeExecutor) -> None:
    """They were refused, whatever their origin, and preflights got 405."""
    ours = "app://obsidian.md"
    app = fake_app(fake_engine(executor), keys=ApiKeys.parse(KEY), hosts=AllowedHosts("127.0.0.1", (), [ours]))
    with running(app) as url:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        preflight = httpx.options(f"{url}/v1/completions", headers={"origin": ours} | asked, trust_env=False)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-headers"] == "authorization"
        answer = ask(url, origin=ours)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, ours)
        other = ask(url, origin="https://evil.example")
        assert other.status_code == 403 and "access-control-allow-origin" not in other.headers
        assert ask(url, origin=ours, authorization="Bearer wrong-wrong-wrong").status_code == 401


def test_request_ids_come_back_unless_they_could_forge_a_log(url: str) -> None:
    assert ask(url, x_request_id="abc-1").headers["x-request-id"] == "abc-1"
    request_id = ask(url, x_request_id='"},{"x').headers["x-request-id"]
    assert len(request_id) == 32
    assert ask(url, path="/nowhere").headers["x-content-type-options"] == "nosniff"


def test_the_log_tells_everything_but_the_prompt(url: str) -> None:
    stream = io.StringIO()
    log_json("info", stream)
    body = BODY | {"prompt": [77, 78], "user": "secret-user"}
    ask(url, body=body, x_request_id="r1")
    ask(url, body=body | {"model": "secret-model"}, x_request_id="r2")
    ask(url, path="/health")
    assert eventually(lambda: all(f'"{id_}"' in stream.getvalue() for id_ in ("r1", "r2")))
    lines = {line["request_id"]: line for line in map(json.loads, stream.getvalue().splitlines())}
    done, refused = lines["r1"], lines["r2"]
    assert not any(line["path"] == "/health" for line in lines.values())
    assert (done["request_id"], done["status"], done["path"]) == ("r1", 200, "/v1/completions")
    assert (done["prompt_tokens"], done["output_tokens"], done["finish_reasons"]) == (2, 4, ["length"])
    assert 0 <= done["queued_s"] <= done["ttft_s"] <= done["total_s"] <= done["seconds"]
    assert (refused["request_id"], refused["status"]) == ("r2", 404)
    assert refused["error"].startswith("model: 'secret-model' is not served here")
    assert "secret-user" not in stream.getvalue() and "77" not in done.get("message", "")


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_the_answer(url: str, executor: FakeExecutor, stream: bool) -> None:
    long = BODY | {"max_tokens": 400, "stream": stream}
    for body, headers in ((long | {"deadline_s": 0.1}, {}), (long | {"deadline_s": 9}, {"x_deadline_s": "0.1"})):
        begin_s = time.monotonic()
        answer = ask(url, body=body, **headers)
        assert time.monotonic() - begin_s < 2
        error = json.loads(answer.text.split("data: ")[-1])["error"]
        assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
        assert answer.status_code == (200 if stream else 504)
    assert eventually(lambda: not executor.running)
    assert ask(url, body=BODY | {"deadline_s": 5}).status_code == 200


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", "1_0", "0x1"])
def test_a_deadline_is_seconds(url: str, value: str) -> None:
    assert ask(url, x_deadline_s=value).json()["error"]["param"] == "X-Deadline-S"


def test_a_body_of_half_a_million_items_is_refused_unread(url: str) -> None:
    answer = ask(url, body=BODY | {"prompt": [1] * 600_000})
    assert answer.status_code == 413


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# ours\n\n{KEY}\n")
    keys = ApiKeys.read(path)
    assert keys.find(f"Bearer {KEY}".encode()) == Key(Account("line-3"), is_admin=True)
    assert keys.find(b"Bearer # ours") is None
    for text in ("# none\n", "short\n", "with blanks in it, sixteen\n"):
        path.write_text(text)
        with pytest.raises(InputError) as caught:
            ApiKeys.read(path)
        assert "with blanks" not in str(caught.value)


@pytest.mark.parametrize(("mode", "said"), [(0o600, ""), (0o640, ""), (0o644, "read"), (0o666, "change")])
def test_a_key_file_that_others_can_read_or_change_draws_a_warning(
    mode: int, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text(KEY)
    path.chmod(mode)
    ApiKeys.read(path)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * bool(said)
    assert said in caplog.text and KEY not in caplog.text


def test_beyond_this_machine_only_with_keys() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        check_exposure(host, None)
    for host in ("0.0.0.0", "::"):
        with pytest.raises(InputError, match="api_key_file"):
            check_exposure(host, None)
        check_exposure(host, ApiKeys.parse(KEY))


def test_a_server_of_all_addresses_takes_any_literal_one() -> None:
    hosts = AllowedHosts("0.0.0.0", ["svc.cluster.local"])
    assert all(map(hosts.accept, ("10.0.0.7:8000", "[fe80::1]", "svc.cluster.local", "localhost:1")))
    assert not hosts.accept("rebound.example")


@pytest.mark.parametrize("host", ["", "evil@127.0.0.1", "@127.0.0.1", "127.0.0.1:x", "127.0.0.1:0", "127.0.0.1:65536"])
def test_a_host_is_a_name_with_or_without_a_port(host: str) -> None:
    hosts = AllowedHosts("127.0.0.1")
    assert hosts.accept("127.0.0.1") and hosts.accept("LOCALHOST.:80") and hosts.accept("[::1]:65535")
    assert not hosts.accept(host)


def test_origins_of_a_server_with_tls() -> None:
    """An attacker that changes pages on their way could send one of http://."""
    hosts = AllowedHosts("127.0.0.1", ["llm.lan"])
    assert hosts.accept_origin("https://llm.lan", "https") and not hosts.accept_origin("http://llm.lan", "https")
    assert hosts.accept_origin("https://llm.lan", "http") and hosts.accept_origin("http://llm.lan", "http")


def test_pages_of_other_ports_are_other_servers() -> None:
    hosts = AllowedHosts("127.0.0.1", ["llm.lan"])
    assert hosts.accept_origin("http://127.0.0.1:8000", "http", "127.0.0.1:8000")
    for origin in ("http://127.0.0.1:8001", "http://127.0.0.1", "http://localhost:8000", "null", "http://evil.lan"):
        assert not hosts.accept_origin(origin, "http", "127.0.0.1:8000")
    assert hosts.accept_origin("https://llm.lan", "http", "127.0.0.1:8000"), "a proxy changes the Host header"
    assert hosts.accept_origin("https://llm.lan:8443", "http", "llm.lan")


def test_logs_do_not_flood() -> None:
    stream = io.StringIO()
    log_json("info", stream)
    try:
        for _ in range(10_000):
            logging.getLogger("x").error("accept failed: %s", "again")
            logging.getLogger("a").info("request", extra={"fields": {"status": 401}})
        for _ in range(1000):
            logging.getLogger("a").info("request", extra={"fields": {"status": 200}})
        time.sleep(0.6)
        logging.getLogger("x").error("accept failed: %s", "again")
    finally:
        logging.getLogger().handlers.clear()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) < 1400
    assert sum(line.get("status") == 200 for line in lines) == 1000
    assert sum(line.get("left_out", 0) for line in lines if line["logger"] == "x") > 9000
