"""Every tile of every head is read once, by CTAs with equal shares, and pieces find each other."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from epicute.attention.decode_schedule import DecodeSchedule
from epicute.attention.decode_spec import DecodeSpec
from epicute.attention.decode_work import (
    Cut,
    Piece,
    owner,
    part_tiles,
    pieces,
    slot_of,
    stripe,
    tile_span,
    units_of,
)
from epicute.layouts import split

LENGTHS = st.lists(
    st.one_of(st.sampled_from((0, 1, 63, 64, 65, 255, 256, 257, 4097)), st.integers(0, 9000)),
    max_size=6,
)
CUTS = st.builds(
    Cut,
    tile=st.sampled_from((64, 128)),
    rows=st.integers(1, 8),
    window=st.sampled_from((None, 1, 100, 700)),
    heads=st.sampled_from((1, 3, 8)),
    parts=st.sampled_from((None, None, 4, 9)),
    least=st.sampled_from((1, 2, 4)),
)
CTAS = st.sampled_from((1, 2, 7, 132))


def by_head(found: list[list[Piece]]) -> dict[tuple[int, int], list[Piece]]:
    heads: dict[tuple[int, int], list[Piece]] = {}
    for mine in found:
        for piece in mine:
            heads.setdefault((piece.request, piece.head), []).append(piece)
    return heads


@given(LENGTHS, CUTS, CTAS)
def test_every_tile_is_read_once(lengths: list[int], cut: Cut, ctas: int) -> None:
    heads = by_head(pieces(lengths, ctas, cut))
    assert set(heads) == {(b, h) for b in range(len(lengths)) for h in range(cut.heads)}
    for (request, _), mine in heads.items():
        first, count = tile_span(lengths[request], cut.rows, cut.window, cut.tile)
        read = [t for piece in mine for t in range(piece.first, piece.first + piece.count)]
        assert read == list(range(first, first + count))


@given(LENGTHS, CUTS, CTAS)
def test_pieces_of_a_head_know_each_other(lengths: list[int], cut: Cut, ctas: int) -> None:
    used = set()
    for mine in by_head(pieces(lengths, ctas, cut)).values():
        for number, piece in enumerate(mine):
            assert piece.pieces == len(mine)
            assert piece.origin == mine[0].origin
            if len(mine) > 1 or cut.parts is not None:
                assert piece.slot == slot_of(number, piece.origin, cut.parts)
        if len(mine) > 1:
            assert used.isdisjoint(piece.slot for piece in mine)
            used |= {piece.slot for piece in mine}
    most = 4 * ctas if cut.parts is None else len(lengths) * cut.heads * cut.parts
    assert all(0 <= slot < most for slot in used)


@given(LENGTHS, CUTS, CTAS)
def test_a_slot_is_free_when_it_is_written(lengths: list[int], cut: Cut, ctas: int) -> None:
    """A CTA's own slots: only its first piece begins within a head, only its last is left open, heads take turns."""
    if cut.parts is not None:
        return
    for mine in pieces(lengths, ctas, cut):
        for piece in mine[1:-1]:
            assert piece.pieces == 1
        shared = [piece.slot for piece in mine if piece.pieces > 1]
        assert len(set(shared)) == len(shared)
        whole = [piece.slot for piece in mine if piece.pieces == 1]
        assert set(whole).isdisjoint(shared)
        assert all(a != b for a, b in itertools.pairwise(whole))


@given(LENGTHS, CUTS, CTAS)
def test_shares_differ_by_one_unit(lengths: list[int], cut: Cut, ctas: int) -> None:
    found = pieces(lengths, ctas, cut)
    shares = [sum(p.count for p in mine) if cut.parts is None else len(mine) for mine in found]
    assert max(shares) - min(shares) <= 1


@given(st.integers(0, 10**6), CTAS)
def test_stripes_and_owners_agree(total: int, ctas: int) -> None:
    ends = [stripe(cta, ctas, total) for cta in range(ctas)]
    assert ends[0][0] == 0
    assert ends[-1][1] == total
    for cta, (first, end) in enumerate(ends):
        assert cta == 0 or ends[cta - 1][1] == first
        for unit in {first, end - 1} if first < end else ():
            assert owner(unit, ctas, total) == cta


@given(
    st.integers(0, 2**20), st.integers(1, 8), st.sampled_from((None, 1, 100, 4096)), st.booleans()
)
def test_tiles_hold_what_any_query_sees(
    length: int, rows: int, window: int | None, wide: bool
) -> None:
    tile = 128 if wide else 64
    first, count = tile_span(length, rows, window, tile)
    assert count >= 1
    assert (first + count) * tile >= length
    oldest = 0 if window is None else max(length - rows - window + 1, 0)
    assert first * tile <= oldest < max((first + 1) * tile, 1)


@given(st.integers(1, 2**14), st.integers(1, 300), st.integers(1, 8))
def test_parts_follow_the_own_length_alone(tiles: int, parts: int, least: int) -> None:
    units = units_of(tiles, parts, least)
    each = part_tiles(tiles, parts, least)
    assert 1 <= units <= parts
    assert (units - 1) * each < tiles <= units * each
    assert each == least or units * (each - 1) < tiles


@given(st.integers(0, 2**31 - 1), st.sampled_from((1, 2, 3, 4, 20, 256)))
def test_a_split_is_a_division(x: int, n: int) -> None:
    assert split(x, n) == divmod(x, n)


def test_kd_17_parts_of_a_million_tokens_have_a_bounded_workspace() -> None:
    spec = DecodeSpec(32, 8, 128, "int4", page=128, batch_invariant=True)
    schedule = DecodeSchedule(128, 8, 5)
    cut = schedule.cut(spec)
    assert cut.parts == 32
    for length in (1, 256, 257, 131072, 2**20):
        found = pieces([length], 132, cut)
        assert max(p.pieces for mine in found for p in mine) <= cut.parts
