"""Table ``qk4pv8-prefill``: causal prefill attention over NVFP4 keys and FP8 values, beside BF16.

All variants and all peers of a case are timed in one session; every variant is a row of its own. Ours reads pages of
128 tokens (FP8/FP8 too), peers read dense keys and values. Quantising q is part of our kernel, writing the cache part
of none. The error of a row is against float64 on the values before quantisation: the format's, not the kernel's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import epicute.attention.mixed_plan
from benchmarks import attention
from benchmarks.attention import TOKENS, Attention
from benchmarks.check import Error, checker
from benchmarks.floors import BANDWIDTH, PEAK
from benchmarks.harness import Options, Session, fill
from benchmarks.ours import once
from benchmarks.provenance import Provenance
from benchmarks.table import Row, Table
from benchmarks.timing import Run, Timer
from benchmarks.work import attention_flops
from epicute.attention.mixed import MixedSpec, mixed_kernel_for
from epicute.kv.qk4pv8 import QK4PV8Cache
from epicute.quant.fp8 import cast_e4m3
from epicute.quant.smoothing import Means

__all__ = ["PAPER", "VARIANTS", "Mixed", "cases", "kernels", "measure", "table"]

PAPER = "MpFA, sections 4, 5 and 7.2: prefill attention over an NVFP4/FP8 cache, here on Hopper"

FLOOR = (
    "the larger of 4·S²·head_dim·heads/2, summed over requests of S tokens, half of it over the dense tensor peak of "
    "the type that queries and keys are multiplied in and half over that of FP8 (BF16 and FP16 989.5 TFLOP/s, FP8 1979 "
    "TFLOP/s, nominal at boost clocks), and of the bytes of q, the cache and the result over 4.8 TB/s"
)

HEADS = ((32, 8), (40, 8))
HEAD_DIM, PAGE = 128, 128
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
TERMS = 2
"""BF16 terms of ΔS where keys are smoothed."""

VARIANTS: tuple[dict[str, Any], ...] = (
    {"qk": "exact16", "pv": "two_level", "smoothing": "none"},
    {"qk": "exact16", "pv": "two_level", "smoothing": "static"},
    {"qk": "exact16", "pv": "direct", "smoothing": "none"},
    {"qk": "fast8", "pv": "two_level", "smoothing": "none"},
    {"qk": "fast8", "pv": "two_level", "smoothing": "static"},
    {"qk": "fast8", "pv": "direct", "smoothing": "none"},
    {"cache": "fp8", "pv": "two_level"},
    {"cache": "fp8", "pv": "direct"},
)
"""Fields of the rows of a case; a cache that is not named is ``qk4pv8``."""

ALLOWED = Error(0.25, 0.6)
"""NVFP4 keys leave 0.12 of normal data's output, FP8 alone 0.04; direct sums lose some percent more at 128 K."""


@dataclass
class Mixed(Attention):
    """Causal self-attention over requests of equal length whose keys and values are quantised into pages."""

    memories: dict[str, list[tuple[Tensor, ...]]] = field(default_factory=dict)

    @cached_property
    def table(self) -> Tensor:
        """(requests, pages) int32, at random in the pool."""
        batch, pages = len(self.lengths), -(-self.lengths[0] // PAGE)
        made = torch.randperm(batch * pages, generator=self.random, device=self.options.device)
        return made.view(batch, pages).to(torch.int32)

    @cached_property
    def slots(self) -> Tensor:
        """(tokens,) int64 slot of every row."""
        token = torch.arange(self.lengths[0], device=self.options.device)
        pages = self.table[:, token // PAGE].to(torch.int64)
        return (pages * PAGE + token % PAGE).flatten()

    @cached_property
    def means(self) -> Means:
        """Of all tokens, as calibration would find them."""
        return Means(
            "static",
            *(x[0].float().mean(dim=0, keepdim=True) for x in (self.q, self.k)),
        )

    @cached_property
    def kv_lengths(self) -> Tensor:
        """(requests,) int32."""
        return torch.tensor(self.lengths, dtype=torch.int32, device=self.options.device)

    def spec(self, variant: dict[str, Any]) -> MixedSpec:
        """What a variant is compiled for."""
        recorded = variant.get("cache") != "fp8"
        fields = {"precision": "nvfp4/fp8" if recorded else "fp8/fp8", "pv": variant["pv"]}
        if recorded:
            fields["qk"] = variant["qk"]
        terms = TERMS if variant.get("smoothing") == "static" else 0
        return MixedSpec(self.heads, self.kv_heads, self.head_dim, page=PAGE, terms=terms, **fields)

    def memory(self, spec: MixedSpec) -> list[tuple[Tensor, ...]]:
        """The cache of a spec, one per copy."""
        name = f"{spec.precision} {spec.qk} {spec.terms}"
        if name not in self.memories:
            made = self._records(spec) if spec.recorded else self._rows()
            rest = [tuple(x.clone() for x in made) for _ in range(self.copies - 1)]
            self.memories[name] = [made, *rest]
        return self.memories[name]

    def _records(self, spec: MixedSpec) -> tuple[Tensor, ...]:
        pages = self.table.numel()
        cache = QK4PV8Cache(pages, self.kv_heads, self.heads, spec.record, spec.terms)
        memory = cache.allocate(self.options.device)
        for first in range(0, self.tokens, 16384):
            some = slice(first, first + 16384)
            means = self.means if spec.terms else None
            rows = cache.quantize(self.k[0][some], self.v[0][some], means)
            cache.place(memory, rows, self.slots[some])
        return tuple(x for x in memory if x is not None)

    def _rows(self) -> tuple[Tensor, ...]:
        shape = (self.table.numel() * PAGE, self.kv_heads, self.head_dim)
        found = []
        for x in (self.k[0], self.v[0]):
            pool = torch.zeros(shape, dtype=torch.uint8, device=x.device)
            pool[self.slots] = cast_e4m3(x.float()).view(torch.uint8)
            found.append(pool.view(torch.float8_e4m3fn).unflatten(0, (-1, PAGE)))
        return tuple(found)

    def floor_of(self, spec: MixedSpec) -> float:
        """See FLOOR."""
        half = attention_flops(self.lengths, self.heads, self.head_dim) / 2
        products = half / PEAK["bf16" if spec.wide else "fp8"] + half / PEAK["fp8"]
        moved = 4 * self.tokens * self.heads * self.head_dim
        moved += sum(x.numel() * x.element_size() for x in self.memory(spec)[0])
        return max(products, moved / BANDWIDTH) * 1e6

    def row_case(self, variant: dict[str, Any]) -> dict[str, Any]:
        """The fields of a variant's row."""
        return {**self.case, "cache": "qk4pv8", "page": PAGE, **variant}


def ours(found: Mixed, variant: dict[str, Any]) -> Run:
    """epicute's mixed-precision attention, rows packed, the cache in pages."""
    spec = found.spec(variant)
    plan = epicute.attention.mixed_plan.plan_mixed(spec)
    memory = found.memory(spec)
    outputs = [torch.full_like(x, float("nan")) for x in found.q]
    one = torch.ones(found.kv_heads, device=found.options.device)
    given = {
        "q_starts": found.starts,
        "kv_lengths": found.kv_lengths,
        "page_table": found.table,
        "k_scale": one,
        "v_scale": one,
    }
    if spec.terms:
        given["q_mean"] = found.means.q

    def run(copy: int) -> dict[str, Tensor]:
        plan.run(found.q[copy], *memory[copy], out=outputs[copy], **given)
        return {"out": outputs[copy]}

    return run


def peers() -> dict[str, Callable[[Attention], Run]]:
    """Attention in BF16: ours, FlashAttention-4, PyTorch's back-ends."""
    dense = {
        name: partial(attention.sdpa, backend=backend)
        for name, backend in attention.BACKENDS.items()
    }
    return {"ours-bf16": attention.ours, "fa4": attention.fa4, **dense}


def said(variant: dict[str, Any]) -> str:
    """A variant's name in its session."""
    return " ".join(variant.values())


def measure(found: Mixed, session: Session) -> list[Row]:
    """The rows of one case, all candidates timed together."""
    reference = {"out": found.exact()}
    exact = checker(reference, found.view)
    near = checker(reference, found.view, lambda _: ALLOWED)
    for variant in VARIANTS:
        session.add(said(variant), partial(ours, found, variant), near)
    for name, build in peers().items():
        session.add(name, partial(build, found), exact)
    specs = [found.spec(variant) for variant in VARIANTS]
    floors = [found.floor_of(spec) for spec in specs]
    session.measure(found.copies, min(floors))
    names = {name: name for name in peers()}
    return [
        session.row(found.row_case(variant), said(variant), names, floor)
        for variant, floor in zip(VARIANTS, floors, strict=True)
    ]


def cases(options: Options) -> Iterator[Mixed]:
    """Both ratios of heads at every length."""
    for heads, kv_heads in HEADS:
        for length in options.lengths or LENGTHS:
            batch = -(-TOKENS // length)
            yield Mixed((length,) * batch, HEAD_DIM, options, heads=heads, kv_heads=kv_heads)


def kernels(options: Options) -> Iterator[Any]:
    """Every kernel the table runs, each once."""
    found = list(cases(options))
    plain = [epicute.attention.kernel_for(attention.spec(case)) for case in found]
    mixed = [mixed_kernel_for(case.spec(variant)) for case in found for variant in VARIANTS]
    return once([*plain, *mixed])  # type: ignore[list-item]


def table(options: Options, timer: Timer, source: Provenance, folder: Path) -> Table:
    """Measure every case and write ``qk4pv8-prefill.json`` into ``folder``."""
    path = folder / "qk4pv8-prefill.json"
    found = Table("qk4pv8-prefill", PAPER, options.protocol, FLOOR, source, path)
    return fill(found, cases(options), measure, timer, options.rounds)
