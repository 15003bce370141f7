"""The test kit: what to draw, how to compare, how to catch a stray write.

check(policy, reference)          property-test any policy against float64 reference math
Budget, measure, assert_within    error of the whole and of the worst row
guarded, assert_guards_intact, …  poisoned outputs inside guard bytes
strategies                        hypothesis strategies (needs ``hypothesis``, extra ``test``)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from epicute.testing.budgets import (
    EXACT,
    Budget,
    Errors,
    assert_equal_bits,
    assert_within,
    measure,
    storage_budget,
    ulp,
    ulp_distance,
)
from epicute.testing.check import Summary, check, require_hypothesis
from epicute.testing.poison import (
    Guarded,
    assert_fully_written,
    assert_guards_intact,
    assert_untouched,
    guarded,
    inputs_unchanged,
)

if TYPE_CHECKING:
    from epicute.testing import strategies
    from epicute.testing.draws import Ranges

__all__ = [
    "EXACT",
    "Budget",
    "Errors",
    "Guarded",
    "Ranges",
    "Summary",
    "assert_equal_bits",
    "assert_fully_written",
    "assert_guards_intact",
    "assert_untouched",
    "assert_within",
    "check",
    "guarded",
    "inputs_unchanged",
    "measure",
    "storage_budget",
    "strategies",
    "ulp",
    "ulp_distance",
]


def __getattr__(name: str) -> Any:
    """``strategies`` and ``Ranges`` need hypothesis: loaded when first asked for."""
    if name in ("Ranges", "strategies"):
        require_hypothesis(name)
    if name == "Ranges":
        from epicute.testing.draws import Ranges

        return Ranges
    if name == "strategies":
        import importlib

        return importlib.import_module("epicute.testing.strategies")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
