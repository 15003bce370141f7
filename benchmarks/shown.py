"""How tables of decode, of QK4PV8 and of the card's counters are shown: a line or two in README, columns in the docs.

A line sets ours beside the peer that matters, with geometric mean, least and most over the cases that have both times:

| table | beside |
|---|---|
| projections | the sum of a layer's four, the fastest peer's; as a chain, the floor |
| decode-attention | the fastest BF16 attention, ours over BF16 pages where the cache is narrower; the bandwidth |
| decode-layer | the faster of PyTorch's compiled steps; the floor |
| decode-ablation | the step with one thing replaced |
| cache-write | a copy of as many bytes; the bandwidth |
| qk4pv8-prefill, qk4pv8-decode | the fastest attention of others and ours, both in BF16 |
| counters | a plain store's instructions |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import counters, decode_layer, few_rows
from benchmarks.table import geometric_mean, label
from epicute.errors import require

__all__ = ["COLUMNS", "LINES", "Four", "counted", "fours", "validate_counters"]

Row = Mapping[str, Any]
Columns = tuple[Sequence[str], Sequence[Sequence[str]]]

READ = "stream-read"
"""A plain read, which is no peer but a floor."""

OURS = "ours"
"""Peers that begin so are epicute's too."""


# --- ratios ---


def spread(ratios: Sequence[float]) -> str:
    """Geometric mean, least and most."""
    mean = f"{geometric_mean(ratios):.2f}×"
    if len(ratios) == 1:
        return f"{mean} (1 case)"
    return f"{mean} ({min(ratios):.2f}× to {max(ratios):.2f}×, {len(ratios)} cases)"


def shares(ratios: Sequence[float]) -> str:
    """The same as parts of a whole."""
    mean = f"{geometric_mean(ratios):.0%}"
    return mean if len(ratios) == 1 else f"{mean} ({min(ratios):.0%} to {max(ratios):.0%})"


def mean(ratios: Sequence[float]) -> str:
    """Without least and most."""
    return f"{geometric_mean(ratios):.2f}×"


def grouped(
    rows: Iterable[Row], key: Callable[[Row], str], ratio: Callable[[Row], float | None]
) -> dict[str, list[float]]:
    """key → every ratio that there is, in the order of the rows."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if (value := ratio(row)) is not None:
            found.setdefault(key(row), []).append(value)
    return found


def told(
    what: str, groups: Mapping[str, Sequence[float]], say: Callable[[Sequence[float]], str]
) -> list[str]:
    """``what: key ratio, key ratio`` as a sentence; none where there is no ratio."""
    if not groups:
        return []
    return [f"{what}: {', '.join(f'{key} {say(r)}' for key, r in groups.items())}"]


def of_floor(row: Row) -> float | None:
    """The floor over ours."""
    ours, floor = row["ours_us"], row["floor_us"]
    return floor / ours if ours and floor else None


def over(name: str) -> Callable[[Row], float | None]:
    """That peer over ours."""

    def ratio(row: Row) -> float | None:
        time = row["peers_us"].get(name)
        return time / row["ours_us"] if time and row["ours_us"] else None

    return ratio


def rivals(peers: Iterable[str]) -> list[str]:
    """Those that others have made, in order."""
    return sorted(name for name in peers if name != READ and not name.startswith(OURS))


def fastest_over(row: Row) -> float | None:
    """The fastest rival over ours."""
    times = [row["peers_us"][name] for name in rivals(row["peers_us"])]
    return min(times) / row["ours_us"] if times and row["ours_us"] else None


def the_fastest(rows: Iterable[Row]) -> str:
    """Who was timed, in words."""
    return fastest_of({name for row in rows for name in row["peers_us"]})


def fastest_of(peers: Iterable[str]) -> str:
    """Of whom a ratio takes the fastest."""
    names = rivals(peers)
    return f"the fastest of {', '.join(names)}" if names[1:] else "".join(names)


# --- projections ---


@dataclass(frozen=True)
class Four:
    """A layer's projections in sum, each timed by itself; and as a chain.

    Attributes:
        ours: None where one of them is missing, µs as all times. floor: of the four.
        peers: sums of those that have all four.
        chain: ours with each kernel started while the one before runs. chain_floor: of it.
    """

    shape: str
    M: int
    weights: str
    ours: float | None
    floor: float | None
    peers: Mapping[str, float]
    chain: float | None = None
    chain_floor: float | None = None

    @property
    def fastest(self) -> str | None:
        """The rival of least sum."""
        return min(rivals(self.peers), key=lambda name: self.peers[name], default=None)

    @property
    def speedup(self) -> float | None:
        """The fastest rival over ours."""
        return self.peers[self.fastest] / self.ours if self.fastest and self.ours else None

    @property
    def chain_share(self) -> float | None:
        """The chain's floor over the chain."""
        return self.chain_floor / self.chain if self.chain and self.chain_floor else None


def fours(rows: Iterable[Row]) -> list[Four]:
    """Of every shape, M and format of table ``projections``."""
    cases: dict[tuple[str, int, str], dict[str, Row]] = {}
    for row in rows:
        case = row["case"]
        parts = cases.setdefault((case["shape"], case["M"], case["weights"]), {})
        parts[case.get("layer") or case["variant"]] = row
    return [_four(*case, parts) for case, parts in cases.items()]


def _four(shape: str, m: int, weights: str, parts: Mapping[str, Row]) -> Four:
    found = [parts[name] for name in few_rows.LAYERS if name in parts]
    whole = len(found) == len(few_rows.LAYERS)
    chain = parts.get("chain")
    times = [row["ours_us"] for row in found]
    names = set.intersection(*(set(row["peers_us"]) for row in found)) if whole else set()
    return Four(
        shape,
        m,
        weights,
        sum(times) if whole and all(times) else None,
        sum(row["floor_us"] for row in found) if whole else None,
        {name: sum(row["peers_us"][name] for row in found) for name in sorted(names)},
        chain and chain["ours_us"],
        chain and chain["floor_us"],
    )


def _four_columns(table: Mapping[str, Any]) -> Columns:
    """Sums beside the fastest rival's, and the chain."""
    heads = ("shape", "M", "weights", "four in sum, µs", "of the floor", "fastest peer, µs")
    heads += ("speed-up", "as a chain, µs", "of the floor")
    return heads, [_four_cells(found) for found in fours(table["rows"])]


def _four_cells(found: Four) -> tuple[str, ...]:
    share = found.floor / found.ours if found.floor and found.ours else None
    peer = f"{found.peers[found.fastest]:.1f} ({found.fastest})" if found.fastest else "-"
    return (
        *(found.shape, str(found.M), found.weights),
        f"{found.ours:.1f}" if found.ours else "-",
        "-" if share is None else f"{share:.0%}",
        peer,
        "-" if found.speedup is None else f"{found.speedup:.2f}×",
        f"{found.chain:.1f}" if found.chain else "-",
        "-" if found.chain_share is None else f"{found.chain_share:.0%}",
    )


def _projections(table: Mapping[str, Any]) -> list[str]:
    found = fours(table["rows"])
    said: dict[str, dict[str, list[float]]] = {}  # formats that have the same rivals, together
    chained: dict[str, list[float]] = {}
    for weights in dict.fromkeys(one.weights for one in found):
        mine = [one for one in found if one.weights == weights]
        names = fastest_of({name for one in mine for name in one.peers})
        if faster := [one.speedup for one in mine if one.speedup is not None]:
            said.setdefault(names, {})[weights] = faster
        if near := [one.chain_share for one in mine if one.chain_share is not None]:
            chained[weights] = near
    sums = [
        line
        for names, groups in said.items()
        for line in told(f"a layer's four in sum, {names} over ours", groups, spread)
    ]
    return sums + told("as a chain, share of the floor", chained, shares)


# --- the other tables ---


def _field(name: str) -> Callable[[Row], str]:
    return lambda row: str(row["case"].get(name, "-"))


def _decode_attention(table: Mapping[str, Any]) -> list[str]:
    rows = table["rows"]
    cache = _field("cache")
    wide = [row for row in rows if rivals(row["peers_us"])]
    return [
        *told(f"{the_fastest(wide)} over ours", grouped(wide, cache, fastest_over), spread),
        *told("our own over BF16 pages to ours", grouped(rows, cache, over("ours-bf16")), spread),
        *told("share of 4.8 TB/s", grouped(rows, cache, of_floor), shares),
    ]


ALIKE = ("int4", "fp8", "bf16")
"""Formats of weights and cache alike that README names; all pairs are in the docs."""


def _decode_layer(table: Mapping[str, Any]) -> list[str]:
    rows = [row for row in table["rows"] if "weights" in row["case"]]

    def pair(row: Row) -> str:
        return f"{row['case']['weights']}/{row['case']['cache']}"

    def speedup(row: Row) -> float | None:
        _, time = decode_layer.faster(row)
        return time / row["ours_us"] if time and row["ours_us"] else None

    def slowdown(row: Row) -> float | None:
        share = of_floor(row)
        return 1 / share if share else None

    def chosen(ratio: Callable[[Row], float | None]) -> dict[str, list[float]]:
        found = grouped(rows, pair, ratio)
        named = {f"{f}/{f}": found[f"{f}/{f}"] for f in ALIKE if f"{f}/{f}" in found}
        every = [value for ratios in found.values() for value in ratios]
        return named | ({"all pairs": every} if len(found) > len(named) else {})

    what = "PyTorch's faster step over ours, by weights/cache"
    return told(what, chosen(speedup), spread) + told("ours over the floor", chosen(slowdown), mean)


def _decode_ablation(table: Mapping[str, Any]) -> list[str]:
    def replaced(rows: Sequence[Row]) -> dict[str, list[float]]:
        names = dict.fromkeys(name for row in rows for name in row["peers_us"])
        found = {n: [r for row in rows if (r := over(n)(row)) is not None] for n in names}
        return {name: ratios for name, ratios in found.items() if ratios}

    steps = [row for row in table["rows"] if "batch" in row["case"]]
    others = [row for row in table["rows"] if "batch" not in row["case"]]
    return [
        *told("a step with one thing replaced over the step as it is", replaced(steps), mean),
        *told("BF16 projections from row-major weights over ours", replaced(others), mean),
    ]


def _cache_write(table: Mapping[str, Any]) -> list[str]:
    rows = table["rows"]
    smoothing = _field("smoothing")

    def key(row: Row) -> str:
        return f"smoothing {smoothing(row)}"

    return [
        *told("a copy of as many bytes over ours", grouped(rows, key, over("copy")), spread),
        *told("share of 4.8 TB/s", grouped(rows, key, of_floor), shares),
    ]


def _against_bf16(rows: Sequence[Row], key: Callable[[Row], str]) -> list[str]:
    """Beside attention in BF16, others' and ours."""
    return [
        *told(f"{the_fastest(rows)} in BF16 over ours", grouped(rows, key, fastest_over), spread),
        *told("our own in BF16 over ours", grouped(rows, key, over("ours-bf16")), mean),
    ]


def _qk4pv8_decode(table: Mapping[str, Any]) -> list[str]:
    rows = table["rows"]

    def key(row: Row) -> str:
        return f"{_field('batch')(row)} request{'' if row['case'].get('batch') == 1 else 's'}"

    bandwidth = told("share of 4.8 TB/s", grouped(rows, key, of_floor), shares)
    return _against_bf16(rows, key) + bandwidth


def _qk4pv8_prefill(table: Mapping[str, Any]) -> list[str]:
    def key(row: Row) -> str:
        return row["case"].get("qk") or f"{row['case'].get('cache')} cache"

    return _against_bf16(table["rows"], key)


def _counters(table: Mapping[str, Any]) -> list[str]:
    plain = {
        label(row["case"]): row["counters"].get("instructions")
        for row in table["rows"]
        if row["candidate"] == "plain"
    }

    def ratio(row: Row) -> float | None:
        mine, other = row["counters"].get("instructions"), plain.get(label(row["case"]))
        return mine / other if mine and other and row["candidate"] == "whole" else None

    what = "instructions with the whole epilogue over those with a plain store"
    return told(what, grouped(table["rows"], _field("weights"), ratio), spread)


LINES: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "projections": _projections,
    "decode-attention": _decode_attention,
    "decode-layer": _decode_layer,
    "decode-ablation": _decode_ablation,
    "cache-write": _cache_write,
    "qk4pv8-decode": _qk4pv8_decode,
    "qk4pv8-prefill": _qk4pv8_prefill,
    "counters": _counters,
}
"""Table → what README says of it, none where no case has both times."""

COLUMNS: dict[str, Callable[[Mapping[str, Any]], Columns]] = {
    "projections": _four_columns,
    "decode-layer": decode_layer.columns,
}
"""Table → heads and rows that the docs show in front of every case."""


# --- counters ---

HEAD = ("table", "paper", "device", "driver", "torch", "dsl", "commit", "date", "protocol")
NAMES = (*counters.METRICS.values(), "shared_wavefronts_excess")


def validate_counters(table: Mapping[str, Any]) -> None:
    """Raise ArgumentError where ``table`` is not as ``benchmarks.counters`` writes it."""
    for name in HEAD:
        said = table.get(name)
        require(isinstance(said, str) and bool(said), name, repr(said), "a text", "count again")
    rows = table.get("rows")
    require(isinstance(rows, list), "rows", repr(rows), "a list", "count again")
    for index, row in enumerate(table["rows"]):
        where = f"rows[{index}]"
        got = sorted(row)
        wanted = ["candidate", "case", "counters", "kernel"]
        require(got == wanted, where, str(got), f"the keys {wanted}", "count again")
        who = row["candidate"]
        require(who in ("whole", "plain"), where, repr(who), "whole or plain", "count again")
        for name, value in row["counters"].items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
            known = name in NAMES and number
            require(known, f"{where}.{name}", repr(value), f"a count of {NAMES}", "count again")


def counted(table: Mapping[str, Any]) -> Columns:
    """Heads and rows of the counters: a line for each launch, a column for each counter that the card has."""
    names = [name for name in NAMES if any(name in row["counters"] for row in table["rows"])]

    def cells(row: Row) -> list[str]:
        found = [row["counters"].get(name) for name in names]
        numbers = ["-" if value is None else f"{value:,.0f}" for value in found]
        return [label(row["case"]), row["candidate"], *numbers]

    heads = ["case", "epilogue", *(name.replace("_", " ") for name in names)]
    return heads, [cells(row) for row in table["rows"]]
