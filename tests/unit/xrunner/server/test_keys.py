"""API keys: what stands in their file, what they grant, and a file that changes while the server runs."""

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.fakes import FakeExecutor, eventually, fake_app, fake_engine, fake_plan, running
from xgpt.core.errors import InputError
from xgpt.core.schema import Account, Constraint
from xrunner.logs import log_json
from xrunner.server.access.keys import ApiKeys, Key
from xrunner.server.observe.watch import Watch

ALICE, BOB, OPS = "alices-alices-alices", "bobs-bobs-bobs-bobs=", "operators-operators"
FILE = f"""
# name  key  settings
alice {ALICE} share=3 priority=1 requests_per_minute=60 tokens_per_minute=1e5
bob {BOB} answer_within=2.5 ttft=0.5 tpot=0.05
{OPS}
"""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_line_names_a_key_and_says_what_it_grants() -> None:
    keys = ApiKeys.parse(FILE)
    found = [keys.find(f"Bearer {key}".encode()) for key in (ALICE, BOB, OPS, "unknown-unknown-unknown")]
    assert found == [
        Key(Account("alice", 3.0, 1), is_admin=False, requests_per_minute=60, tokens_per_minute=1e5),
        Key(
            Account("bob", ttft_ns=5 * 10**8, tpot_ns=5 * 10**7),
            is_admin=False,
            answer_within_s=2.5,
            ttft_s=0.5,
            tpot_s=0.05,
        ),
        Key(Account("line-5"), is_admin=True),
        None,
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"alice {ALICE} share=0", "line 1, share=0"),
        (f"alice {ALICE} share=nan", "line 1, share=nan"),
        (f"alice {ALICE} share=1 share=2", "line 1.*is given twice"),
        (f"alice {ALICE} priority=1.5", "line 1, priority=1.5"),
        (f"alice {ALICE} rpm=5", "line 1.*the settings are share=NUMBER"),
        (f"{ALICE} tokens_per_minut=100000", "line 1.*the settings are share=NUMBER"),
        (f"alice of-the-accounting {ALICE}", "line 1.*the settings are share=NUMBER"),
        (f"alice {ALICE}\nalice {BOB}", "line 2.*is on an earlier line"),
        (f"alice {ALICE}\nbob {ALICE}", "line 2.*is on an earlier line"),
        (f"al!ce {ALICE}", "line 1.*a name has"),
        ("alice short", "line 1: 'a key of 5 characters'.*at least 16"),
        ("# nothing", "at least one key"),
    ],
)
def test_a_line_that_is_not_understood_is_refused_without_showing_the_key(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        ApiKeys.parse(text)
    assert not any(key in str(caught.value) for key in (ALICE, BOB))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(fake_app(fake_engine(FakeExecutor()), keys=ApiKeys.parse(FILE))) as url:
        yield url


@pytest.mark.parametrize("path", ["/", "/live", "/plan", "/plan/history", "/plan/decision", "/metrics"])
def test_clients_keys_do_not_read_what_tells_of_all(url: str, path: str) -> None:
    for key, status in ((OPS, 200), (BOB, 403), ("unknown-unknown-unknown", 401)):
        assert httpx.get(url + path, headers=bearer(key), trust_env=False).status_code == status
    refused = httpx.get(url + path, headers=bearer(BOB), trust_env=False).json()["error"]
    assert (refused["type"], refused["code"]) == ("permission_error", "admin_only")


def test_the_log_names_the_key(url: str) -> None:
    stream = io.StringIO()
    log_json("info", stream)
    assert httpx.get(f"{url}/v1/models", headers=bearer(ALICE), trust_env=False).status_code == 200
    assert eventually(lambda: "\n" in stream.getvalue())
    assert json.loads(stream.getvalue())["key"] == "alice"
    assert ALICE not in stream.getvalue()


PROGRAM = """
import sys
from pathlib import Path
from tests.fakes import *
from xrunner.logs import log_json
from xrunner.server.access.keys import ApiKeys
from xrunner.server.http.process import serve
log_json("info")
app = fake_app(fake_engine(FakeExecutor()), keys=ApiKeys.read(Path(sys.argv[1])))
serve(app, "127.0.0.1", 0)
"""


def test_sighup_reads_the_file_again_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    path, log = tmp_path / "keys", tmp_path / "log"
    path.write_text(f"alice {ALICE}\n")
    path.chmod(0o600)
    with (
        log.open("w") as to,
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)], stdout=to, stderr=to) as process,
    ):
        assert eventually(lambda: "listening" in log.read_text(), within_s=30)
        url = log.read_text().split("listening on ")[1].split()[0]

        def statuses() -> list[int]:
            asked = [httpx.get(f"{url}/v1/models", headers=bearer(key), trust_env=False) for key in (ALICE, BOB)]
            return [answer.status_code for answer in asked]

        try:
            for text, says, expected in (
                (f"bob {BOB}\n", "API keys reloaded", [401, 200]),
                (f"bob {BOB} nonsense\n", "the API keys are unchanged", [401, 200]),
                (f"alice {ALICE}\nbob {BOB}\n", "API keys reloaded", [200, 200]),
            ):
                path.write_text(text)
                before = log.read_text().count("\n")
                process.send_signal(signal.SIGHUP)
                assert eventually(
                    lambda says=says, before=before: says in "".join(log.read_text().splitlines()[before:])
                )
                assert statuses() == expected
                time.sleep(0.01)
        finally:
            process.terminate()
    lines = [json.loads(line) for line in log.read_text().splitlines() if "API keys" in line]
    assert len(lines) == 3
    assert lines[0]["keys"] == ["bob"] and "nonsense" not in lines[1]["reason"]
    assert not any(key in log.read_text() for key in (ALICE, BOB))


def test_a_key_has_a_promise_of_its_own_and_its_goodput_is_counted() -> None:
    estimate = fake_plan().estimate.model_copy(update={"encode_tokens": 0.03, "encode_batch": 0.01})
    plan = fake_plan(estimate=estimate)
    plan = plan.model_copy(update={"constraint": Constraint(ttft_s=0.5)})
    carol = "carols-carols-carols"
    keys = ApiKeys.parse(f"alice {ALICE} answer_within=2.5\nbob {BOB}\ncarol {carol} ttft=30\n{OPS}")
    executor = FakeExecutor(step_s=0.02)

    def ask(key: str, **fields: object) -> httpx.Response:
        body = {"model": "fake", "prompt": [1, 2, 3], **fields}
        return httpx.post(f"{url}/v1/completions", json=body, headers=bearer(key), trust_env=False, timeout=10)

    def metrics() -> str:
        return httpx.get(f"{url}/metrics", headers=bearer(OPS), trust_env=False, timeout=10).text

    with (
        running(fake_app(fake_engine(executor, max_batch=1), Watch(plan), keys=keys)) as url,
        ThreadPoolExecutor(3) as pool,
    ):
        long = pool.submit(ask, BOB, max_tokens=60)
        assert eventually(lambda: bool(executor.running))
        late = pool.submit(ask, BOB, max_tokens=1)
        patient = pool.submit(ask, carol, max_tokens=1)
        assert eventually(lambda: "xgpt_requests_waiting 2.0" in metrics())
        assert ask(ALICE, n=2).status_code == 429
        assert [answer.result().status_code for answer in (long, late, patient)] == [200, 200, 200]
        found = sorted(line for line in metrics().splitlines() if line.startswith("xgpt_key_bounds_total"))
        assert found == [
            'xgpt_key_bounds_total{kept="no",key="bob"} 1.0',
            'xgpt_key_bounds_total{kept="yes",key="bob"} 1.0',
            'xgpt_key_bounds_total{kept="yes",key="carol"} 1.0',  # as late, by a bound of its own
        ]
        live = httpx.get(f"{url}/live", headers=bearer(OPS), trust_env=False, timeout=10).json()
        assert live["keys"] == {"bob": {"kept": 1, "broken": 1}, "carol": {"kept": 1, "broken": 0}}
