"""WAA under a cap: requests in encode and in transfer count, and left out the throughput is far too high.

docs/results/formulas.md derives it; the simulated engine runs the rule itself.
"""

from __future__ import annotations

from benchmarks.papers import derivations
from benchmarks.papers.claims import Table


def test_the_cap_counts_what_is_encoded_and_moved() -> None:
    table = next(one for one in derivations.cap_of_waa() if isinstance(one, Table))
    off = {(int(row[0]), int(row[1])): (float(row[5][:-1]), float(row[6][:-1])) for row in table.rows}
    assert all(abs(closed_form) < 9 for _, closed_form in off.values())
    assert all(left_out > 15 for (batch, cap), (left_out, _) in off.items() if cap <= 2 * batch)
    assert max(left_out for left_out, _ in off.values()) > 50
