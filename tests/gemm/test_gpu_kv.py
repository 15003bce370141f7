"""RoPE, head norm and KV placement in the kernel: KV-01 to KV-18 of the field failures."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from epicute.epilogues import Bias, Columns, HeadNorm, PlaceKV, Policy, RoPE, Store, compose
from epicute.epilogues import reference as ref
from epicute.testing import assert_equal_bits
from tests.gemm.compositions import BF16, FP8, FP32, Case
from tests.gemm.device import DEVICE, POISON, Output, bits, embed, embed_rows, normal
from tests.gemm.jobs import PAGE_SIZE, Job, assert_near, pack

pytestmark = pytest.mark.gpu


def heads_case(name: str, dim: int, turn: Policy, q: int = 2, kv: int = 1) -> Case:
    """``q`` query heads and ``kv`` of k and v; K is one head, so that the weight can repeat x for each."""
    ranges = Columns(
        q=(q * dim, turn >> Store(BF16)),
        k=(kv * dim, turn >> PlaceKV(dim)),
        v=(kv * dim, PlaceKV(dim)),
    )
    return Case(name, compose(ranges), (q + 2 * kv) * dim, dim, BF16)


PARTIAL = {dim: heads_case(f"kv01-{dim}", dim, RoPE(dim, 64)) for dim in (128, 256)}
MANY = {r: heads_case(f"kv02-{r}", 128, RoPE(128, r), 16, 4) for r in (64, 128)}
STYLED = {s: heads_case(f"kv03-{s}", 64, RoPE(64, style=s)) for s in ("half", "interleaved")}
LONG = {s: Case(f"kv07-{s}", RoPE(128, style=s) >> Store(BF16), 128, 128, BF16) for s in STYLED}
SCALED = Case("kv05", RoPE(64, magnitude=1.4852) >> Store(BF16), 128, 64, BF16)
NARROW = Case("kv08", MANY[64].composition, 3072, 128, BF16, dtypes=(("positions", torch.int32),))
RETURNED = {
    style: Case(
        f"kv09-{style}",
        compose(
            Columns(
                q=(32 * 128, RoPE(128, 64, style) >> Store(BF16)),
                k=(4 * 128, RoPE(128, 64, style) >> Store(BF16) >> PlaceKV(128)),
                v=(4 * 128, Store(BF16) >> PlaceKV(128)),
            )
        ),
        40 * 128,
        576,
        BF16,
    )
    for style in STYLED
}
PLACED = {
    name: Case(f"place-{name}", compose(both), 384, 64, BF16, exact=True)
    for name, both in {
        "bf16": Columns(k=(192, PlaceKV(64)), v=(192, PlaceKV(64))),
        "fp8": Columns(k=(192, PlaceKV(64, FP8)), v=(192, PlaceKV(64, FP8))),
    }.items()
}
UNALIGNED = Case(
    "place-unaligned",
    PLACED["bf16"].composition,
    384,
    64,
    BF16,
    exact=True,
    alignments=(("k_cells", 8), ("v_cells", 8)),
)
POOL = {
    "bf16": Case("kv14-bf16", compose(PlaceKV(128)), 1024, 128, BF16),
    "fp8": Case("kv14-fp8", compose(PlaceKV(128, FP8)), 1024, 128, BF16),
}
NORMED = Case("kv17", Bias() >> HeadNorm(128) >> RoPE(128) >> Store(FP32), 512, 128, BF16)
CASES = [
    *PARTIAL.values(),
    *MANY.values(),
    *STYLED.values(),
    *LONG.values(),
    *RETURNED.values(),
    *PLACED.values(),
    *POOL.values(),
    *(SCALED, NARROW, UNALIGNED, NORMED),
]


def repeated(case: Case, x: torch.Tensor) -> Job:
    """A job whose every head's accumulators are x (rows, K), exactly; slots are 0, 1, 2, …"""
    count = case.n // case.k
    job = Job(case, len(x), packed=pack(case, torch.eye(case.k).repeat(count, 1)))
    job.x = embed_rows(x.to(DEVICE).to(case.dtype))
    if "slots" in job.operands:
        job.operands["slots"].copy_(torch.arange(len(x)))
    return job


def by_head(found: dict[str, torch.Tensor], name: str, rows: int, dim: int) -> torch.Tensor:
    """(rows, heads, head_dim) of an output, or of cells in the order of their slots."""
    value = found[name]
    if value.dim() == 4:
        return value.reshape(-1, *value.shape[2:])[:rows]
    return value.reshape(rows, -1, dim)


def frequencies(rotary: int, base: float) -> torch.Tensor:
    """(rotary / 2,) float32."""
    return (base ** -(torch.arange(rotary // 2).double() / (rotary // 2))).float()


@pytest.mark.parametrize("dim", PARTIAL)
def test_kv_01_channels_beyond_the_rotary_ones_pass_bit_for_bit(dim: int) -> None:
    x = normal(3, dim, dtype=BF16, seed=1)
    job = repeated(PARTIAL[dim], x)
    positions = torch.tensor([0, 1, 2047])
    job.operands["positions"] = embed(positions)
    job.operands["inv_freq"] = embed(frequencies(64, 1e4))  # NaN behind it
    found = job.run()
    wanted = ref.rope(x, positions, frequencies(64, 1e4), dim, 64)
    for name in ("q_out", "k_cells", "v_cells"):
        heads = by_head(found, name, 3, dim)
        assert torch.isfinite(heads).all()
        for h in range(heads.shape[1]):
            start = 0 if name == "v_cells" else 64
            assert_equal_bits(heads[:, h, start:].contiguous(), x[:, start:].contiguous(), name)
            if name != "v_cells":
                assert_near(name, heads[:, h].cpu(), wanted.to(BF16))


@pytest.mark.parametrize("rotary", MANY)
@pytest.mark.parametrize("tokens", [1, 7, 512, 4096, 16384])
def test_kv_02_equal_heads_stay_equal(rotary: int, tokens: int) -> None:
    x = normal(tokens, 128, dtype=BF16, seed=tokens)
    job = repeated(MANY[rotary], x)
    found = job.run()
    some = torch.arange(tokens)[:: max(1, tokens // 64)]
    given = {name: job.operands[name].cpu() for name in ("positions", "inv_freq")}
    wanted = ref.rope(x[some], given["positions"][some], given["inv_freq"], 128, rotary).to(BF16)
    for name in ("q_out", "k_cells"):
        heads = by_head(found, name, tokens, 128)
        assert_equal_bits(heads.contiguous(), heads[:, :1].expand_as(heads).contiguous(), name)
        assert_near(name, heads[some, 0].cpu(), wanted)


@pytest.mark.parametrize("style", STYLED)
def test_kv_03_pairs_are_those_of_the_style(style: str) -> None:
    job = repeated(STYLED[style], torch.eye(64)[:1])
    job.operands["positions"].fill_(1)
    job.operands["inv_freq"][0] = 1.0
    found = job.run()
    wanted = torch.zeros(64)
    wanted[0], wanted[32 if style == "half" else 1] = math.cos(1), math.sin(1)
    for name in ("q_out", "k_cells"):
        for head in by_head(found, name, 1, 64)[0]:
            assert torch.equal(head.cpu(), wanted.to(BF16)), name
    assert torch.equal(by_head(found, "v_cells", 1, 64)[0, 0].cpu().float(), torch.eye(64)[0])


def test_kv_05_the_magnitude_is_applied_once() -> None:
    x = normal(17, 64, dtype=BF16, seed=2)
    job = repeated(SCALED, x)
    job.operands["positions"].zero_()
    wanted = (x.float() * 1.4852).to(BF16).repeat(1, 2)
    assert_equal_bits(job.run()["out"].contiguous(), wanted)


@pytest.mark.parametrize("style", LONG)
def test_kv_07_long_positions_keep_their_precision(style: str) -> None:
    """Unit vectors, base 1e6: within a BF16 unit in the last place of float64, or 2e-6 where a result is all but 0."""
    x = torch.eye(128).repeat(3, 1)
    job = repeated(LONG[style], x)
    positions = torch.tensor([4095, 32767, 131071]).repeat_interleave(128)
    job.operands["positions"] = embed(positions)
    job.operands["inv_freq"] = embed(frequencies(128, 1e6))
    for _ in range(2):
        found = job.run()["out"].cpu()
        wanted = ref.rope(x, positions, frequencies(128, 1e6), 128, None, style)
        assert_near("out", found, wanted.to(BF16))


def test_kv_08_positions_of_both_widths_are_the_same() -> None:
    """And a position before 0 is an angle like any other: there is no table to leave."""
    x = normal(65, 128, dtype=BF16, seed=3)
    wide, narrow = repeated(MANY[64], x), repeated(NARROW, x)
    positions = torch.randint(-2000, 200000, (65,))
    wide.operands["positions"] = embed(positions)
    narrow.operands["positions"] = embed(positions.int())
    one, two = wide.run(), narrow.run()
    for name, value in one.items():
        assert_equal_bits(value.contiguous(), two[name].contiguous(), name)


@pytest.mark.parametrize("style", RETURNED)
def test_kv_09_what_is_returned_is_what_is_cached(style: str) -> None:
    job = Job(RETURNED[style], 22)
    job.operands["slots"].copy_(torch.arange(22))
    found = job.check()
    for name in "kv":
        cached = by_head(found, f"{name}_cells", 22, 128)
        assert_equal_bits(cached.reshape(22, -1), found[f"{name}_out"].contiguous(), name)


@pytest.mark.parametrize("cells", PLACED)
def test_kv_10_rows_without_a_slot_are_written_nowhere(cells: str) -> None:
    job = Job(PLACED[cells], 128)
    capacity = job.outputs["k_cells"].shape[0] * PAGE_SIZE
    slots = torch.randperm(capacity - PAGE_SIZE)[:128]
    slots[::2] = -1
    nowhere = [capacity, capacity + 5, 2**40 + 17, 2**32, -(2**31), -(2**40), 2**63 - 1, -(2**63)]
    slots[1 : 2 * len(nowhere) : 2] = torch.tensor(nowhere)
    job.operands["slots"] = embed(slots)
    job.check()
    for name in ("k_cells", "v_cells"):
        unwritten = job.outputs[name].unwritten().all(-1).all(-1)
        assert int((~unwritten).sum()) == 64 - len(nowhere)
        assert unwritten[-1].all()


def pool(layout: str, pages: int, heads: int, dim: int) -> tuple[torch.Tensor, ...]:
    """(all memory as int16, K view, V view) of one of the layouts of ``epicute.kv``."""
    shapes = {
        "nhd": (2, pages, PAGE_SIZE, heads, dim),
        "hnd": (2, pages, heads, PAGE_SIZE, dim),
        "paired": (pages, 2, PAGE_SIZE, heads, dim),
        "packed": (pages, heads, PAGE_SIZE, 2 * dim),
        "unaligned": (2, pages, PAGE_SIZE, heads, dim + 4),
    }
    memory = torch.full(shapes[layout], POISON[2], dtype=torch.int16, device=DEVICE)
    cache = memory.view(BF16)
    views: dict[str, Callable[[], tuple[torch.Tensor, ...]]] = {
        "nhd": lambda: cache.unbind(0),
        "hnd": lambda: cache.transpose(2, 3).unbind(0),
        "paired": lambda: cache.unbind(1),
        "packed": lambda: cache.transpose(1, 2).chunk(2, dim=-1),
        "unaligned": lambda: cache[..., :dim].unbind(0),
    }
    return (memory, *views[layout]())


@pytest.mark.parametrize("layout", ["nhd", "hnd", "paired", "packed", "unaligned"])
def test_kv_12_any_strides(layout: str) -> None:
    case = UNALIGNED if layout == "unaligned" else PLACED["bf16"]
    job = Job(case, 37)
    memory, *views = pool(layout, 5, 3, 64)
    untouched = memory.clone()
    for name, view in zip(("k_cells", "v_cells"), views, strict=True):
        job.outputs[name].tensor = view
    wanted = job.expected()
    job.run()
    places = zip(views, (wanted["k_cells"], wanted["v_cells"]), strict=True)
    for view, value in places:
        assert_equal_bits(view.cpu().contiguous(), value.contiguous(), layout)
        view.view(torch.int16).fill_(POISON[2])
    assert torch.equal(memory, untouched), "elements that belong to neither view were written"


def test_kv_13_tokens_of_one_call_do_not_meet() -> None:
    together = Job(PLACED["fp8"], 37)
    together.operands["slots"] = embed(torch.randperm(64)[:37])
    found = {name: value.clone() for name, value in together.run().items() if "cells" in name}
    one = Job(PLACED["fp8"], 1)
    for name, output in together.outputs.items():
        one.outputs[name] = Output(output.shape, output.tensor.dtype, name=name)
    shared = {n: x for n, x in together.operands.items() if n != "slots"}
    for row in range(37):
        one.x = together.x[row : row + 1]
        one.operands = {**shared, "slots": together.operands["slots"][row : row + 1]}
        one.run()
    for name in ("k_cells", "v_cells"):
        assert_equal_bits(one.outputs[name].tensor, found[name], name)


@pytest.mark.parametrize("cells", POOL)
def test_kv_14_pages_beyond_32_bits(cells: str) -> None:
    """Pages at 2^31 - 2^14, 2^31 and 2^32 elements; 4 and 8 GiB of cells."""
    pages = (131071, 131072, 262144)
    x = normal(48, 128, dtype=BF16, seed=14)
    job = repeated(POOL[cells], x)
    slots = torch.cat([page * PAGE_SIZE + torch.arange(16) for page in pages])
    job.operands["slots"] = embed(slots)
    if cells == "fp8":
        job.operands["cell_scale"].fill_(1.0)
    dtype = FP8 if cells == "fp8" else BF16
    job.outputs["cells"] = Output((max(pages) + 1, PAGE_SIZE, 8, 128), dtype, name="cells")
    found = job.run()["cells"]
    wanted = x.to(dtype)[:, None].expand(48, 8, 128)
    for i, page in enumerate(pages):
        rows = wanted[16 * i : 16 * i + 16].contiguous()
        assert_equal_bits(found[page], rows, f"page {page}")
        found[page].view(job.outputs["cells"]._integer).fill_(POISON[dtype.itemsize])
    for some in bits(found).split(32768):
        assert bool((some == POISON[dtype.itemsize]).all()), "a stray page was written"


def test_kv_17_the_norm_comes_before_the_rotation() -> None:
    x = normal(17, 128, dtype=BF16, seed=17)
    job = repeated(NORMED, x)
    gain = 1 + torch.arange(128) / 128
    job.operands["positions"].fill_(5)
    job.operands["head_gain"] = embed(gain)
    given = {name: v.cpu() for name, v in job.operands.items()}
    biased = ref.bias(x.repeat(1, 4), given["bias"])
    turn = (given["positions"], given["inv_freq"], 128)
    wanted = ref.rope(ref.head_norm(biased, gain, 128, 1e-6), *turn)
    swapped = ref.head_norm(ref.rope(biased, *turn), gain, 128, 1e-6)
    got = job.run()["out"].double().cpu()
    assert float((got - wanted).norm() / wanted.norm()) < 1e-5
    assert float((got - swapped).norm() / wanted.norm()) > 0.1


def test_kv_18_chunks_give_the_cache_of_one_call() -> None:
    case = STYLED["half"]
    prompt = normal(300, 64, dtype=BF16, seed=18)

    def cache(*chunks: int) -> dict[str, torch.Tensor]:
        whole = repeated(case, prompt)
        start = 0
        for rows in chunks:
            part = repeated(case, prompt[start : start + rows])
            part.operands["positions"] = embed(torch.arange(start, start + rows))
            part.operands["slots"] = embed(torch.arange(start, start + rows))
            for name in ("k_cells", "v_cells"):
                part.outputs[name] = whole.outputs[name]
            part.run()
            start += rows
        return {name: whole.outputs[name].tensor for name in ("k_cells", "v_cells")}

    once = cache(300)
    for chunks in ((37,) * 8 + (4,), (299, 1), (128, 172)):
        for name, cells in cache(*chunks).items():
            assert_equal_bits(cells, once[name], f"{name} in chunks {chunks}")
