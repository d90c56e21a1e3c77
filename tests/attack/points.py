"""Earlier faults of servers under attack, with figures, and the tests elsewhere that cover them."""

from __future__ import annotations

from typing import NamedTuple


class Point(NamedTuple):
    """Something that a client, a neighbour or a fault could do.

    Attributes:
        before: what came of it when it was found.
        elsewhere: node ids of tests outside this directory that show what comes of it now.
    """

    what: str
    before: str
    elsewhere: tuple[str, ...] = ()


POINTS = {
    1: Point("vLLM behind no guard", "no key, a wrong key and a foreign Host got 200; five options were dropped"),
    2: Point(
        "numbers out of range",
        "n=3 or top_k=10**20 on several processes: every request got 500 from then on",
        ("tests/unit/xrunner/server/test_protocol.py",),
    ),
    3: Point(
        "torch's store on all interfaces",
        "a stranger set keys, and ran code within a second",
        ("tests/unit/xrunner/cluster/test_workers.py",),
    ),
    4: Point(
        "300 idle sockets at 256 files",
        "/health did not answer, connections were never closed, 590 MB of log in 100 s",
        (
            "tests/unit/xrunner/server/test_process.py::test_more_idle_sockets_than_files",
            "tests/unit/xrunner/server/test_connections.py",
        ),
    ),
    5: Point("60 unfinished bodies of 30 MiB", "memory from 490 to 2,256 MiB"),
    6: Point("chats without max_tokens", "16 of them held all blocks; a request for two tokens waited 29 s"),
    7: Point(
        "a prompt that one lane never holds",
        "let in; all behind it stood still while /health said ok",
        ("tests/unit/xrunner/test_recovery.py::test_requests_that_another_plan_cannot_hold_end_when_it_comes",),
    ),
    8: Point(
        "replicas read while others change them",
        "a rare RuntimeError that ended the engine",
        ("tests/unit/xrunner/test_replicas.py",),
    ),
    9: Point(
        "two machines of one name",
        "a local process with the remote worker's PID was killed",
        ("tests/unit/xrunner/cluster/test_workers.py",),
    ),
    10: Point(
        "exported Kubernetes objects",
        "0.0.0.0 without a key; a newline in a model's name injected YAML",
        ("tests/unit/xrunner/vllm/test_rule_in_vllm.py",),
    ),
    11: Point("60 long prompts", "a stream's gap from 3.6 to 561 ms, /health 640 ms"),
    12: Point(
        "clients that do not read",
        "1,900 blocks held at twice the deadline, open after 90 s, 260 MB",
        ("tests/unit/xrunner/server/test_connections.py::test_a_deadline_holds_also_where_the_client_does_not_read",),
    ),
    13: Point("one large answer", "+700 MiB, /health 1.5 s"),
    14: Point(
        "output that is no text",
        "quadratic: 4,000 tokens took 0.81 s on the event loop",
        ("tests/unit/xrunner/server/test_text.py",),
    ),
    15: Point(
        "a full disk, an engine that fails",
        "the engine ended; the process answered 500 for ever",
        (
            "tests/unit/xrunner/test_recovery.py",
            "tests/unit/xrunner/server/test_process.py::test_an_engine_that_has_failed_ends_the_process",
        ),
    ),
    16: Point(
        "orders and deadlines after a loss",
        "edf, das, sjf and lpt were fcfs after a restart; deadlines were lost; das hit an assertion in vLLM",
        (
            "tests/unit/xrunner/test_recovery.py::test_deadlines_and_order_outlive_a_loss",
            "tests/unit/xrunner/vllm/test_engine.py::test_deadlines_reach_the_rule",
        ),
    ),
    17: Point("WAA's front in vLLM", "no keys, no limits, grew for ever; a 200 that was no JSON wedged a lane"),
    18: Point(
        "starvation and shares",
        "any deadline beat all without one; sjf starved long prompts",
        ("tests/unit/xgpt/core/policies/test_admission.py",),
    ),
    19: Point(
        "sampled outputs beside others",
        "11 of 126 differed between runs of one seed",
        ("tests/unit/xrunner/test_sampling.py", "tests/numerics/test_not_finite.py"),
    ),
    20: Point(
        "the end, half-closed clients, lengths",
        "the listener closed at once; half-closed clients got no answer; two lengths were accepted",
        (
            "tests/unit/xrunner/server/test_process.py::test_load_balancers_learn_of_the_end_before_it_comes",
            "tests/unit/xrunner/server/test_connections.py",
        ),
    ),
    22: Point(
        "long fields",
        "kept until a request ended, echoed whole, 128 times in an answer, written to the log: 65 GB a day",
        (
            "tests/unit/xrunner/server/test_costs.py",
            "tests/contract/test_step_replay.py::test_few_rows_are_scored_in_a_step",
        ),
    ),
    21: Point(
        "bodies in chunks of one byte",
        "without a key /health waited 14 s; 400,000 chunks with one took 15 s",
        ("tests/unit/xrunner/server/test_connections.py::test_a_body_in_chunks_is_parsed_when_it_is_asked_for",),
    ),
    23: Point(
        "what a listener takes from a peer that it does not know",
        "the control port took 1.5 GiB before the peer's key was checked",
        ("tests/unit/xrunner/cluster/test_sockets.py",),
    ),
    24: Point(
        "files, signals and pages of others on this machine",
        "compiled code of another user ran as root; `xgpt ui` read its owner's files for any user; SIGHUP ended a "
        "server; pages of other ports could post",
        (
            "tests/unit/xgpt/core/test_compiled_code.py",
            "tests/unit/xgpt/exploring/test_ui.py::test_nothing_is_answered_without_the_token",
            "tests/unit/xrunner/server/test_access.py::test_pages_of_other_ports_are_other_servers",
            "tests/unit/xrunner/server/test_access.py::test_a_key_file_that_others_can_read_or_change_draws_a_warning",
        ),
    ),
    25: Point(
        "names in manifests",
        "a newline in a plan's checkpoint wrote Kubernetes objects",
        ("tests/unit/xgpt/exporting/test_exports.py",),
    ),
    26: Point(
        "a checkpoint's own files",
        "a template's '%0999999999d' % 1 took all memory; a tokenizer without its special token gave 500 to each "
        "request; a header of 5 GiB was read whole",
        (
            "tests/unit/xrunner/server/test_chat.py::test_a_hostile_template_is_refused",
            "tests/unit/xrunner/server/test_chat.py::test_a_process_that_renders_and_is_stopped_or_killed_is_replaced",
            "tests/unit/xrunner/server/test_text.py::test_a_tokenizer_that_encodes_nothing_is_refused_when_it_is_loaded",
            "tests/cli/test_hostile_files.py",
        ),
    ),
    27: Point(
        "a process that hangs",
        "an idle vLLM that was stopped was never noticed, a busy one after two minutes",
        (
            "tests/unit/xrunner/server/test_watch.py::test_a_planner_that_ends_or_hangs_is_replaced",
            "tests/unit/xrunner/vllm/test_engine.py::test_a_vllm_that_is_stopped_is_noticed",
            "tests/unit/xrunner/server/test_chat.py::test_a_process_that_renders_and_is_stopped_or_killed_is_replaced",
        ),
    ),
    28: Point("advisories of other servers", "see the ids in tests/attack/test_advisories.py"),
}
