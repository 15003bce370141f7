"""The compiled kernels against the float64 reference on the CPU: every format, and the laws that need no reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from epicute.attention.decode_spec import DecodeSpec
from tests.attention.decode_cases import Decoded, compare
from tests.attention.decode_emulated import emulate, workspace
from tests.attention.decode_specs import SPECS, TABLED, schedule

pytestmark = pytest.mark.compile

SMALL = {
    name: replace(spec, heads=min(spec.heads, 2 * spec.group), kv_heads=min(spec.kv_heads, 2))
    for name, spec in SPECS.items()
}
"""The same with two KV heads at most."""

LENGTHS = [66, 0, 5, 131, 1]
"""A tail in a page, a row of padding, less than a tile, one key behind two tiles, and one key."""


@pytest.mark.parametrize("name", SPECS)
def test_kd_01_kd_04_kd_08_kd_10_kd_11_emulated(name: str) -> None:
    """Memory that no request owns is NaN, scales too; more splits than keys; sinks count once."""
    batch = Decoded.draw(SMALL[name], LENGTHS, seed=1)
    emulate(batch, ctas=3, races=True)
    compare(batch)


@pytest.mark.parametrize("name", ["bf16", "fp8", "int4"])
def test_kd_03_any_number_of_ctas(name: str) -> None:
    """Heads cut in every place, merged by whoever comes last."""
    batch = Decoded.draw(replace(SMALL[name], heads=2, kv_heads=1), [200, 3, 70], seed=2)
    for ctas in (1, 2, 5, 9):
        emulate(batch, ctas)
        compare(batch)


@pytest.mark.parametrize("name", ["bf16", "int4"])
@pytest.mark.parametrize(("tiles", "heads", "ctas"), [(34, 1, 34), (11, 2, 11)])
def test_kd_03_many_pieces_of_a_head(name: str, tiles: int, heads: int, ctas: int) -> None:
    """More than are fetched at once, or than a warp has lanes; the scribe merges the first of two heads."""
    spec = replace(SMALL[name], heads=2 * heads, kv_heads=heads)
    batch = Decoded.draw(spec, [tiles * schedule(spec).tile - 3], seed=12)
    emulate(batch, ctas, races=True)
    compare(batch)


def test_kd_02_lanes_that_pad_do_not_count() -> None:
    """Queries of zero: the output is the mean of the values."""
    spec = replace(SMALL["bf16"], heads=1, kv_heads=1)
    for lengths in ([1, 15, 16, 17], [63, 64, 65]):
        batch = Decoded.draw(spec, lengths, seed=3)
        batch.q.zero_()
        emulate(batch, ctas=2)
        for i in range(len(lengths)):
            mean = batch.v[i].double().mean(0)
            assert (batch.out.tensor[i, 0].double() - mean).abs().max() <= 2**-8


@pytest.mark.parametrize("name", ["fp8, 20:1 heads of 64, batch invariant", "int4"])
def test_kd_17_bits_do_not_depend_on_batch_mates_pages_or_ctas(name: str) -> None:
    spec = replace(SMALL[name], batch_invariant=True)
    batch = Decoded.draw(spec, [300, 40, 0, 129], seed=4)
    emulate(batch, ctas=3)
    for rows, ctas in ((slice(4), 7), (slice(1), 2), (slice(1, 4), 1)):
        other = batch.some(rows, seed=9)
        emulate(other, ctas, seed=5)
        assert torch.equal(batch.out.tensor[rows], other.out.tensor)


@pytest.mark.parametrize("rows", [1, 3])
def test_ge_14_new_keys_are_not_read_before_the_kernel_in_front_has_ended(rows: int) -> None:
    """Of a cache that it appends to, the tiles with its rows wait; all before them do not."""
    spec = replace(SMALL["fp8, heads of 256, prefetch"], heads=2, kv_heads=1, rows=rows)
    for length in (130, 128 + rows, 64):
        batch = Decoded.draw(spec, [length], seed=10)
        old = [x[:, : length - rows] for x in batch.cache]
        emulate(batch, ctas=2, early=[batch.operands["kv_lengths"], *old])
        compare(batch)
    batch = Decoded.draw(spec, [257], seed=10)
    older = [x[:, :128] for x in batch.cache]
    with pytest.raises(AssertionError, match=r"before griddepcontrol\.wait"):
        emulate(batch, ctas=2, early=[batch.operands["kv_lengths"], *older])


def test_cg_05_a_workspace_may_hold_anything_but_its_counters() -> None:
    spec = SMALL["bf16"]
    batch = Decoded.draw(spec, [200, 5], seed=5)
    memory = workspace(spec, schedule(spec), 2, 3)
    memory.data.view(torch.uint8).fill_(0xFF)
    emulate(batch, ctas=3, memory=memory)
    first = batch.out.tensor.clone()
    emulate(batch, ctas=3, memory=memory)
    assert torch.equal(first, batch.out.tensor)
    compare(batch)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_table_reads_the_same_cache(head_dim: int) -> None:
    spec = replace(TABLED, head_dim=head_dim, scale=head_dim**-0.5, rotation=head_dim)
    batch = Decoded.draw(spec, [66, 0, 150], seed=6)
    emulate(batch, ctas=2, schedule=schedule(spec, unpack="table"), races=True)
    compare(batch)


def test_new_rows_of_any_value_are_quantised_as_on_the_cpu() -> None:
    """Zeros, constants, large and tiny numbers, infinities and NaN: bytes of the cache are equal."""
    spec = DecodeSpec(2, 2, 128, "int4", page=16)
    torch.manual_seed(0)
    lengths = [1, 2, 16, 17, 33, 48, 3, 20]
    k, v = ([torch.randn(n, 2, 128).bfloat16() for n in lengths] for _ in range(2))
    for i, x in enumerate((0.0, 3.0, 3e4, 1e-4, 1e-38, 3e38, float("inf"), float("nan"))):
        k[i][-1, 0] = x
        v[i][-1, 1, ::3] = x
    q = torch.randn(len(lengths), 1, 2, 128).bfloat16()
    batch = Decoded.of(spec, q, k, v)
    emulate(batch, ctas=3)
    assert batch.wanted_cache is not None
    assert torch.equal(batch.cache, batch.wanted_cache)


@pytest.mark.parametrize("name", ["bf16", "int4"])
def test_cg_06_padding_rows_touch_nothing(name: str) -> None:
    """Requests of no key, with page tables of garbage: counters, statistics and cache see the live ones alone."""
    spec = replace(SMALL[name], out_dtype=torch.float8_e4m3fn, batch_invariant=True)
    padded = Decoded.draw(spec, [40, 100, 0, 0], seed=8)
    live = padded.some(slice(2), seed=8)
    padded.q[2:] = float("nan")
    padded.operands["page_table"][2:] = -1
    for batch in (padded, live):
        batch.operands["out_scale"].fill_(1e-4)
        emulate(batch, ctas=2)
    for statistic in ("amax", "saturated", "nans"):
        assert torch.equal(padded.operands[statistic], live.operands[statistic]), statistic
    assert int(live.operands["saturated"]) > 0
    assert torch.equal(padded.out.tensor[:2].float(), live.out.tensor.float())
    assert (padded.out.tensor[2:].float() == 0).all()
    if padded.wanted_cache is not None:
        assert torch.equal(padded.cache, padded.wanted_cache)
