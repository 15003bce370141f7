"""Decode attention on a GPU: against float64 on the dequantised cache, under graphs, and by laws of its own."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epicute.attention import plan_attention
from epicute.attention.decode import DecodePlan, DecodeWorkspace, plan_decode
from epicute.attention.decode_spec import DecodeSpec
from epicute.attention.spec import AttentionSpec
from epicute.errors import CompileError
from epicute.kv.append import plan_append
from epicute.kv.int4 import Int4Cache
from epicute.layouts.kv_int4 import Int4Record
from tests.attention.decode_cases import DEVICE, Decoded, compare
from tests.attention.decode_specs import FP8, SPECS, TABLED, schedule

pytestmark = pytest.mark.gpu

SEEDS = st.integers(0, 2**31)
EDGES = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257)
LENGTHS = st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 1500)), min_size=1, max_size=40)


@cache
def planned(spec: DecodeSpec) -> DecodePlan:
    return plan_decode(spec)


def run(batch: Decoded, workspace: DecodeWorkspace | None = None) -> None:
    batch.run(planned(batch.spec), workspace)
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", SPECS)
def test_kd_01_kd_03_kd_04_kd_08_kd_10_kd_11_against_float64(name: str) -> None:
    @settings(max_examples=6)
    @given(LENGTHS, SEEDS)
    def check(lengths: list[int], seed: int) -> None:
        batch = Decoded.draw(SPECS[name], lengths, seed)
        run(batch)
        compare(batch)

    check()


@pytest.mark.parametrize("name", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("mean", [0.0, 0.5])
def test_kd_16_long_contexts(name: str, mean: float) -> None:
    spec = replace(SPECS[name], page=128, heads=8, kv_heads=2)
    batch = Decoded.draw(spec, [4097, 131072, 1, 33000], 3, mean)
    run(batch)
    # A rotation gathers the mean in one channel, whose rounding to float16 all logits share: 2^-11 of some three.
    compare(batch, lse_error=1.5e-3 if spec.packed and mean else 2e-4)


def test_kd_16_one_large_value_among_many() -> None:
    """q = 0 over 131072 tokens, one value of 448 and the rest 0.5: the mean is 0.503414."""
    spec = DecodeSpec(8, 2, 128, "fp8", page=128)
    n = 131072
    v = torch.full((n, 2, 128), 0.5, device=DEVICE, dtype=torch.bfloat16)
    v[n // 3] = 448.0
    q = torch.zeros(1, 1, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    batch = Decoded.of(spec, q, [torch.zeros_like(v)], [v])
    batch.operands["v_scale"].fill_(1.0)
    run(batch)
    found = batch.out.tensor.double()
    assert ((found - 0.503414).abs() <= 2e-3 * 0.503414).all()


def test_a_million_tokens() -> None:
    spec = DecodeSpec(4, 1, 64, "int4", page=128, lse=True)
    batch = Decoded.draw(spec, [2**20, 5], 7)
    run(batch)
    compare(batch)


def test_kd_02_queries_of_zero_give_the_mean() -> None:
    spec = DecodeSpec(4, 2, 128, page=16, lse=True)
    lengths = [1, 15, 16, 17, 255, 256, 257, 1000]
    batch = Decoded.draw(spec, lengths, 5)
    batch.q.zero_()
    run(batch)
    for i, n in enumerate(lengths):
        mean = batch.v[i].double().mean(0).repeat_interleave(2, 0)
        assert (batch.out.tensor[i, 0].double() - mean).abs().max() <= 2**-8
        expected = torch.tensor(float(n), device=DEVICE).log()
        assert ((batch.lse.tensor[i] - expected).abs() <= 1e-4).all()  # type: ignore[union-attr]


@pytest.mark.parametrize("cache_format", ["bf16", "fp8", "int4"])
def test_kd_10_a_sink_counts_once(cache_format: str) -> None:
    """q = 0, a sink of 0 and three keys: three quarters of the mean, however the keys are cut."""
    rotation = {"rotation": 0} if cache_format == "int4" else {}
    for window in (None, 3):
        spec = DecodeSpec(2, 1, 128, cache_format, page=16, sinks=True, window=window, **rotation)
        lengths = [3] if window is None else [900]
        batch = Decoded.draw(spec, lengths, 6)
        batch.q.zero_()
        batch.operands["sinks"].zero_()
        run(batch)
        compare(batch)
        v = batch.v[0].double()[-3:]
        if cache_format == "fp8":
            v = v * batch.operands["v_scale"].double()[:, None]
        assert (batch.out.tensor[0, 0].double() - 0.75 * v.mean(0)).abs().max() <= 2e-2


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("heads", [(96, 8), (40, 8)])
def test_kd_09_rows_and_heads_packed_as_columns(rows: int, heads: tuple[int, int]) -> None:
    """Values tell their own index, so that a shifted mask shows at once."""
    spec = DecodeSpec(*heads, 64, page=16, rows=rows, lse=True)
    batch = Decoded.draw(spec, [1000, 17, rows], 4)
    for v in batch.raw[1]:
        v.copy_(torch.arange(len(v), device=DEVICE)[:, None, None] % 64)
    fresh = Decoded.of(spec, batch.q, *batch.raw)
    run(fresh)
    compare(fresh)


def test_kd_05_every_request_has_its_own_values() -> None:
    for rows in (1, 4):
        spec = DecodeSpec(8, 2, 128, page=32, rows=rows)
        batch = Decoded.draw(spec, [400, 37, 9, 1200], 2)
        v = [torch.full_like(x, b + 1.0) for b, x in enumerate(batch.raw[1])]
        batch = Decoded.of(spec, batch.q, batch.raw[0], v)
        run(batch)
        for b in range(4):
            assert (batch.out.tensor[b] == b + 1).all()


def test_kd_06_outputs_of_any_strides() -> None:
    spec = replace(SPECS["bf16"], lse=False)
    batch = Decoded.draw(spec, [700, 20, 129], 8)
    run(batch)
    wanted = batch.out.tensor.clone()
    for strides in ((2 * 32 * 128, 32 * 128, 128, 1), (136, 136, 3 * 136, 1)):
        size = 2 * sum((n - 1) * s for n, s in zip(wanted.shape, strides, strict=True)) + 4096
        memory = torch.full((size,), 7.0, dtype=torch.bfloat16, device=DEVICE)
        out = memory.as_strided(wanted.shape, strides, 64)
        before = memory.clone()
        plan = planned(spec)
        given = batch.given() | {"out": out}
        plan.run(batch.q, batch.cache, workspace=plan.workspace(3), **given)
        torch.cuda.synchronize()
        assert torch.equal(out, wanted)
        out.fill_(7.0)
        assert torch.equal(memory, before)


def test_contiguous_and_paged_give_the_same_bits() -> None:
    for name in ("bf16", "fp8", "int4"):
        spec = replace(SPECS[name], batch_invariant=True)
        paged = Decoded.draw(spec, [700, 64, 3], 9)
        run(paged)
        for page in (None, 16, 32, 128):
            other = Decoded.of(replace(spec, page=page), paged.q, *paged.raw)
            for scale in ("k_scale", "v_scale"):
                if scale in paged.operands:
                    other.operands[scale] = paged.operands[scale]
            run(other)
            assert torch.equal(paged.out.tensor, other.out.tensor), (name, page)


@pytest.mark.parametrize("name", ["bf16", "fp8", "int4"])
def test_kd_17_a_row_does_not_see_its_batch(name: str) -> None:
    spec = replace(SPECS[name], batch_invariant=True)
    lengths = [777, 4097, 0, 63] * 16
    batch = Decoded.draw(spec, lengths, 12)
    run(batch)
    for rows in (slice(1), slice(1, 3), slice(0, 7), slice(3, 36)):
        some = batch.some(rows, seed=5)
        run(some)
        assert torch.equal(batch.out.tensor[rows], some.out.tensor)
    plain = Decoded.of(replace(spec, batch_invariant=False), batch.q, *batch.raw)
    for scale in ("k_scale", "v_scale"):
        if scale in batch.operands:
            plain.operands[scale] = batch.operands[scale]
    run(plain)
    error = (plain.out.tensor.double() - batch.out.tensor.double()).norm()
    assert error <= 4e-3 * batch.out.tensor.double().norm()


@pytest.mark.parametrize("name", ["bf16", "fp8", "int4"])
def test_cg_04_captured_short_replayed_long_and_back(name: str) -> None:
    spec = SPECS[name]
    lengths = [32768, 129, 4097, 2]
    batch = Decoded.draw(spec, lengths, 13)
    plan = planned(spec)
    workspace = plan.workspace(4)
    full = batch.operands["kv_lengths"].clone()
    batch.operands["kv_lengths"].fill_(1)
    batch.run(plan, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.run(plan, workspace)
    if spec.packed:
        # Runs with a length of 1 wrote their new row to slot 0.
        fresh = Decoded.draw(spec, lengths, 13)
        batch.cache.copy_(fresh.cache)
        batch.operands["page_table"].copy_(fresh.operands["page_table"])
    batch.operands["kv_lengths"].copy_(full)
    graph.replay()
    torch.cuda.synchronize()
    compare(batch)
    long = batch.out.tensor.clone()
    batch.operands["kv_lengths"].zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert (batch.out.tensor == 0).all()
    batch.operands["kv_lengths"].copy_(full)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(batch.out.tensor, long)


def test_cg_01_cg_07_streams() -> None:
    """Warmed up on one stream, captured on torch's own, replayed on a third; inputs changed in place are seen."""
    spec = SPECS["bf16"]
    batch = Decoded.draw(spec, [500, 70], 14)
    plan = planned(spec)
    workspace = plan.workspace(2)
    # A stream of torch's waits for no other one.
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        batch.run(plan, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.run(plan, workspace)
    batch.q.mul_(-1)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.replay()
    torch.cuda.synchronize()
    compare(batch)


def test_cg_02_planning_inside_a_capture_is_refused_and_leaves_it_clean() -> None:
    spec = SPECS["bf16"]
    batch = Decoded.draw(spec, [500, 70], 23)
    plan = planned(spec)
    workspace = plan.workspace(2)
    cold = replace(spec, scale=0.123, lse=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(CompileError, match="capture"):
            plan_decode(cold)
        batch.run(plan, workspace)
    graph.replay()
    torch.cuda.synchronize()
    compare(batch)


def test_cg_08_a_graph_outlives_what_python_dropped() -> None:
    spec = SPECS["bf16"]
    batch = Decoded.draw(spec, [500, 70], 15)
    plan = planned(spec)
    workspace = plan.workspace(2)
    graph = torch.cuda.CUDAGraph()
    batch.run(plan, workspace)
    with torch.cuda.graph(graph):
        batch.run(plan, workspace)
    gc.collect()
    torch.cuda.empty_cache()
    filler = torch.full((2**28,), float("nan"), device=DEVICE)
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    compare(batch)
    del filler


def test_ten_thousand_replays_with_changing_lengths() -> None:
    """Every replay of a length gives the bits of its first one, and counters are zero in between."""
    spec = replace(SPECS["fp8"], lse=False)
    batch = Decoded.draw(spec, [900, 5, 300], 16)
    plan = planned(spec)
    workspace = plan.workspace(3)
    batch.run(plan, workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            batch.run(plan, workspace)
    wanted = {}
    for turn in range(100):
        some = (900 - 8 * (turn % 10), 5 - turn % 5, 300 - turn % 10)
        batch.operands["kv_lengths"].copy_(torch.tensor(some, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        found = wanted.setdefault(some, batch.out.tensor.clone())
        assert torch.equal(batch.out.tensor, found)
    assert not workspace.counters.any()


def test_dependent_launches_in_a_row() -> None:
    """Layers share a workspace, and each reads what the one before wrote: 64 launches are one after another."""
    spec = replace(SPECS["bf16"], lse=False)
    batch = Decoded.draw(spec, [3000, 17], 17)
    plan = planned(spec)
    workspace = plan.workspace(2)
    chained = []
    for _ in range(2):
        x = batch.q.clone()
        for _ in range(64):
            given = batch.given() | {"out": x}
            plan.run(x, batch.cache, workspace=workspace, **given)
        torch.cuda.synchronize()
        chained.append(x)
    slow = batch.q.clone()
    for _ in range(64):
        plan.run(slow, batch.cache, workspace=workspace, **(batch.given() | {"out": slow}))
        torch.cuda.synchronize()
    assert torch.equal(chained[0], chained[1])
    assert torch.equal(chained[0], slow)


def test_kv_14_pages_behind_two_to_the_31() -> None:
    for kind in ("bf16", "int4"):
        spec = DecodeSpec(8, 8, 128, kind, page=128, append=False)
        if kind == "bf16":
            pages = 2**31 // (128 * 8 * 128) + 5
            pools = [torch.empty(pages, 128, 8, 128, dtype=torch.bfloat16, device=DEVICE)] * 2
            pools[0][-3:].normal_()
            cached: object = tuple(pools)
            k = torch.cat([pools[0][-2], pools[0][-3, :50]])
            v = k
        else:
            record = Int4Record(128, 128)
            pages = 2**31 // (8 * record.bytes) + 5
            form = Int4Cache(pages, 8, record, 128)
            cached = torch.empty(pages, 8, record.bytes, dtype=torch.uint8, device=DEVICE)
            rows = torch.randn(178, 8, 128, device=DEVICE)
            slots = torch.cat(
                [torch.arange(128) + (pages - 2) * 128, torch.arange(50) + (pages - 3) * 128]
            )
            form.write(cached, rows, rows, slots.to(DEVICE))
            k, v = form.read(cached, slots.to(DEVICE))
        q = torch.randn(1, 1, 8, 128, dtype=torch.bfloat16, device=DEVICE)
        out = torch.empty_like(q)
        plan = planned(spec)
        plan.run(
            q,
            cached,
            out=out,
            kv_lengths=torch.tensor([178], dtype=torch.int32, device=DEVICE),
            page_table=torch.tensor([[pages - 2, pages - 3]], dtype=torch.int32, device=DEVICE),
            workspace=plan.workspace(1),
        )
        torch.cuda.synchronize()
        small = Decoded.draw(spec, [178], 1)
        small.q, small.k, small.v = q, [k], [v]
        wanted, _ = small.wanted(0)
        assert (out[0].double() - wanted).norm() <= 4e-3 * wanted.norm(), kind


def test_new_rows_are_the_cpu_quantisers_bit_for_bit() -> None:
    """Rows of ordinary and extreme values, at every place of a page, rotated in blocks of any width."""
    for rotation, page, rows in ((128, 16, 1), (0, 64, 2), (16, 128, 8), (128, None, 1)):
        spec = DecodeSpec(8, 4, 128, "int4", page=page, rows=rows, rotation=rotation)
        lengths = [1, 2, 8, 15, 16, 17, 100, 127, 128, 129, 130, 1000]
        torch.manual_seed(rotation)
        k, v = (
            [
                (
                    torch.randn(n, 4, 128, device=DEVICE) * 10 ** float(torch.randint(-6, 5, ()))
                ).bfloat16()
                for n in lengths
            ]
            for _ in range(2)
        )
        k[3][-1, 0], v[4][-1, 1], k[5][-1] = 0.0, 3e4, 3.0
        q = torch.randn(len(lengths), rows, 8, 128, device=DEVICE).bfloat16()
        batch = Decoded.of(spec, q, k, v)
        host = Int4Cache(
            batch.cache.shape[0],
            4,
            Int4Record(page or batch.cache.shape[2] // 136, 128),
            rotation,
        )
        wanted = batch.cache.cpu()
        size = page or host.record.page_size
        for b, n in enumerate(lengths):
            first = max(n - rows, 0)
            slots = batch.slots(b, size, first, n).cpu()
            host.write(wanted, k[b][first:].cpu(), v[b][first:].cpu(), slots)
        run(batch)
        assert torch.equal(batch.cache.cpu(), wanted)


def test_kd_15_rotation_leaves_exact_attention_as_it_is() -> None:
    """Values with one large channel each: whatever the blocks, the error stays the format's own."""
    torch.manual_seed(3)
    n, exact = 1000, DecodeSpec(8, 2, 128, page=16, lse=True)
    k, v = (torch.randn(n, 2, 128, device=DEVICE).bfloat16() for _ in range(2))
    v[torch.arange(n), 0, torch.arange(n, device=DEVICE) % 128] += 4.0
    q = torch.randn(1, 1, 8, 128, device=DEVICE).bfloat16()
    plain = Decoded.of(exact, q, [k], [v])
    run(plain)
    reference, _ = plain.wanted(0)
    for rotation in (0, 16, 128):
        spec = DecodeSpec(8, 2, 128, "int4", page=16, rotation=rotation)
        batch = Decoded.of(spec, q, [k], [v])
        run(batch)
        compare(batch)
        error = (batch.out.tensor[0].double() - reference).norm() / reference.norm()
        assert error < 0.5, (rotation, float(error))


def test_outlier_channels_need_the_rotation() -> None:
    """Paper, table 9: four channels of K eight times as large; the rotation takes most of the error away."""
    torch.manual_seed(4)
    n = 1024
    k, v = (torch.randn(n, 8, 128, device=DEVICE).bfloat16() for _ in range(2))
    k[:, :, :4] *= 8
    q = torch.randn(1, 1, 32, 128, device=DEVICE).bfloat16()
    exact = Decoded.of(DecodeSpec(32, 8, 128, page=64), q, [k], [v])
    reference, _ = exact.wanted(0)
    errors = {}
    for rotation in (0, 128):
        spec = DecodeSpec(32, 8, 128, "int4", page=64, rotation=rotation)
        batch = Decoded.of(spec, q, [k], [v])
        run(batch)
        errors[rotation] = float(
            (batch.out.tensor[0].double() - reference).norm() / reference.norm()
        )
    assert errors[128] < 0.6 * errors[0], errors


def test_the_table_reads_the_same_cache() -> None:
    batch = Decoded.draw(TABLED, [700, 0, 33], 18)
    plan = plan_decode(TABLED, schedule=schedule(TABLED, unpack="table"))
    batch.run(plan)
    torch.cuda.synchronize()
    compare(batch)
    other = Decoded.of(TABLED, batch.q, *batch.raw)
    run(other)
    error = (batch.out.tensor.double() - other.out.tensor.double()).norm()
    assert error <= 4e-3 * other.out.tensor.double().norm()


def test_a_row_appended_by_a_kernel_of_its_own_is_the_same_row() -> None:
    spec = SPECS["int4"]
    chained = Decoded.draw(spec, [100, 17, 1], 19)
    run(chained)
    compare(chained)
    apart = Decoded.draw(spec, [100, 17, 1], 19)
    kind = Int4Cache(apart.cache.shape[0], 8, Int4Record(64, 128), 128)
    slots = torch.cat([apart.slots(b, 64, n - 1, n) for b, n in enumerate(apart.lengths)])
    rows = [apart.operands.pop(name)[:, 0] for name in ("new_k", "new_v")]
    plan_append(kind).run(apart.cache, *rows, slots)
    torch.cuda.synchronize()
    assert torch.equal(apart.cache, chained.cache)
    apart.spec = replace(spec, append=False)
    run(apart)
    assert torch.equal(apart.out.tensor, chained.out.tensor)


def test_amax_and_counters_of_a_float8_output() -> None:
    spec = replace(SPECS["bf16"], out_dtype=FP8, lse=False)
    batch = Decoded.draw(spec, [300, 0, 70], 20)
    batch.operands["out_scale"].fill_(2e-4)
    precise = Decoded.of(replace(spec, out_dtype=torch.bfloat16), batch.q, *batch.raw)
    run(batch)
    run(precise)
    x = precise.out.tensor.float().abs()
    amax = float(batch.operands["amax"])
    assert abs(amax - float(x.max())) <= 2**-8 * amax
    saturated = int(batch.operands["saturated"])
    limit = 448 * 2e-4
    assert int((x > limit * 1.01).sum()) <= saturated <= int((x > limit * 0.99).sum())
    assert saturated > 0
    assert int(batch.operands["nans"]) == 0


def test_decode_agrees_with_prefill_of_one_token() -> None:
    spec = SPECS["bf16"]
    batch = Decoded.draw(spec, [300, 64, 1], 21)
    run(batch)
    prefill = plan_attention(AttentionSpec(32, 8, 128, page=64))
    out = torch.empty(3, 32, 128, dtype=torch.bfloat16, device=DEVICE)
    prefill.run(
        batch.q[:, 0],
        *batch.cache,
        out=out,
        q_starts=torch.arange(4, dtype=torch.int32, device=DEVICE),
        kv_lengths=batch.operands["kv_lengths"],
        page_table=batch.operands["page_table"],
    )
    torch.cuda.synchronize()
    error = (out.double() - batch.out.tensor[:, 0].double()).norm()
    assert error <= 4e-3 * out.double().norm()


def test_cg_05_cg_06_a_large_padded_batch_in_a_poisoned_workspace() -> None:
    for name in ("bf16", "int4"):
        spec = replace(SPECS[name], batch_invariant=True, lse=False)
        lengths = [(37 * i) % 900 + 1 for i in range(100)] + [0] * 12
        padded = Decoded.draw(spec, lengths, 22)
        live = padded.some(slice(100), seed=22)
        padded.q[100:] = float("nan")
        padded.operands["page_table"][100:] = -1
        plan = planned(spec)
        workspace = plan.workspace(112)
        workspace.data.view(torch.uint8).fill_(0xFF)
        run(padded, workspace)
        run(live)
        assert torch.equal(padded.out.tensor[:100], live.out.tensor)
        assert (padded.out.tensor[100:] == 0).all()
        if padded.wanted_cache is not None:
            assert torch.equal(padded.cache, padded.wanted_cache)
