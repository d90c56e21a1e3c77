"""Methods that search a policy's spaces, by the names that `--search` accepts."""

from collections.abc import Callable, Sequence

from xgpt.core.schema import SearchMethod
from xscheduler.search import checked, optuna_search
from xscheduler.search.branch_and_bound import SearchResult
from xscheduler.space import Space

SEARCHES: dict[SearchMethod, Callable[[Sequence[Space]], SearchResult]] = {
    "branch-and-bound": checked.search,
    "exhaustive": checked.exhaustive,
    "optuna": optuna_search.search,
}
