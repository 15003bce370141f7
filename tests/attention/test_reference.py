"""The attention oracle: against PyTorch's SDPA, against laws, and on the inputs others got wrong."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from epicute.attention.reference import Options, attend, attend_batch
from epicute.errors import ArgumentError
from epicute.testing import assert_equal_bits

NAN = math.nan


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_request(
    queries: int, keys: int, heads: int = 4, kv_heads: int = 2, dim: int = 16, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        drawn(seed, queries, heads, dim),
        drawn(seed + 1, keys, kv_heads, dim),
        drawn(seed + 2, keys, kv_heads, dim),
    )


def same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], atol: float = 1e-12) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=1e-12, equal_nan=True)


def prefix(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


lengths = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=5)


# --- one request ---


@given(st.integers(1, 40), st.integers(0, 40), st.booleans(), st.sampled_from([None, 1, 5, 100]))
def test_against_sdpa(queries: int, before: int, causal: bool, window: int | None) -> None:
    """PyTorch's attention with the mask written out, in float64."""
    keys = queries + before
    q, k, v = one_request(queries, keys)
    i = torch.arange(queries)[:, None] + before
    j = torch.arange(keys)[None]
    mask = ((j <= i) | (not causal)) & (j > i - (window or keys + 1))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask, enable_gqa=True
    )
    out, lse = attend(q, k, v, causal=causal, window=window)
    torch.testing.assert_close(out, expected[0].transpose(0, 1), atol=1e-12, rtol=1e-12)
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(2, dim=1)) / 4
    expected_lse = scores.masked_fill(~mask, -math.inf).logsumexp(-1)
    torch.testing.assert_close(lse, expected_lse, atol=1e-12, rtol=1e-12)


@given(st.integers(1, 20), st.integers(0, 20), st.data())
def test_chunks_of_a_prompt_give_what_the_whole_gives(
    queries: int, before: int, data: st.DataObject
) -> None:
    q, k, v = one_request(queries, before + queries)
    window = data.draw(st.sampled_from([None, 1, 4]))
    whole = attend(q, k, v, window=window)
    cut = data.draw(st.integers(0, queries))
    first = attend(q[:cut], k[: before + cut], v[: before + cut], window=window)
    second = attend(q[cut:], k, v, window=window)
    both = torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]], dim=1)
    same(both, whole)


@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from([(6, 1), (6, 2), (6, 3), (9, 3)]))
def test_grouped_heads_are_repeated_heads(queries: int, keys: int, heads: tuple[int, int]) -> None:
    q, k, v = one_request(queries, keys, *heads)
    group = heads[0] // heads[1]
    repeated = (x.repeat_interleave(group, dim=1) for x in (k, v))
    same(attend(q, k, v), attend(q, *repeated))


@given(st.integers(1, 12), st.integers(0, 12))
def test_a_sink_is_a_key_without_value(queries: int, before: int) -> None:
    """Key e_D with value 0 in a channel of its own, before all others, without a mask."""
    q, k, v = one_request(queries, before + queries, heads=2, kv_heads=2)
    sinks = drawn(9, 2)
    wide_q = torch.cat([q, torch.ones(queries, 2, 1).double()], dim=2)
    wide_k = torch.cat([k, torch.zeros(len(k), 2, 1).double()], dim=2)
    wide_v = torch.cat([v, torch.zeros(len(v), 2, 1).double()], dim=2)
    key = torch.zeros(1, 2, 17).double()
    key[0, :, 16] = sinks / 0.25
    extended = attend(
        wide_q,
        torch.cat([key, wide_k]),
        torch.cat([torch.zeros(1, 2, 17).double(), wide_v]),
        scale=0.25,
    )
    out, lse = attend(q, k, v, sinks=sinks, scale=0.25)
    same((torch.cat([out, torch.zeros(queries, 2, 1).double()], dim=2), lse), extended)


def test_a_far_sink_takes_nothing_and_a_near_one_all() -> None:
    q, k, v = one_request(3, 5)
    same(attend(q, k, v, sinks=torch.full((4,), -1e9)), attend(q, k, v))
    out, lse = attend(q, k, v, sinks=torch.full((4,), 1e3))
    assert (out == 0).all()
    torch.testing.assert_close(lse, torch.full((4, 3), 1e3).double())


@given(st.integers(1, 20), st.integers(0, 10), st.floats(0.1, 50))
def test_results_do_not_change_under_what_softmax_ignores(
    queries: int, before: int, shift: float
) -> None:
    """A constant added to all logits of a head moves lse alone; values scale through."""
    q, k, v = one_request(queries, before + queries, heads=1, kv_heads=1)
    q[..., 0] = 1.0
    moved = k.clone()
    moved[..., 0] += shift
    out, lse = attend(q, k, v)
    same(attend(q, moved, 3 * v), (3 * out, lse + shift / 4), atol=1e-10)


def test_a_high_softcap_is_none() -> None:
    q, k, v = one_request(7, 9)
    same(attend(q, k, v, softcap=1e9), attend(q, k, v), atol=1e-9)


def test_pp_13_the_cap_is_applied_before_the_softmax() -> None:
    q = torch.ones(1, 1, 1)
    k, v = torch.tensor([20.0, 10.0]).reshape(2, 1, 1), torch.tensor([0.0, 1.0]).reshape(2, 1, 1)
    assert float(attend(q, k, v, softcap=10.0)[0]) == pytest.approx(0.1167, abs=1e-4)
    assert float(attend(q, k, v)[0]) == pytest.approx(4.54e-5, abs=1e-7)
    for cap in (0.0, -1.0, math.inf, NAN):
        with pytest.raises(ArgumentError, match="^softcap"):
            attend(q, k, v, softcap=cap)


@pytest.mark.parametrize("queries", [1, 2, 63, 64, 65, 127])
@pytest.mark.parametrize("before", [0, 1, 17, 128, 1000])
def test_pp_05_the_mask_is_aligned_to_the_last_key(queries: int, before: int) -> None:
    keys = queries + before
    _, k, v = one_request(1, keys, heads=1, kv_heads=1, dim=2)
    out, lse = attend(torch.zeros(queries, 1, 2), k, v)
    seen = torch.arange(before + 1, keys + 1, dtype=torch.float64)
    torch.testing.assert_close(out, (v.cumsum(0)[before:] / seen[:, None, None]))
    torch.testing.assert_close(lse[0], seen.log())


@pytest.mark.parametrize("sinks", [None, torch.zeros(1)])
def test_pp_06_a_query_without_keys(sinks: Tensor | None) -> None:
    _, k, v = one_request(1, 2, heads=1, kv_heads=1)
    out, lse = attend(torch.zeros(4, 1, 16), k, v, sinks=sinks)
    assert (out[:2] == 0).all()
    assert (lse[0, :2] == -math.inf).all()
    if sinks is None:
        torch.testing.assert_close(out[2:], torch.stack([v[0], (v[0] + v[1]) / 2]))


def test_pp_07_a_window_counts_the_query_itself() -> None:
    _, k, v = one_request(1, 4097 + 12, heads=1, kv_heads=1, dim=2)
    q = torch.zeros(12, 1, 2)
    torch.testing.assert_close(attend(q, k[:12], v[:12], window=1)[0], v[:12])
    torch.testing.assert_close(attend(q, k[:12], v[:12], window=4)[0][10], v[7:11].mean(0))
    for keys in (3, 4, 5, 4097):  # decode: one query, at the last key
        one = attend(q[:1], k[:keys], v[:keys], window=4)[0]
        torch.testing.assert_close(one[0], v[max(keys - 4, 0) : keys].mean(0))
    same(attend(q, k[:12], v[:12], window=None), attend(q, k[:12], v[:12]))
    for none in (0, -1, 2.5):
        with pytest.raises(ArgumentError, match="^window"):
            attend(q, k[:12], v[:12], window=none)  # type: ignore[arg-type]


@given(st.integers(1, 20), st.integers(0, 5))
def test_pp_08_a_window_at_least_as_long_as_the_request_is_none(length: int, more: int) -> None:
    q, k, v = one_request(length, length)
    same(attend(q, k, v, window=length + more), attend(q, k, v))
    if length > 1:
        narrow = attend(q, k, v, window=length - 1)[0]
        assert not torch.allclose(narrow[-1], attend(q, k, v)[0][-1])


def test_what_a_query_does_not_see_may_be_nan() -> None:
    q, k, v = one_request(6, 6)
    clean = attend(q[:4], k[:4], v[:4])
    k[4:], v[4] = NAN, NAN
    v[5] = math.inf
    out, lse = attend(q, k, v)
    same((out[:4], lse[:, :4]), clean)
    assert out[4:].isnan().all()


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_pp_02_no_keys_at_all(dim: int) -> None:
    q, k, v = one_request(3, 0, dim=dim)
    out, lse = attend(q, k, v)
    assert out.shape == (3, 4, dim)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert attend(q[:0], k, v)[0].shape == (0, 4, dim)


# --- batches ---


def pool_of(
    parts: list[Tensor], page: int, order: list[int], layout: str = "nhd"
) -> tuple[Tensor, Tensor]:
    """A pool full of NaN with ``parts`` in pages of the given order, and its page table."""
    kv_heads, dim = parts[0].shape[1:]
    shape = (
        (len(order), kv_heads, page, dim) if layout == "hnd" else (len(order), page, kv_heads, dim)
    )
    memory = torch.full(shape, NAN, dtype=torch.float64)
    pool = memory.transpose(1, 2) if layout == "hnd" else memory
    free, rows = list(order), []
    for part in parts:
        row = [free.pop(0) for _ in range(-(-len(part) // page))]
        for at, p in enumerate(row):
            piece = part[at * page : (at + 1) * page]
            pool[p, : len(piece)] = piece
        rows.append(row)
    width = max(1, *(len(row) for row in rows))
    table = [row + [-1] * (width - len(row)) for row in rows]
    return pool, torch.tensor(table, dtype=torch.int32)


def one_by_one(parts: list[tuple[Tensor, ...]], **rules: Any) -> tuple[Tensor, Tensor]:
    done = [attend(*part, **rules) for part in parts]
    return torch.cat([out for out, _ in done]), torch.cat([lse for _, lse in done], dim=1)


@given(lengths, st.sampled_from([1, 2, 16]), st.sampled_from(["nhd", "hnd"]), st.data())
def test_every_layout_gives_what_each_request_gives_alone(
    sizes: list[tuple[int, int]], page: int, layout: str, data: st.DataObject
) -> None:
    """Packed, padded and paged, with NaN in all rows that belong to nobody."""
    parts = [one_request(a, b, seed=3 * n) for n, (a, b) in enumerate(sizes)]
    window = data.draw(st.sampled_from([None, 3]))
    sinks = data.draw(st.sampled_from([None, drawn(77, 4)]))
    expected = one_by_one(parts, window=window, sinks=sinks)
    nq, nk = [a for a, _ in sizes], [b for _, b in sizes]
    tail = torch.full((3, 4, 16), NAN).double()
    q = torch.cat([*(p[0] for p in parts), tail])
    k, v = (torch.cat([*(p[n] for p in parts), tail[:, :2]]) for n in (1, 2))

    out, lse = attend_batch(
        Options(window=window), q, k, v, sinks=sinks, q_starts=prefix(nq), kv_starts=prefix(nk)
    )
    total = sum(nq)
    same((out[:total], lse[:, :total]), expected)
    assert out[total:].isnan().all()
    assert lse[:, total:].isnan().all()

    needed = sum(-(-n // page) for n in nk) + 2
    order = data.draw(st.permutations(range(needed)))
    pools, tables = zip(
        *(pool_of([p[n] for p in parts], page, order, layout) for n in (1, 2)), strict=True
    )
    paged = {"page_table": tables[0], "kv_lengths": torch.tensor(nk, dtype=torch.int32)}
    out, lse = attend_batch(
        Options(window=window, page=page), q, *pools, sinks=sinks, q_starts=prefix(nq), **paged
    )
    same((out[:total], lse[:, :total]), expected)

    padded = [torch.full((len(parts), 13, x.shape[1], 16), NAN).double() for x in parts[0]]
    for b, part in enumerate(parts):
        for wide, rows in zip(padded, part, strict=True):
            wide[b, : len(rows)] = rows
    counts = {"q_lengths": torch.tensor(nq, dtype=torch.int32)}
    dense = attend_batch(
        Options(window=window, packed=False),
        *padded,
        sinks=sinks,
        kv_lengths=torch.tensor(nk, dtype=torch.int32),
        **counts,
    )
    both = attend_batch(
        Options(window=window, packed=False, page=page),
        padded[0],
        *pools,
        sinks=sinks,
        **counts,
        **paged,
    )
    for out, lse in (dense, both):
        rows = [(out[b, :n], lse[b, :, :n]) for b, n in enumerate(nq)]
        same((torch.cat([o for o, _ in rows]), torch.cat([x for _, x in rows], dim=1)), expected)
        for b, n in enumerate(nq):
            assert out[b, n:].isnan().all()
            assert lse[b, :, n:].isnan().all()


@given(lengths, st.randoms(use_true_random=False))
def test_requests_do_not_depend_on_their_order(sizes: list[tuple[int, int]], random: Any) -> None:
    parts = [one_request(a, b, seed=3 * n) for n, (a, b) in enumerate(sizes)]
    shuffled = list(range(len(parts)))
    random.shuffle(shuffled)

    def run(order: list[int]) -> list[tuple[Tensor, Tensor]]:
        nq = prefix([sizes[n][0] for n in order])
        q, k, v = (torch.cat([parts[n][x] for n in order]) for x in range(3))
        kv = prefix([sizes[n][1] for n in order])
        out, lse = attend_batch(Options(), q, k, v, q_starts=nq, kv_starts=kv)
        spans = [slice(*nq[n : n + 2].tolist()) for n in range(len(order))]
        return [(out[span], lse[:, span]) for span in spans]

    plain, other = run(list(range(len(parts)))), run(shuffled)
    for place, n in enumerate(shuffled):
        same(other[place], plain[n], atol=0)


@pytest.mark.parametrize(
    ("heads", "dim", "q_starts", "kv_starts"),
    [
        ((9, 3), 64, [0, 0, 1, 1, 2], [0, 2, 5, 5, 9]),
        ((21, 7), 120, [0, 0, 0, 0, 1], [0, 0, 0, 0, 1]),
        ((4, 2), 16, [0, 5, 12, 12], [0, 5, 12, 12]),
    ],
)
def test_pp_01_pp_03_empty_requests_leave_their_neighbours(
    heads: tuple[int, int], dim: int, q_starts: list[int], kv_starts: list[int]
) -> None:
    q, k, v = one_request(q_starts[-1], kv_starts[-1], *heads, dim=dim)
    out, lse = attend_batch(
        Options(),
        q,
        k,
        v,
        q_starts=torch.tensor(q_starts, dtype=torch.int32),
        kv_starts=torch.tensor(kv_starts, dtype=torch.int32),
    )
    assert not out.isnan().any()
    for n in range(len(q_starts) - 1):
        mine, keys = slice(*q_starts[n : n + 2]), slice(*kv_starts[n : n + 2])
        same((out[mine], lse[:, mine]), attend(q[mine], k[keys], v[keys]))


def test_pp_09_a_shared_prefix_in_shuffled_pages() -> None:
    """Two requests read the same pages for their first 64 tokens; a third hits nothing."""
    common = one_request(1, 64, seed=5)
    tails = [one_request(4, 20, seed=20), one_request(7, 30, seed=30)]
    other = one_request(9, 9, seed=40)
    order = [6, 2, 9, 0, 7, 1, 8, 3, 5, 4, 10]
    pools = []
    for n in (1, 2):
        parts = [common[n], tails[0][n], tails[1][n], other[n]]
        pool, table = pool_of(parts, 16, order)
        pools.append(pool)
    width = 6
    table = [
        [*table[0, :4].tolist(), *table[row, :2].tolist()] if row < 3 else table[row].tolist()
        for row in (1, 2, 3)
    ]
    table = [(row + [-1] * width)[:width] for row in table]
    out, lse = attend_batch(
        Options(page=16),
        torch.cat([tails[0][0], tails[1][0], other[0]]),
        *pools,
        q_starts=prefix([4, 7, 9]),
        page_table=torch.tensor(table, dtype=torch.int32),
        kv_lengths=torch.tensor([84, 94, 9], dtype=torch.int32),
    )
    full = [
        (tail[0], torch.cat([common[1], tail[1]]), torch.cat([common[2], tail[2]]))
        for tail in tails
    ]
    same((out, lse), one_by_one([*full, other]))


@pytest.mark.parametrize("page", [2, 16, 128])
def test_pp_12_requests_shorter_than_a_page(page: int) -> None:
    for keys in ([1, 1], [1, page - 1, page, page + 1]):
        parts = [one_request(1, n, seed=0 if keys == [1, 1] else n) for n in keys]
        order = list(reversed(range(2 * len(keys))))
        (k, table), (v, _) = (pool_of([p[n] for p in parts], page, order) for n in (1, 2))
        found = attend_batch(
            Options(page=page),
            torch.cat([p[0] for p in parts]),
            k,
            v,
            q_starts=prefix([1] * len(keys)),
            page_table=table,
            kv_lengths=torch.tensor(keys, dtype=torch.int32),
        )
        same(found, one_by_one(parts))


def test_pp_11_slices_of_one_qkv_buffer() -> None:
    qkv = drawn(1, 11, (4 + 2 + 2) * 16)
    q = qkv[:, :64].view(11, 4, 16)
    k, v = qkv[:, 64:96].view(11, 2, 16), qkv[:, 96:].view(11, 2, 16)
    starts = prefix([5, 6])
    sliced = attend_batch(Options(), q, k, v, q_starts=starts, kv_starts=starts)
    copied = (x.contiguous() for x in (q, k, v))
    same(sliced, attend_batch(Options(), *copied, q_starts=starts, kv_starts=starts), atol=0)


def test_fp8_keys_and_values_are_codes_times_their_head_scale() -> None:
    q, k, v = one_request(5, 5)
    codes = [x.float().to(torch.float8_e4m3fn) for x in (k, v)]
    scales = [torch.tensor([0.5, 3.0]), torch.tensor([2.0, 0.25])]
    starts = prefix([2, 3])
    places = {"q_starts": starts, "kv_starts": starts}
    got = attend_batch(Options(), q, *codes, k_scale=scales[0], v_scale=scales[1], **places)
    plain = [c.double() * s.double()[:, None] for c, s in zip(codes, scales, strict=True)]
    same(got, attend_batch(Options(), q, *plain, **places), atol=0)
    with pytest.raises(ArgumentError, match="^k_scale"):
        attend_batch(Options(), q, *codes, v_scale=scales[1], **places)
    with pytest.raises(ArgumentError, match="^v_scale"):
        attend_batch(Options(), q, k, v, v_scale=scales[1], **places)
    with pytest.raises(ArgumentError, match="^v_scale"):
        attend_batch(Options(), q, *codes, k_scale=scales[0], v_scale=torch.ones(1), **places)


def test_rows_of_nobody_keep_what_the_caller_had() -> None:
    q, k, v = one_request(4, 4)
    out, lse = torch.full((6, 4, 16), 7.0), torch.full((4, 6), 8.0)
    starts = prefix([4])
    found = attend_batch(
        Options(),
        torch.cat([q, torch.full((2, 4, 16), NAN).double()]),
        k,
        v,
        out=out,
        lse=lse,
        q_starts=starts,
        kv_starts=starts,
    )
    assert (found[0][4:] == 7).all()
    assert (found[1][:, 4:] == 8).all()
    same((found[0][:4], found[1][:, :4]), attend(q, k, v))
    assert_equal_bits(out, torch.full((6, 4, 16), 7.0))


@pytest.mark.parametrize(
    ("rules", "change", "named"),
    [
        (Options(), {"q_starts": None}, "^q_starts"),
        (Options(), {"kv_starts": prefix([4, 1])}, "^kv_starts"),
        (Options(), {"q_starts": prefix([4]).long()}, "^q_starts"),
        (Options(), {"q_starts": prefix([5])}, "^q_starts"),
        (Options(), {"q_starts": torch.tensor([0, 3, 2], dtype=torch.int32)}, "^q_starts"),
        (Options(), {"lengths": prefix([4])}, "^operands"),
        (Options(page=4), {}, r"^k\.shape"),
        (Options(packed=False), {}, r"^q\.shape"),
    ],
)
def test_operands_of_another_layout_are_refused(
    rules: Options, change: dict[str, Any], named: str
) -> None:
    q, k, v = one_request(4, 4)
    places = {"q_starts": prefix([4]), "kv_starts": prefix([4]), **change}
    with pytest.raises(ArgumentError, match=named):
        attend_batch(rules, q, k, v, **places)


def test_pages_beyond_the_pool_are_refused() -> None:
    q, k, v = one_request(2, 8)
    pools = (k.view(2, 4, 2, 16), v.view(2, 4, 2, 16))
    for table, length in (([[0, 2]], 8), ([[0, -1]], 5), ([[0]], 5)):
        with pytest.raises(ArgumentError, match="^page_table"):
            attend_batch(
                Options(page=4),
                q,
                *pools,
                q_starts=prefix([2]),
                page_table=torch.tensor(table, dtype=torch.int32),
                kv_lengths=torch.tensor([length], dtype=torch.int32),
            )


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    q, k, v = one_request(4, 4)
    for arguments, named in (
        ((q, k, v[:3]), "^q, k, v"),
        ((q[:, :3], k, v), "^kv_heads"),
        ((q[0], k, v), "^q, k, v"),
    ):
        with pytest.raises(ArgumentError, match=named):
            attend(*arguments)
    with pytest.raises(ArgumentError, match=r"^sinks\.shape"):
        attend(q, k, v, sinks=torch.zeros(2))


def test_the_oracle_needs_no_dsl() -> None:
    """In a process where the DSL cannot be imported."""
    text = "import sys; sys.modules['cutlass'] = sys.modules['tvm_ffi'] = None\n"
    text += "from epicute.attention.reference import attend; import torch\n"
    text += "print(attend(*[torch.ones(1, 1, 2)] * 3)[0].tolist())"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[[[1.0, 1.0]]]"
