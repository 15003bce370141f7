"""Ablated attention kernels against the float64 reference: their PTX, run on the CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from benchmarks.ablations.attention import VARIANTS, AblatedKernel, ablated_kernel_for
from epicute.attention.decode_operands import Binder
from epicute.attention.decode_spec import DecodeSpec
from epicute.errors import UnsupportedError
from epicute.jit import DEFAULT_TARGET, compile
from epicute.models.decode_block_spec import chain_schedule
from tests.attention.decode_cases import Decoded, compare
from tests.attention.decode_emulated import tensor_map, workspace
from tests.ptx import Kernel, ptx_of

LENGTHS = [66, 0, 5, 131, 1]
"""A tail in a page, a row of padding, less than a tile, one key behind two tiles, and one key."""

SPECS = {
    "int4, 4:1": DecodeSpec(4, 1, 128, "int4", page=64, prefetch=True),
    "int4, 8:1, heads of 64, page 16, window": DecodeSpec(
        8, 1, 64, "int4", page=16, window=70, lse=True
    ),
    "int4, 2 rows, not rotated, softcap, no append": DecodeSpec(
        2, 2, 128, "int4", rows=2, page=32, rotation=0, append=False, softcap=15.0, lse=True
    ),
    "bf16, 8:1": DecodeSpec(8, 1, 128, page=64, lse=True),
    "bf16, 2:2, heads of 64, sinks": DecodeSpec(2, 2, 64, page=16, sinks=True, lse=True),
}

COVERING = (
    *(("int4, 4:1", variant) for variant in VARIANTS),
    ("bf16, 2:2, heads of 64, sinks", "fma-attention"),
    ("int4, 8:1, heads of 64, page 16, window", "natural-k"),
    ("int4, 2 rows, not rotated, softcap, no append", "natural-k-nibbles"),
)

CASES = [
    pytest.param(name, variant, marks=[] if (name, variant) in COVERING else pytest.mark.gates)
    for name, spec in SPECS.items()
    for variant in VARIANTS
    if spec.packed or variant == "fma-attention"
]


@cache
def described(name: str, variant: str) -> tuple[AblatedKernel, Kernel]:
    """The kernel as it is in a chain, and its code."""
    spec = SPECS[name]
    thing = ablated_kernel_for(spec, variant, target=DEFAULT_TARGET, schedule=chain_schedule(spec))
    return thing, Kernel(ptx_of(thing))


def emulate(batch: Decoded, thing: AblatedKernel, code: Kernel, ctas: int, seed: int = 0) -> None:
    """Run a batch; races are looked for, and what is touched too early."""
    spec, schedule = thing.spec, thing.schedule
    memory = workspace(spec, schedule, len(batch.lengths), ctas)
    given = {**batch.given(), "workspace": memory}
    arguments = Binder(spec, schedule).bind(batch.q, batch.cache, ctas, given)
    assert arguments is not None
    cached = [batch.cache] if spec.packed else list(batch.cache)
    early = [given["kv_lengths"], given["page_table"], *cached] if spec.prefetch else []
    code.launch(
        arguments,
        *(batch.q, *cached, memory.counters, memory.data, *batch.given().values()),
        grid=ctas,
        maps=[] if spec.packed else [tensor_map(x, spec, schedule) for x in cached],
        seed=seed,
        races=True,
        early=early,
        shared=thing.shared_memory + 1024,
    )
    assert not memory.counters.any()


@pytest.mark.compile
@pytest.mark.parametrize(("name", "variant"), CASES)
def test_kd_01_kd_04_kd_15_the_same_attention(name: str, variant: str) -> None:
    """NaN wherever no token is, scales too; bytes of appended rows are those of the library."""
    batch = Decoded.draw(SPECS[name], LENGTHS, seed=1)
    emulate(batch, *described(name, variant), ctas=3)
    compare(batch)


@pytest.mark.gates
@pytest.mark.parametrize("variant", VARIANTS)
def test_kd_03_any_number_of_ctas(variant: str) -> None:
    """Heads cut in every place, merged by whoever comes last."""
    name = "int4, 4:1"
    batch = Decoded.draw(SPECS[name], [200, 3, 70], seed=2)
    for ctas in (1, 2, 5, 9):
        emulate(batch, *described(name, variant), ctas=ctas, seed=ctas)
        compare(batch)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("group", "cache", "variant"),
    [
        *((group, "int4", name) for group in (4, 8) for name in VARIANTS),
        (4, "bf16", "fma-attention"),
    ],
)
def test_kernels_of_the_table_compile_to_code_that_may_run(
    group: int, cache: str, variant: str
) -> None:
    """No spills, shared memory that fits, registers that an SM has."""
    spec = DecodeSpec(8 * group, 8, 128, cache, page=64, prefetch=True)
    thing = ablated_kernel_for(spec, variant, target=DEFAULT_TARGET, schedule=chain_schedule(spec))
    report = compile(thing, strict=False).report
    report.check(str(spec), DEFAULT_TARGET.smem_per_block)
    assert report.registers is not None
    assert report.registers * thing.schedule.threads(spec) <= 65536
    assert report.shared_memory is not None
    assert report.shared_memory <= thing.shared_memory <= DEFAULT_TARGET.smem_per_block


def test_keys_of_variants_differ_from_each_other_and_from_the_library() -> None:
    from epicute.attention.decode_build import decode_kernel_for

    spec = SPECS["int4, 4:1"]
    plain = decode_kernel_for(spec, target=DEFAULT_TARGET)
    found = [ablated_kernel_for(spec, name, target=DEFAULT_TARGET) for name in VARIANTS]
    keys = {thing.key.digest for thing in (plain, *found)}
    assert len(keys) == 1 + len(VARIANTS)
    assert len({thing.name for thing in found}) == len(VARIANTS)


@pytest.mark.parametrize(
    ("spec", "variant"),
    [
        (SPECS["bf16, 8:1"], "natural-k"),
        (replace(SPECS["int4, 4:1"], heads=9), "fma-attention"),
        (DecodeSpec(2, 2, 128, "fp8", page=64), "fma-attention"),
        (DecodeSpec(2, 2, 96, page=64), "fma-attention"),
        (DecodeSpec(2, 2, 96, "int4", page=64, rotation=32), "natural-k-nibbles"),
    ],
)
def test_kd_08_what_has_no_variant_is_refused(spec: DecodeSpec, variant: str) -> None:
    with pytest.raises(UnsupportedError, match=r"spec|head_dim"):
        ablated_kernel_for(spec, variant, target=DEFAULT_TARGET)


@pytest.mark.compile
def test_rotation_is_undone_of_constant_rows() -> None:
    """KD-13 and KD-15 together: rows of one value, rotated, have one channel; the output is the value again."""
    name, variant = "int4, 4:1", "natural-k"
    spec = SPECS[name]
    torch.manual_seed(3)
    q = torch.randn(1, 1, spec.heads, spec.head_dim).bfloat16()
    k = [torch.randn(40, 1, spec.head_dim).bfloat16()]
    v = [torch.full((40, 1, spec.head_dim), 2.0).bfloat16()]
    batch = Decoded.of(spec, q, k, v)
    emulate(batch, *described(name, variant), ctas=1)
    compare(batch)
    assert (batch.out.tensor.float() - 2.0).abs().max() <= 2**-6
