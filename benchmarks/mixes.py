"""Lengths of requests that are run together: the five mixes of FuTransformer table 15.

Each was drawn once from its distribution at LONGEST = 2048 tokens, among draws whose sum is the
paper's count of tokens, so that padding ratios are the paper's too.
"""

from __future__ import annotations

from epicute.errors import require

__all__ = ["LONGEST", "MIXES", "padding", "requests"]

LONGEST = 2048
"""Tokens to which a padded batch is padded."""

MIXES = {
    "equal": (2048,) * 8,
    "uniform 0.7 to 1": (1935, 1481, 1715, 1975, 1605, 1679, 1742, 1965),
    "uniform 0.2 to 1": (1027, 1560, 1257, 1595, 1121, 942, 915, 2031),
    "lognormal": (598, 2048, 1712, 493, 926, 1029, 779, 942),
    "one long, seven short": (2048, *(128,) * 7),
}
"""What a table calls a mix, and the tokens of its eight requests; lognormal: of median LONGEST/3
and sigma 0.5, cut at LONGEST."""


def requests(name: str, factor: int = 1) -> tuple[int, ...]:
    """Tokens of each request of a mix, ``factor`` times as many as at LONGEST."""
    require(name in MIXES, "mix", repr(name), f"one of {', '.join(MIXES)}", "check the spelling")
    return tuple(factor * tokens for tokens in MIXES[name])


def padding(name: str) -> float:
    """Rows of a batch that is padded to LONGEST over its tokens."""
    tokens = MIXES[name]
    return len(tokens) * LONGEST / sum(tokens)
