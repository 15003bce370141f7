"""Numbers and tables as they are printed."""

from __future__ import annotations

import pytest

from epicute.cli.text import table, time_span, volume


def test_columns_are_as_wide_as_their_widest_entry() -> None:
    assert table(("a", "long"), [("xyz", "1"), ("", "22")]).splitlines() == [
        "a    long",
        "xyz  1",
        "     22",
    ]


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 kB"),
        (1, "1 kB"),
        (999_999, "1000 kB"),
        (1_000_000, "1.0 MB"),
        (15_550_000, "15.6 MB"),
        (8 * 10**10, "80.0 GB"),
    ],
)
def test_volume(count: int, shown: str) -> None:
    assert volume(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-1, "0 s"), (59, "59 s"), (61, "1 min"), (7200, "2 h"), (200_000, "2 d")],
)
def test_time_span(seconds: float, shown: str) -> None:
    assert time_span(seconds) == shown
