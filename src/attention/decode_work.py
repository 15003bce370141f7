"""Which CTA reads which keys in decode, as integer functions that the host's mirror and the kernel share.

The keys that a request's queries see are cut in tiles. A **unit** is a tile, or, where a row's bits must not depend on
its batch mates, a part: a run of tiles whose length depends on the request's own length alone. Units are numbered

    for request, for head, for unit

where a head is a KV head, or a block of its columns where there are more than one CTA multiplies at once. CTA i of G
takes the i-th of G equal stripes of that list. What it has of one head is a **piece**: of tiles, all that are in its
stripe; of parts, one at a time. A head's pieces leave partial results in slots, and are merged in order of their keys.

    tiles    CTA i has slot 2i for a piece that begins within a head, 2i + 1 for one that begins it, and, in turn,
             2(G + i) and 2(G + i) + 1 for whole heads, so that one may be ended behind the next
    parts    slot (request * heads + head) * parts + part

Nothing depends on a length that the host knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = [
    "Cut",
    "Piece",
    "larger",
    "owner",
    "part_tiles",
    "pieces",
    "slot_of",
    "smaller",
    "stripe",
    "tile_span",
    "units_of",
    "whole_slot",
]


def larger(a: Any, b: Any) -> Any:
    """Maximum of two int or DSL integers."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    import cutlass

    return cutlass.max(a, b)


def smaller(a: Any, b: Any) -> Any:
    """Minimum of two int or DSL integers."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    import cutlass

    return cutlass.min(a, b)


def tile_span(length: Any, rows: int, window: int | None, tile: int) -> tuple[Any, Any]:
    """(first, count) of the tiles that hold what any of the ``rows`` last keys' queries see; at least one tile.

    ``length``: keys of the request, new ones included.
    """
    last = (length + (tile - 1)) // tile
    if window is None:
        return 0, larger(last, 1)
    first = larger(length - (rows + window - 1), 0) // tile
    return first, larger(last - first, 1)


def part_tiles(tiles: Any, parts: int, least: int) -> Any:
    """Tiles of a part of a request of ``tiles``: ``least``, or more where there would be more than ``parts``."""
    return larger((tiles + (parts - 1)) // parts, least)


def units_of(tiles: Any, parts: int | None, least: int) -> Any:
    """Units of a head: its tiles, or, with ``parts``, its parts."""
    if parts is None:
        return tiles
    each = part_tiles(tiles, parts, least)
    return (tiles + (each - 1)) // each


def stripe(cta: Any, ctas: Any, total: Any) -> tuple[Any, Any]:
    """(first, end) of the units of a CTA; stripes differ by one at most."""
    each, rest = total // ctas, total % ctas
    first = cta * each + smaller(cta, rest)
    after = cta + 1
    return first, after * each + smaller(after, rest)


def owner(unit: Any, ctas: Any, total: Any) -> Any:
    """The CTA whose stripe has ``unit``, which is below ``total``."""
    each, rest = total // ctas, total % ctas
    long = rest * (each + 1)
    behind = rest + (unit - long) // larger(each, 1)
    return _where(unit < long, unit // (each + 1), behind)


def slot_of(number: Any, origin: Any, parts: int | None) -> Any:
    """The slot of a head's ``number``-th piece. ``origin``: CTA of the first one, or slot of the first part."""
    if parts is not None:
        return origin + number
    return 2 * (origin + number) + _where(number == 0, 1, 0)


def whole_slot(head: Any, cta: Any, ctas: Any) -> Any:
    """The slot of a head that is one piece of tiles; ``head``: its number among those of all requests."""
    return 2 * (ctas + cta) + head % 2


def _where(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where ``condition``, else ``b``, of int or DSL integers."""
    if isinstance(condition, bool):
        return a if condition else b
    import cutlass

    return cutlass.Int32(cutlass.select_(condition, cutlass.Int32(a), cutlass.Int32(b)))


@dataclass(frozen=True)
class Piece:
    """What a CTA does at a time.

    Attributes:
        request, head: whose keys.
        first, count: tiles of keys.
        slot: where its partial result goes.
        pieces: of the head in all.
        origin: see ``slot_of``.
    """

    request: int
    head: int
    first: int
    count: int
    slot: int
    pieces: int
    origin: int


@dataclass(frozen=True)
class Cut:
    """What decides the pieces, beside the lengths.

    Attributes:
        tile: tokens of a tile.
        rows: queries of a request.
        window: see ``AttentionSpec``.
        heads: of a request: KV heads times blocks of columns.
        parts: most parts of a head; None for tiles.
        least: tiles of a part at least.
    """

    tile: int
    rows: int
    window: int | None
    heads: int
    parts: int | None
    least: int


def pieces(lengths: list[int], ctas: int, cut: Cut) -> list[list[Piece]]:
    """Pieces of every CTA, in order: the mirror of what the kernel walks."""
    spans = [tile_span(n, cut.rows, cut.window, cut.tile) for n in lengths]
    units = [units_of(count, cut.parts, cut.least) for _, count in spans]
    total = sum(units) * cut.heads
    found = []
    for cta in range(ctas):
        mine = []
        position, end = stripe(cta, ctas, total)
        while position < end:
            piece, taken = _piece(position, end, (spans, units), (cta, ctas, total), cut)
            mine.append(piece)
            position += taken
        found.append(mine)
    return found


def _piece(
    position: int,
    end: int,
    requests: tuple[list[tuple[int, int]], list[int]],
    place: tuple[int, int, int],
    cut: Cut,
) -> tuple[Piece, int]:
    """The piece at ``position``, and its units."""
    spans, units = requests
    cta, ctas, total = place
    request, base = 0, 0
    while position >= base + units[request] * cut.heads:
        base += units[request] * cut.heads
        request += 1
    (first, tiles), mine = spans[request], units[request]
    head, unit = divmod(position - base, mine)
    if cut.parts is not None:
        each = part_tiles(tiles, cut.parts, cut.least)
        origin = (request * cut.heads + head) * cut.parts
        count = min(each, tiles - unit * each)
        slot = slot_of(unit, origin, cut.parts)
        return Piece(request, head, first + unit * each, count, slot, mine, origin), 1
    start = base + head * mine
    origin = owner(start, ctas, total)
    count = min(mine - unit, end - position)
    number = owner(start + mine - 1, ctas, total) - origin + 1
    slot = slot_of(cta - origin, origin, None)
    if number == 1:
        slot = whole_slot(request * cut.heads + head, cta, ctas)
    return Piece(request, head, first + unit, count, slot, number, origin), count
