"""Write the stored tables of benchmarks/results into the pages of docs/results, and draw the pictures of docs.

python -m tools.make_results
"""

from __future__ import annotations

from benchmarks.lib.results import STORED, write
from tools import make_pictures

if __name__ == "__main__":
    for path in sorted(STORED.glob("*.json")):
        write(path.stem)
    make_pictures.main()
