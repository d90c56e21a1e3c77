"""Lines of log that are not read."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from typing import Any

from tests.fakes import eventually
from xrunner.logs import MAX_LINES, BackgroundHandler, JsonFormatter


def test_a_pipe_that_is_not_read_holds_up_nothing_and_what_is_lost_is_said() -> None:
    reading, writing = os.pipe()
    handler = BackgroundHandler(writing)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    begin_s = time.monotonic()
    for number in range(MAX_LINES + 1000):
        logger.info("%d", number)
    assert time.monotonic() - begin_s < 5
    found: list[dict[str, Any]] = []

    def read() -> None:
        with open(reading, encoding="utf-8") as lines:
            found.extend(map(json.loads, lines))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert eventually(lambda: len(found) >= MAX_LINES)
    logger.info("last")
    assert eventually(lambda: bool(found) and found[-1]["message"] == "last")
    lost = [line["lines"] for line in found if line["message"] == "log lines were lost"]
    assert lost and len(found) - 1 - len(lost) + sum(lost) == MAX_LINES + 1000
    os.close(writing)
    reader.join(5)
