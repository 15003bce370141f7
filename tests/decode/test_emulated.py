"""Whole kernels on the CPU, from their PTX: every format, group, conversion, cluster and composition, bit for bit.

Warps and copies take turns at random under a seed, and shared memory is watched for accesses that nothing orders.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch

from epicute.decode.geometry import MMAS
from epicute.decode.schedule import CONVERSIONS
from epicute.epilogues import Store, compose
from epicute.layouts import CHANNEL
from epicute.quant.int4 import MIDDLE
from tests.decode.cases import BF16, FP16, FP32, Few, FewJob, chains, dequantized, emulated
from tests.ptx import unknown

pytestmark = pytest.mark.compile

PLAIN = compose(Store(FP32))


def few(name: str = "store", k: int = 600, **options: Any) -> Few:
    composition, n, exact = chains(k)[name]
    options.setdefault("mma", "sync")
    if options.get("format") == "fp8":
        composition = dequantized(composition)
    return Few(composition, n, k, exact=exact, **options)


def changed(**changes: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(changes.items())


def formed(mma: str, **changes: Any) -> tuple[tuple[str, Any], ...]:
    """Changes that make a kernel multiply with ``mma``; none beside those asked for where it does so by itself."""
    if mma == "wgmma":
        changes |= {"mma": mma, "conversion": "registers"}
    return changed(**changes)


@pytest.mark.parametrize("group", [32, 64, 128, CHANNEL])
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_iw_04_iw_06_int4_in_every_way(group: int, conversion: str) -> None:
    """Every two of conversion, group, zero points and dtype of x (more of them on a GPU)."""
    zeros = (CONVERSIONS.index(conversion) + (32, 64, 128, CHANNEL).index(group)) % 2 == 0
    x_dtype = FP16 if zeros == (group in (32, 128)) else BF16
    scale = BF16 if group == 64 else FP16
    options = {"scale_dtype": scale, "changes": changed(conversion=conversion)}
    case = few(group=group, zeros=zeros, x_dtype=x_dtype, **options)
    FewJob(case, 3).emulate(clusters=2, seed=group)


@pytest.mark.parametrize("group", [32, 64, 128, CHANNEL])
@pytest.mark.parametrize("zeros", [False, True])
def test_iw_04_iw_06_int4_by_wgmma(group: int, zeros: bool) -> None:
    """Batches that end a group or do not, shares of a record that differ (k of 600), either half."""
    x_dtype = FP16 if zeros == (group in (32, 128)) else BF16
    options = {"scale_dtype": BF16 if group == 64 else FP16, "changes": formed("wgmma")}
    case = few(group=group, zeros=zeros, x_dtype=x_dtype, rows=16, **options)
    FewJob(case, 15).emulate(clusters=2, seed=group)


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("x_dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_other_halves_of_activations_and_zero_points(conversion: str, x_dtype: torch.dtype) -> None:
    """What the parametrised test above leaves out: zero points with BF16, none with FP16."""
    case = few(zeros=x_dtype == BF16, x_dtype=x_dtype, changes=changed(conversion=conversion))
    FewJob(case, 8, seed=3).emulate()


def test_iw_03_codes_at_their_zero_point_are_worth_nothing() -> None:
    case = few(zeros=True, x_dtype=FP16)
    job = FewJob(case, 2)
    quantized = case.quantized()
    middle = quantized.codes * 0 + MIDDLE
    from dataclasses import replace

    from epicute.decode import pack_few_rows

    flat = replace(quantized, codes=middle, zero=torch.full_like(quantized.zero, MIDDLE))
    job.packed = pack_few_rows(flat, case.composition)
    job.emulate()
    assert not job.outputs["out"].tensor.any()


@pytest.mark.parametrize("slices", [False, True], ids=["within", "across"])
def test_iw_10_large_sums_that_cancel(slices: bool) -> None:
    """Partial sums of ± 229376 with FP16 activations, inside of a share of k or on either side of it."""
    k = 1024 if slices else 128
    case = Few(PLAIN, 64, k, x_dtype=FP16, changes=changed(conversion="sums"))
    job = FewJob(case, 1)
    quantized = case.quantized()
    first = torch.arange(k) < k // 2
    codes = torch.where(first, 15, 1).to(torch.uint8).expand(64, -1).contiguous()
    from dataclasses import replace

    from epicute.decode import pack_few_rows

    scale = torch.ones_like(quantized.scales)
    job.packed = pack_few_rows(replace(quantized, codes=codes, scale=scale), case.composition)
    job.x.fill_(512.0)
    job.emulate()
    assert not job.outputs["out"].tensor.any()


@pytest.mark.parametrize("format", ["fp8", "bf16", "fp16"])
@pytest.mark.parametrize(("rows", "mma"), [(8, "sync"), (32, "sync"), (16, "wgmma"), (32, "wgmma")])
def test_eight_and_sixteen_bits(format: str, rows: int, mma: str) -> None:
    for x_dtype in (BF16, FP16) if format == "fp8" else ({"bf16": BF16, "fp16": FP16}[format],):
        case = few(format=format, rows=rows, x_dtype=x_dtype, changes=formed(mma))
        FewJob(case, rows - 3).emulate(clusters=2, seed=rows)


@pytest.mark.parametrize("mma", MMAS)
def test_all_fp8_codes(mma: str) -> None:
    """Every finite E4M3 number, subnormal ones too, alone in a column of K."""
    patterns = torch.arange(256, dtype=torch.uint8)
    patterns[[0x7F, 0xFF]] = 0
    for x_dtype in (BF16, FP16):
        case = Few(compose(Store(FP32)), 256, 64, "fp8", x_dtype=x_dtype, changes=formed(mma))
        codes = torch.zeros(256, 64, dtype=torch.uint8)
        codes[torch.arange(256), torch.arange(256) % 64] = patterns
        from dataclasses import replace

        from epicute.decode import pack_few_rows

        quantized = replace(case.quantized(), codes=codes.view(torch.float8_e4m3fn))
        job = FewJob(case, 1)
        job.packed = pack_few_rows(quantized, case.composition)
        job.x.fill_(1.0)
        job.emulate()


@pytest.mark.parametrize("name", chains(600))
def test_compositions(name: str) -> None:
    """One policy, both mainloops: built-in and paired, head-wide, reduced, placed; every other by a cluster, out of
    order.
    """
    seed = 1 if list(chains(600)).index(name) % 2 else None
    cluster = 1 if seed is None else 2
    rows = 16 if name in ("swiglu.fp8", "qkv.128.fp8", "residual") else 8
    case = few(name, rows=rows, changes=changed(cluster=cluster, slots=3, in_flight=2, chunks=1))
    FewJob(case, rows - 3, seed=7).emulate(clusters=2, seed=seed)


@pytest.mark.parametrize(
    ("name", "rows", "format", "cluster"),
    [
        ("residual", 64, "int4", 2),
        ("residual.fp8", 32, "fp8", 2),
        ("swiglu", 32, "int4", 1),
        ("swiglu.fp8", 16, "bf16", 1),
        ("qkv.128", 32, "int4", 2),
        ("qkv.128.fp8", 16, "fp8", 1),
        ("qkv.64.norm", 16, "int4", 2),
    ],
)
def test_compositions_on_wgmmas_sums(name: str, rows: int, format: str, cluster: int) -> None:
    """Sums stand where ``mma.sync`` leaves them, so that all that follows is the same."""
    changes = formed("wgmma", cluster=cluster, slots=3, in_flight=2, chunks=1)
    case = few(name, format=format, rows=rows, changes=changes)
    FewJob(case, rows - 3, seed=7).emulate(clusters=2, seed=rows)


@pytest.mark.parametrize(("rows", "m"), [(8, 1), (16, 1), (16, 17), (32, 33), (64, 64)])
def test_rows_by_wgmma(rows: int, m: int) -> None:
    """Fewer than the columns of an MMA, all of them, and tiles of rows."""
    case = few(rows=rows, changes=formed("wgmma"))
    FewJob(case, m).emulate(clusters=2, seed=m)


@pytest.mark.parametrize("m", [1, 8, 9, 17])
def test_rows_beyond_a_tile_are_tiles_of_their_own(m: int) -> None:
    FewJob(few("residual", rows=8), m).emulate(clusters=2, seed=m)


@pytest.mark.parametrize(("rows", "cluster"), [(16, 1), (32, 2), (64, 4), (16, 8), (64, 1)])
def test_clusters_and_rows(rows: int, cluster: int) -> None:
    case = Few(
        PLAIN,
        128,
        4200,
        rows=rows,
        mma="sync",
        changes=changed(cluster=cluster, chunks=1, slots=3, in_flight=2),
    )
    FewJob(case, rows - 1).emulate(clusters=2, seed=cluster)


@pytest.mark.parametrize("cluster", [1, 4])
@pytest.mark.parametrize("rows", [16, 64])
def test_clusters_and_rows_by_wgmma(rows: int, cluster: int) -> None:
    changes = formed("wgmma", cluster=cluster, chunks=1, slots=3, in_flight=2)
    FewJob(Few(PLAIN, 128, 2100, rows=rows, changes=changes), rows - 1).emulate(
        clusters=2, seed=cluster
    )


@pytest.mark.parametrize(
    ("mma", "format", "rows", "cluster", "wide", "sums"),
    [
        ("wgmma", "int4", 64, 1, 2, 1),
        ("wgmma", "int4", 16, 2, 4, 3),
        ("wgmma", "bf16", 32, 2, 2, 2),
        ("sync", "int4", 16, 1, 3, 2),
        ("sync", "fp8", 32, 2, 2, 1),
    ],
)
def test_tiles_that_are_held_while_x_is_read(
    mma: str, format: str, rows: int, cluster: int, wide: int, sums: int
) -> None:
    """Groups of tiles of which the last is not whole, several copies of x, sums exchanged some at a time."""
    composition, _, exact = chains(1100)["residual"]
    if format == "fp8":
        composition = dequantized(composition)
    most = {"int4": 512, "fp8": 256, "bf16": 128}[format]
    changes = formed(
        mma,
        cluster=cluster,
        chunks=1 if format == "int4" else 2,
        slots=3,
        in_flight=2,
        wide=wide,
        sums=sums,
        conversion="registers",
    )
    k = cluster * most * (1 if format == "int4" else 2) + 76
    case = Few(composition, 64 * 2 * (wide + 1) - 5, k, format, rows, exact=exact, changes=changes)
    FewJob(case, rows - 3).emulate(clusters=2, seed=rows, races=rows < 64)


@pytest.mark.parametrize(
    ("mma", "rows", "m", "k", "changes"),
    [
        ("sync", 16, 20, 1600, {"chunks": 2}),
        ("sync", 16, 13, 603, {"chunks": 2, "cluster": 2}),
        ("sync", 16, 20, 1300, {"chunks": 2, "cluster": 2}),
        ("sync", 16, 20, 2300, {"chunks": 3, "cluster": 2}),
        ("wgmma", 32, 40, 1600, {"chunks": 2}),
        ("wgmma", 32, 40, 1600, {"chunks": 2, "wide": 4, "sums": 1}),
        ("wgmma", 32, 40, 1300, {"chunks": 2, "cluster": 2, "in_flight": 3}),
        ("wgmma", 16, 20, 1600, {"chunks": 2, "wide": 3, "sums": 1, "in_flight": 3}),
        ("wgmma", 32, 40, 1600, {"chunks": 2, "wide": 4, "sums": 2}),
        ("wgmma", 16, 16, 2600, {"chunks": 2, "wide": 3, "cluster": 2}),
        ("wgmma", 64, 70, 1600, {"chunks": 3}),
        ("wgmma", 64, 64, 1100, {"chunks": 4, "cluster": 2}),
    ],
)
def test_rows_come_by_tma(mma: str, rows: int, m: int, k: int, changes: dict[str, int]) -> None:
    """Resident or in a ring, chunks of whole records or of halves, more rows than a tile has, k that ends anywhere."""
    given = {"slots": 3, "in_flight": 2, "conversion": "registers", "cluster": 1, **changes}
    n = 330 if "wide" in changes else 200
    case = Few(PLAIN, n, k, rows=rows, changes=formed(mma, **given))
    FewJob(case, m).emulate(clusters=2, seed=m, races=rows < 64)


@pytest.mark.parametrize(("wide", "chunks", "slots"), [(1, 2, 3), (2, 2, 3), (2, 4, 2)])
def test_gains_are_taken_up_where_warpgroups_have_tiles_of_their_own(
    wide: int, chunks: int, slots: int
) -> None:
    """Consumers copy x, phase by phase, and not TMA; a warpgroup passes over more records than the ring holds."""
    changes = formed("wgmma", cluster=1, chunks=chunks, slots=slots, in_flight=2, wide=wide)
    FewJob(Few(PLAIN, 200, 2600, rows=16, gain=True, changes=changes), 13).emulate(clusters=2)


@pytest.mark.parametrize("mma", MMAS)
def test_a_k_of_less_than_a_group_has_nothing_behind_it(mma: str) -> None:
    """What is beyond K counts as zero, also where x is infinite before it."""
    case = few(k=60, rows=16, changes=formed(mma))
    job = FewJob(case, 16)
    job.x[3, 7] = torch.inf
    wanted = job.sums()
    with suppress(AssertionError):  # infinities are no sums of whole numbers
        job.emulate()
    found = job.outputs["out"].tensor.double()
    rows = [row for row in range(16) if row != 3]
    assert torch.equal(found[rows], wanted[rows])
    assert not torch.isfinite(found[3]).any()


@pytest.mark.parametrize("cluster", [1, 2])
def test_nothing_that_wgmma_reads_is_unordered(cluster: int) -> None:
    """Copies of x between products, seen by the asynchronous proxy; slots given back while products still run."""
    changes = formed("wgmma", cluster=cluster, slots=3, in_flight=2, chunks=1)
    for seed in range(2):
        FewJob(few("residual", k=1600, rows=16, changes=changes), 13, seed).emulate(
            seed=seed, races=True
        )


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("flight", [1, 2, 3])
def test_nothing_in_shared_memory_is_unordered(cluster: int, flight: int) -> None:
    """A ring of three slots, several tiles, activations read again and again; the slots' hand-over above all."""
    changes = changed(cluster=cluster, slots=3, in_flight=flight, chunks=1)
    case = few("residual", k=1600, changes=changes)
    for seed in range(3):
        FewJob(case, 5, seed).emulate(seed=seed, races=True)


@pytest.mark.parametrize("name", ["qkv.128.fp8", "swiglu", "qkv.64.norm"])
def test_nothing_staged_is_unordered(name: str) -> None:
    case = few(name, rows=16, changes=changed(cluster=2))
    FewJob(case, 16).emulate(seed=11, races=True)


def test_a_gain_is_taken_up_on_the_way_in() -> None:
    for rows, chunks, mma in ((8, 2, "sync"), (16, 1, "sync"), (16, 1, "wgmma")):
        case = few(gain=True, rows=rows, changes=formed(mma, chunks=chunks))
        FewJob(case, rows).emulate(seed=2)


def test_k_that_ends_inside_of_a_vector() -> None:
    for format, x_dtype in (("int4", BF16), ("fp16", FP16), ("fp8", BF16)):
        FewJob(few(k=603, format=format, x_dtype=x_dtype), 3).emulate()
    FewJob(few(k=603, rows=16, changes=formed("wgmma")), 16).emulate()


@pytest.mark.parametrize("mma", MMAS)
def test_iw_11_a_row_has_the_same_bits_in_any_batch(mma: str) -> None:
    """Random data, sums that round: a row alone, and beside others in every bucket, with what orders sums fixed."""
    found = []
    buckets = {"sync": ((8, 1), (8, 3), (16, 16), (32, 21), (64, 64)), "wgmma": ((8, 1), (16, 3))}
    for rows, m in (*buckets[mma], (32, 32), (64, 40))[: 5 if mma == "sync" else 4]:
        changes = formed(mma, **({"cluster": 1} if mma == "wgmma" else {}))
        case = few(k=1100, rows=rows, invariant=True, changes=changes)
        job = FewJob(case, m, seed=5)
        generator = torch.Generator().manual_seed(9)
        x = torch.randn(64, case.k, generator=generator).to(BF16)
        job.x.copy_(x[:m])
        with suppress(
            AssertionError
        ):  # the sums round, so that the exact comparison does not apply
            job.emulate(clusters=2)
        found.append(job.outputs["out"].tensor[:1].clone())
        assert torch.isfinite(found[-1]).all()
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_every_instruction_is_known() -> None:
    wide = few("residual", rows=64, changes=formed("wgmma"))
    for case in (few("qkv.128"), few("swiglu.fp8", format="fp8"), few("residual", rows=64), wide):
        assert unknown(emulated(case).program) == []
