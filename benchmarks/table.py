"""A published table: its schema, its file, and how it prints.

    {table, paper, device, driver, torch, dsl, commit, date, protocol, floor,
     rows: [{case, ours_us, floor_us, peers_us: {name: µs}, error: {norm, worst_row},
             errors: {name: {norm, worst_row}}, failed: {name: why},
             clocks_mhz: {name: MHz}, watts: {name: W},
             launches: {name: count}, peak_bytes: {name: bytes}, perplexity: {name: number},
             standard_error: {name: number}, rmse: {name: number}, commit, date}]}

``error`` is ours, null only in tables that measure no result; ``errors`` are the peers', there only
in tables that are about them. ``failed`` is there only where a candidate failed. ``ours_us`` is null
only where ``failed`` says why, and in rows with ``errors`` or ``perplexity`` that measure no time.
``clocks_mhz`` and ``watts`` are the SM clock and the power while a candidate was timed, ours as
``ours``, there only where the card's sensors could be read; ``launches`` and ``peak_bytes`` what a
call takes beside its time (``benchmarks.footprint``), and ``perplexity`` of a model, in tables that
measure them; ``standard_error`` that of the mean difference of our log-losses and a peer's; ``rmse``
the root mean square of the differences to the reference. ``commit``
and ``date`` are the row's own where a table has rows of several runs (``benchmarks.resume``). The head
has ``backend`` too where no GPU kernel was run: ``reference``, the float64 references. A file is
valid after every row, so that a run that is cut short keeps its rows.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.provenance import Provenance
from epicute.errors import require

__all__ = [
    "CASE",
    "KEYS",
    "KEYS_OF",
    "Row",
    "Table",
    "geometric_mean",
    "label",
    "ratios",
    "render",
    "validate",
]

CASE: dict[str, type | tuple[str, ...]] = {
    "shape": str,
    "layer": (
        "qkv",
        "o",
        "gate_up",
        "down",
        "shard-1280x8192",
        "shard-2304x16384",
        "shard-3584x8192",
        "shard-7168x8192",
    ),
    "M": int,
    "N": int,
    "K": int,
    "weights": ("bf16", "fp8", "int4"),
    "cache": ("bf16", "fp8", "int4", "qk4pv8"),
    "batch": int,
    "length": int,
    "context": int,
    "heads": int,
    "kv_heads": int,
    "head_dim": int,
    "causal": bool,
    "page": int,
    "qk": ("exact16", "fast8"),
    "pv": ("direct", "two_level"),
    "smoothing": str,
    "accumulate": ("fast", "precise"),
    "composition": str,
    "out": str,
    "mix": str,
    "variant": str,
    "group": int,
    "tried": int,
    "legal": int,
    "schedule": str,
    "best": str,
}
"""What a case may say: a type, or the words allowed."""

SIZES = ("M", "N", "K")
PLAIN = ("shape", "layer", "weights", "composition", "mix", "variant")
"""Keys whose values speak for themselves."""

HEAD = ("table", "paper", "device", "driver", "torch", "dsl", "commit", "date", "protocol", "floor")
BEHIND = ("backend",)
"""Fields of a head that are left out where a GPU's kernels ran."""

BACKENDS = ("reference",)
ROW = ("case", "ours_us", "floor_us", "peers_us", "error")
SENSORS = ("clocks_mhz", "watts")
FOOTPRINTS = ("launches", "peak_bytes")
STAMP = ("commit", "date")
OPTIONAL = (
    "errors",
    "failed",
    *SENSORS,
    *FOOTPRINTS,
    "perplexity",
    "standard_error",
    "rmse",
    *STAMP,
)
"""Fields of a row that are left out where they are empty."""


@dataclass(frozen=True)
class Row:
    """One measured case. Times in µs per call.

    ``error`` is ours and ``errors`` are the peers'; ``failed`` maps a candidate to what went wrong,
    ``clocks_mhz`` and ``watts`` to what the card's sensors said, ``launches`` and ``peak_bytes`` to
    what a call takes, ``perplexity`` to that of its model, ``standard_error`` a peer to that of the
    difference to it.
    """

    case: Mapping[str, Any]
    ours_us: float | None
    floor_us: float
    peers_us: Mapping[str, float] = field(default_factory=dict)
    error: Mapping[str, float] | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    clocks_mhz: Mapping[str, float] = field(default_factory=dict)
    watts: Mapping[str, float] = field(default_factory=dict)
    launches: Mapping[str, int] = field(default_factory=dict)
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    perplexity: Mapping[str, float] = field(default_factory=dict)
    standard_error: Mapping[str, float] = field(default_factory=dict)
    rmse: Mapping[str, float] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """As it stands in the file."""
        found: dict[str, Any] = {name: getattr(self, name) for name in ROW}
        found["case"], found["peers_us"] = dict(self.case), dict(self.peers_us)
        kept = [name for name in OPTIONAL if getattr(self, name, None)]
        return found | {name: dict(getattr(self, name)) for name in kept}


class Table:
    """Rows of one table, written to ``path`` after every one of them."""

    def __init__(
        self,
        name: str,
        paper: str,
        protocol: str,
        floor: str,
        source: Provenance,
        path: Path,
        backend: str | None = None,
    ) -> None:
        """``name`` and the sentences are the file's; ``source`` says what was measured where."""
        head = {"table": name, "paper": paper, "protocol": protocol, "floor": floor}
        head |= asdict(source)
        self.path = path
        self.content: dict[str, Any] = {key: head[key] for key in HEAD}
        self.content |= ({} if backend is None else {"backend": backend}) | {"rows": []}

        self._place: Callable[[Mapping[str, Any]], Any] | None = None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What was added so far."""
        return self.content["rows"]

    def keep(
        self, rows: Iterable[Mapping[str, Any]], place: Callable[[Mapping[str, Any]], Any]
    ) -> None:
        """Begin with rows of earlier runs. All that are added say when and at which commit they were measured, and the
        table is in the order of ``place`` of their cases.
        """
        self.content = {**self.content, "rows": [dict(row) for row in rows]}
        self._place = place

    def drop(self, same: Callable[[Mapping[str, Any]], bool]) -> None:
        """Leave out the rows of cases that are the ``same``, as they are measured again."""
        kept = [row for row in self.rows if not same(row["case"])]
        self.content = {**self.content, "rows": kept}

    def add(self, row: Row) -> None:
        """Append, validate and write."""
        rows = [*self.rows, row.json()]
        if self._place is not None:
            place = self._place
            rows[-1] |= {name: self.content[name] for name in STAMP}
            rows.sort(key=lambda row: place(row["case"]))
        grown = {**self.content, "rows": rows}
        validate(grown)
        self.content = grown
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=1, ensure_ascii=False) + "\n")
        os.replace(part, self.path)
        print(line(row.json()), flush=True)


def validate(table: Mapping[str, Any]) -> None:
    """Raise ArgumentError where ``table`` departs from the schema."""
    _keys("table", table, (*HEAD, "rows"), BEHIND)
    said = table.get("backend", BACKENDS[0])
    require(said in BACKENDS, "backend", repr(said), f"one of {BACKENDS}", "name what ran")
    for key in HEAD:
        filled = isinstance(table[key], str) and bool(table[key])
        require(filled, key, repr(table[key]), "a non-empty text", "say it")
    for index, row in enumerate(table["rows"]):
        _validate_row(f"rows[{index}]", row)


def _validate_row(where: str, row: Mapping[str, Any]) -> None:
    _keys(where, row, ROW, OPTIONAL)
    for key, value in row["case"].items():
        _validate_case(f"{where}.case.{key}", key, value)
    failed, errors = row.get("failed", {}), row.get("errors", {})
    if row["ours_us"] is None:
        untimed = bool(errors) and row["error"] is not None
        told = "ours" in failed or untimed or "ours" in row.get("perplexity", {})
        require(told, f"{where}.ours_us", None, "a time", "or say why in failed.ours")
    else:
        _number(f"{where}.ours_us", row["ours_us"], positive=True)
    _number(f"{where}.floor_us", row["floor_us"])
    for name, time in row["peers_us"].items():
        _number(f"{where}.peers_us.{name}", time, positive=True)
        require(name not in failed, f"{where}.peers_us.{name}", "also failed", "one", "keep one")
    if row["error"] is not None:
        _validate_error(f"{where}.error", row["error"])
    for name, error in errors.items():
        _validate_error(f"{where}.errors.{name}", error)
        require(name not in failed, f"{where}.errors.{name}", "also failed", "one", "keep one")
    for name, why in failed.items():
        told = isinstance(why, str) and bool(why)
        require(told, f"{where}.failed.{name}", repr(why), "the error's text", "keep the message")
    timed = {*row["peers_us"], *(["ours"] if row["ours_us"] is not None else [])}
    for sensor in SENSORS:
        for name, value in row.get(sensor, {}).items():
            require(name in timed, f"{where}.{sensor}", name, "a timed candidate", "leave it out")
            _number(f"{where}.{sensor}.{name}", value, positive=True)
    for kind in FOOTPRINTS:
        for name, count in row.get(kind, {}).items():
            require(name in timed, f"{where}.{kind}", name, "a timed candidate", "leave it out")
            require(type(count) is int, f"{where}.{kind}.{name}", repr(count), "an int", "count")
            _number(f"{where}.{kind}.{name}", count)
    for name, value in row.get("perplexity", {}).items():
        _number(f"{where}.perplexity.{name}", value, positive=True)
        require(name not in failed, f"{where}.perplexity.{name}", "also failed", "one", "keep one")
    for name, value in row.get("rmse", {}).items():
        _number(f"{where}.rmse.{name}", value, positive=True)
        require(name not in failed, f"{where}.rmse.{name}", "also failed", "one", "keep one")
    for name in STAMP:
        said = row.get(name, "said")
        require(
            isinstance(said, str) and bool(said), f"{where}.{name}", repr(said), "a text", "say it"
        )
    for name, value in row.get("standard_error", {}).items():
        known = name in row.get("perplexity", {}) and name != "ours"
        require(known, f"{where}.standard_error", name, "a peer with a perplexity", "leave it out")
        _number(f"{where}.standard_error.{name}", value)


def _validate_error(where: str, error: Mapping[str, float]) -> None:
    _keys(where, error, ("norm", "worst_row"))
    for name, value in error.items():
        _number(f"{where}.{name}", value)


def _validate_case(where: str, key: str, value: Any) -> None:
    require(key in CASE, where, repr(value), f"one of the keys {tuple(CASE)}", "rename the key")
    allowed = CASE[key]
    if isinstance(allowed, tuple):
        require(value in allowed, where, repr(value), f"one of {allowed}", "use the field's word")
    else:
        ok = type(value) is allowed  # True is no count
        require(ok, where, repr(value), f"a value of type {allowed.__name__}", "convert it")


def _keys(
    where: str, got: Mapping[str, Any], names: tuple[str, ...], optional: tuple[str, ...] = ()
) -> None:
    missing, unknown = set(names) - set(got), set(got) - set(names) - set(optional)
    require(
        not missing and not unknown,
        where,
        f"without {sorted(missing)}, with {sorted(unknown)}",
        f"exactly the keys {names}",
        "follow the schema",
    )


def _number(where: str, value: Any, positive: bool = False) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ok = ok and (value > 0 if positive else value >= 0)
    expected = "a positive finite number" if positive else "a finite number, not negative"
    require(ok, where, repr(value), expected, "measure again")


def geometric_mean(ratios: Iterable[float]) -> float:
    """Geometric mean of positive ratios; NaN of none."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan


def label(case: Mapping[str, Any]) -> str:
    """A case in a few words, in the schema's order; sizes last."""
    found = [key for key in SIZES if key in case]
    sizes = "×".join(str(case[key]) for key in found)
    if len(found) == 1:
        sizes = f"{found[0]} {sizes}"
    words = [
        str(case[key]) if key in PLAIN else f"{key} {case[key]}"
        for key in CASE
        if key in case and key not in SIZES
    ]
    return " ".join([*words, sizes] if sizes else words)


def line(row: Mapping[str, Any]) -> str:
    """One row as text: time, share of the floor, peers and their ratio to ours, error."""
    ours, floor = row["ours_us"], row["floor_us"]
    missing = "failed" if "ours" in row.get("failed", {}) else ""
    parts = [f"{label(row['case']):<72}", f"{ours:10.1f} µs" if ours else f"{missing:>13}"]
    if ours and floor:
        parts.append(f"{floor / ours:4.0%} of floor")
    for name, time in row["peers_us"].items():
        parts.append(f"{name} {time:.1f}" + (f" ({time / ours:.2f}x)" if ours else ""))
    if row["error"]:
        parts.append(f"error {_both(row['error'])}")
    parts += [f"{name} {_both(error)}" for name, error in row.get("errors", {}).items()]
    for kind in (*FOOTPRINTS, "perplexity", "standard_error"):
        if said := row.get(kind):
            parts.append(f"{kind} " + ", ".join(f"{n} {x:.7g}" for n, x in said.items()))
    parts += [f"FAILED {name}: {_short(why)}" for name, why in row.get("failed", {}).items()]
    return "  ".join(parts)


def _both(error: Mapping[str, float]) -> str:
    """By norm, and of the worst row."""
    return f"{error['norm']:.1e} / {error['worst_row']:.1e}"


def _short(why: str, most: int = 300) -> str:
    """Both ends of a message: what it is, and what it ends in."""
    text = " ".join(why.split())
    return text if len(text) <= most else f"{text[: most // 3]} … {text[-most * 2 // 3 :]}"


KEYS = ("weights", "accumulate")
KEYS_OF = {
    "attention": ("head_dim", "mix"),
    "prefill-layer": ("weights", "accumulate"),
    "packed-prefill": ("weights", "accumulate"),
    "prefill-model": ("shape", "weights"),
    "projections": ("weights", "variant"),
    "decode-attention": ("cache",),
    "decode-layer": ("shape", "weights", "cache"),
    "decode-ablation": ("variant",),
    "cache-write": ("heads", "smoothing"),
    "qk4pv8-decode": ("heads", "batch", "smoothing"),
    "qk4pv8-prefill": ("cache", "qk", "pv", "smoothing"),
}
"""Fields of a case that a table's means are told apart by, where they are not ``KEYS``."""


def ratios(
    rows: Iterable[Mapping[str, Any]], keys: tuple[str, ...] = KEYS
) -> dict[tuple[str, ...], list[float]]:
    """(value of each key, and the peer) → peer over ours of every case that has both times.

    A case that does not say a key counts as ``-``.
    """
    found: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        group = tuple(str(row["case"].get(key, "-")) for key in keys)
        for name, time in row["peers_us"].items():
            if row["ours_us"]:
                found.setdefault((*group, name), []).append(time / row["ours_us"])
    return found


def render(table: Mapping[str, Any]) -> str:
    """The whole table as text, geometric means last."""
    short = f"{table['table']} on {table['device']}, {table['commit'][:12]}, {table['date']}"
    lines = [short, *(line(row) for row in table["rows"])]
    keys = KEYS_OF.get(table["table"], KEYS)
    for (*group, peer), found in sorted(ratios(table["rows"], keys).items()):
        said = ", ".join(map(_said, keys, group))
        mean = f"{geometric_mean(found):.3f} ({len(found)}), least {min(found):.3f}"
        lines.append(f"geometric mean, {said}, {peer} over ours: {mean}")
    return "\n".join(lines)


def _said(key: str, value: str) -> str:
    return f"{value} weights" if key == "weights" else f"{key} {value}"
