"""Write the stored tables of benchmarks/results into the pages of docs/results.

python -m tools.make_results
"""

from __future__ import annotations

from benchmarks.lib.results import STORED, write

if __name__ == "__main__":
    for path in sorted(STORED.glob("*.json")):
        write(path.stem)
