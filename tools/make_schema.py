"""Write the JSON schema of plan.json to configs/schema: `python -m tools.make_schema`."""

from __future__ import annotations

import json
from pathlib import Path

from xgpt.schema import Plan

PATH = Path(__file__).parent.parent / "configs" / "schema" / "plan.schema.json"


def text() -> str:
    return json.dumps(Plan.model_json_schema(), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
