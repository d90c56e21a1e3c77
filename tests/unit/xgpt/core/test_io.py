"""Files in and out: names, versions, damage, atomic writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import pytest

from xgpt.core.errors import InputError, MachineError, XgptError
from xgpt.core.io import (
    StepLogWriter,
    cache_dir,
    config_names,
    dump_json,
    find_config,
    load_json,
    load_yaml,
    parse,
    read_step_log,
    sha256,
    write_atomic,
)
from xgpt.core.schema import Frozen, Histogram
from xgpt.core.schema.step_log import StepRecord


class Note(Frozen):
    schema_version: Literal[1] = 1
    text: str
    sizes: Histogram | None = None


def test_json_round_trip_keeps_value_and_hash(tmp_path: Path) -> None:
    note = Note(text="Grüße", sizes=Histogram(lengths=(1, 2), probabilities=(0.5, 0.5)))
    path = tmp_path / "new" / "note.json"
    write_atomic(path, dump_json(note))
    assert load_json(path, Note, "note") == note
    assert sha256(load_json(path, Note, "note")) == sha256(note)
    assert sha256(note) != sha256(Note(text="other"))


def test_nothing_is_written_that_could_not_be_read() -> None:
    falling = Histogram.model_construct(lengths=(2, 1), probabilities=(0.5, 0.5))
    broken = Note(text="x").model_copy(update={"sizes": falling})
    with pytest.raises(XgptError, match=r"not written: note\.sizes is .* lengths must rise"):
        dump_json(broken)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty"),
        ("{", "not JSON"),
        ("[]", "must contain a JSON object"),
        ('{"text": "x"}', "schema_version is missing"),
        ('{"schema_version": 2, "text": "x"}', "2 is not accepted; this version of xgpt reads files of version 1"),
        ('{"note": {"schema_version": 1}, "observed": 1}', "it has a note in its field `note`: save this field"),
        ('{"schema_version": 1}', "note.text"),
        ('{"schema_version": 1, "text": "x", "colour": 1}', "note.colour: 1"),
        (
            '{"schema_version": 1, "text": "x", "sizes": {"lengths": [2, 1], "probabilities": [0.5, 0.5]}}',
            "note.sizes is not accepted; lengths must rise",
        ),
        (
            '{"schema_version": 1, "text": "x", "sizes": {"lengths": [1], "probabilities": [NaN]}}',
            "note.sizes.probabilities.0",
        ),
        ('{"schema_version": 1, "size": 9223372036854775808}', "note: '9223372036854775808' is not accepted; numbers"),
        ('{"schema_version": 1, "size": -1e308}', "note: '-1e308' is not accepted; numbers"),
    ],
)
def test_damaged_json_is_one_line_that_names_the_field(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "note.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_json(path, Note, "note")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("missing", "binary", "."):
        with pytest.raises(InputError):
            load_yaml(tmp_path / name, "model")
    (tmp_path / "broken.yaml").write_text("a: [1,\nb: }")
    with pytest.raises(InputError, match="it is not YAML") as caught:
        load_yaml(tmp_path / "broken.yaml", "model")
    assert "\n" not in str(caught.value)


def test_configs_are_found_by_name_and_by_path(tmp_path: Path) -> None:
    assert "opt-125m" in config_names("models")
    assert find_config("models", "opt-125m").name == "opt-125m.yaml"
    mine = tmp_path / "mine.yaml"
    mine.touch()
    assert find_config("models", str(mine)) == mine


def test_an_unknown_config_names_the_nearest_ones() -> None:
    with pytest.raises(InputError, match=r"model: 'gpt-9' is not accepted; did you mean gpt3-.*shipped names"):
        find_config("models", "gpt-9")


def test_a_name_cannot_leave_the_shipped_configs() -> None:
    with pytest.raises(InputError):
        find_config("models", "../clusters/a40x4")


def test_parse_shows_the_value() -> None:
    with pytest.raises(InputError, match=r"note\.text: 7 is not accepted"):
        parse({"text": 7}, Note, "note")


def test_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "xgpt"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "xgpt"


def test_failed_write_leaves_the_old_file_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_atomic(path, "old")

    def no_replace(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_replace)
    with pytest.raises(MachineError, match="No space left on device"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_write_below_a_file_is_a_machine_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="cannot write"):
        write_atomic(tmp_path / "file" / "plan.json", "text")


def test_a_step_log_has_one_writer(tmp_path: Path) -> None:
    """A second server emptied the file, and the first continued after a gap of null bytes."""
    path, record = tmp_path / "steps.jsonl", StepRecord(0, 1, ((0, 0, 5),), (1, 2, 3), (), (), ())
    log = StepLogWriter(path)
    log(record)
    log.flush()
    with pytest.raises(MachineError, match="another server writes it"):
        StepLogWriter(path)
    log(record)
    log.close()
    assert read_step_log(path) == [record, record]
    StepLogWriter(path).close()
    assert not path.read_bytes()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_steps_that_a_failed_flush_loses_are_counted() -> None:
    log = StepLogWriter(Path("/dev/full"))
    for _ in range(3):
        log(StepRecord(0, 1, ((0, 0, 5),), (1, 2, 3), (), (), ()))
    log.flush()
    assert log.num_lost == 3
    log.close()


def test_a_step_log_on_a_full_disk_ends_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """It ended the engine."""
    log = StepLogWriter(Path("/dev/full"))
    record = StepRecord(0, 1, ((0, 0, 5),), (1, 2, 3), (), (), ())
    for _ in range(1000):
        log(record)
    assert log.num_lost > 0
    before = log.num_lost
    log(record)
    assert log.num_lost == before + 1
    log.flush()
    log.close()
    says = "the step log /dev/full is no longer written: No space left on device"
    assert [record.getMessage() for record in caplog.records] == [says]
