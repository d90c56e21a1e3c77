"""Write the JSON schema of plan.json to configs/schema: `python -m tools.make_schema`."""

from __future__ import annotations

import json
from pathlib import Path

from tools.fields import descriptions, reachable
from xgpt.schema import Plan

PATH = Path(__file__).parent.parent / "configs" / "schema" / "plan.schema.json"


def text() -> str:
    schema = Plan.model_json_schema()
    for model in reachable(Plan):
        fields = schema["properties"] if model is Plan else schema["$defs"][model.__name__]["properties"]
        for name, description in descriptions(model).items():
            fields[name]["description"] = description
    return json.dumps(schema, indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
