"""Say what a machine has: the versions of Python and Ray, and hashes of xgpt's code and of a checkpoint.

    python -P -c SOURCE [CHECKPOINT]

The Python of each machine of a Ray cluster runs this source as a process of its own, as it later runs the launcher:
Ray's own processes there search the driver's directories before their own. The machine may lack xgpt, so nothing of it
is imported.
"""

import hashlib
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


def look(checkpoint: str | None) -> dict[str, str]:
    """Return each thing that machines must have in common, in words. Empty: it is not there."""
    found = {"Python": f"Python {platform.python_version()}"}
    try:
        found["Ray"] = f"Ray {version('ray')}"
    except PackageNotFoundError:
        found["Ray"] = ""
    specs = [find_spec(name) for name in ("xgpt", "xrunner")]
    roots = [Path(str(spec.origin)).parent for spec in specs if spec is not None]
    code = "".join(_of_files(root, "*.py") for root in roots)
    short = hashlib.sha256(code.encode()).hexdigest()[:12]
    found["xgpt"] = f"xgpt with the code {short}" if len(roots) == len(specs) else ""
    if checkpoint is not None:
        is_there = Path(checkpoint).is_dir()
        found["checkpoint"] = f"the checkpoint {_of_files(Path(checkpoint), '*')[:12]}" if is_there else ""
    return found


def _of_files(root: Path, pattern: str) -> str:
    files = sorted(path for path in root.rglob(pattern) if path.is_file())
    return hashlib.sha256(b"".join(_sampled(path, str(path.relative_to(root))) for path in files)).hexdigest()


def _sampled(path: Path, name: str) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(f"{name} {size}".encode())
    with path.open("rb") as file:
        for i in range(17):  # the whole of a small file, and of a large one its head, end and 15 places
            file.seek(max(0, size - 65536) * i // 16)
            digest.update(file.read(65536))
    return digest.digest()


if __name__ == "__main__":
    print(json.dumps(look(sys.argv[1] if sys.argv[1:] else None)))
