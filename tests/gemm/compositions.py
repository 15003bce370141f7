"""Named compositions by width, depth, dtype and schedule: what the gates compile and the GPU tests run.

A ``Skeleton`` is a composition whose sizes are open. A ``Case`` is one kernel: a skeleton, or a projection of a
published layer, with N, K, dtype of A and B, and schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import torch

from epicute.epilogues import (
    Bias,
    Columns,
    Composition,
    Dequantize,
    EmitFP8,
    Gain,
    HeadNorm,
    PlaceKV,
    Policy,
    ResidualAdd,
    RoPE,
    RowScale,
    Store,
    SumSquares,
    SwiGLU,
    compose,
)
from epicute.epilogues.resolve import resolve
from epicute.gemm import GemmKernel, Problem, Schedule, kernel_for, shared_memory
from epicute.jit import DEFAULT_TARGET
from epicute.models.shapes import SHAPES, projections
from tests.gemm.policies import (
    OPERATION_GROUPS,
    Operations,
    blended,
    centred,
    clipped_to_largest,
    rounded_away,
    sheared,
    shifted,
    soft_cap,
    watched,
)

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
DTYPES = {"bf16": BF16, "fp16": FP16, "fp8": FP8}
MODES = {"bf16": (BF16, None), "fp16": (FP16, None), "fp8": (FP8, None), "fp8fast": (FP8, "fast")}
"""Dtype of A and B, and how FP8 products are added: precisely at these depths, or fast."""

DEPTHS = (576, 584)
WIDTHS = (8, 24, 100, 200, 1000, 4720)
"""Columns; compositions of heads take 1, 2, 3, 5, 6, 9 heads instead."""

HEADS = dict(zip(WIDTHS, (1, 2, 3, 5, 6, 9), strict=True))
HEAD_DIMS = (64, 80, 96, 128, 256)
STYLES = ("half", "partial", "interleaved", "interleaved-partial")
CELLS = {"none": None, "bf16": BF16, "fp16": FP16, "fp8": FP8}


class Tile(NamedTuple):
    """A schedule but for its stages, of which as many are taken as fit.

    ``cluster_n``: where the tiles along N are even in number; 1 elsewhere.
    """

    tile_m: int
    tile_n: int
    cluster_m: int
    slots: int = 0
    pingpong: bool = False
    cluster_n: int = 1
    prefetch: bool = False
    keep: bool = False


SCHEDULES: dict[str, Tile | None] = {
    "chosen": None,
    "128x256c1": Tile(128, 256, 1),
    "128x192c2r4": Tile(128, 192, 2, 4, False),
    "128x160c1": Tile(128, 160, 1, 0, False),
    "128x128c2r2": Tile(128, 128, 2, 2, False),
    "128x64c1": Tile(128, 64, 1, 0, False),
    "256x128c2": Tile(256, 128, 2, 0, False),
    "64x256c2pp": Tile(64, 256, 2, 0, True),
    "64x192c1r2pp": Tile(64, 192, 1, 2, True),
    "128x128c2pp": Tile(128, 128, 2, 0, True),
    "128x128n2pp": Tile(128, 128, 1, 0, True, 2),
}

FORCED: dict[str, Tile | None] = {
    "128x128c1": Tile(128, 128, 1),
    "128x320c2": Tile(128, 320, 2),
    "128x384c2k": Tile(128, 384, 2, keep=True),
    "256x192n2": Tile(256, 192, 1, cluster_n=2),
    "256x128n2": Tile(256, 128, 1, cluster_n=2),
    "128x256c2fk": Tile(128, 256, 2, prefetch=True, keep=True),
}
"""Legal, but never chosen: taken by whoever names them."""

TILES = {**SCHEDULES, **FORCED}

Chain = Policy | Composition
Build = Callable[[int, int], Chain]


@dataclass(frozen=True)
class Skeleton:
    """A composition for any legal N and K.

    Attributes:
        build: the chain for N and K, without the scales of an FP8 product.
        group: N is a multiple of it (a head, or a whole QKV group).
        exact: nothing but additions, multiplications, comparisons and casts, so that the kernel has the bits of the
            NumPy evaluation. features: what the covering set pairs. dtypes: operand dtypes other than the kinds' own.
        scaled: the chain has its own ``Dequantize``.
    """

    name: str
    family: str
    build: Build
    group: int = 1
    exact: bool = True
    features: Mapping[str, str] = field(default_factory=dict)
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    scaled: bool = False

    def columns(self, width: int) -> int:
        """N for one of ``WIDTHS``."""
        return HEADS[width] * self.group if self.group > 1 else width

    def composition(self, n: int, k: int, dtype: torch.dtype) -> Composition:
        """The whole composition; an FP8 product is dequantised first."""
        chain = compose(self.build(n, k))
        return Dequantize("row") >> chain if dtype == FP8 and not self.scaled else chain

    @cached_property
    def unit(self) -> int:
        """Packed rows that must share a tile."""
        n = self.columns(200)
        return resolve(compose(self.build(n, 576)), n).order.unit

    def allows(self, schedule: str, mode: str) -> bool:
        """Whether its unit divides the tile, the tile can be added as ``mode`` says, and it is not known to spill."""
        tile = TILES[schedule]
        if tile is None:
            return True
        precise = MODES[mode] == (FP8, None)
        tall = tile.tile_m > (64 if tile.pingpong else 128)
        normed = (
            ".norm." in self.name and self.unit > 32
        )  # a head's values, its factor and the rotation
        refused = tall and (precise or self.unit > 64 or normed)
        refused = refused or (tile.pingpong and self.unit > 128)
        # CUDA 13's assembler, unlike CUDA 12's, spills of fast products too where a whole head is turned by halves.
        halves = MODES[mode] == (FP8, "fast") and self.features.get("style") == "half"
        refused = refused or ((precise or halves) and normed and self.unit > 128)
        return tile.tile_n % self.unit == 0 and not refused

    def case(self, mode: str, width: int, k: int, schedule: str = "chosen") -> Case:
        """One kernel; ``mode`` of ``MODES``."""
        n = self.columns(width)
        dtype, accumulate = MODES[mode]
        return Case(
            name=f"{self.name}-{mode}-{n}x{k}-{schedule}",
            composition=self.composition(n, k, dtype),
            n=n,
            k=k,
            dtype=dtype,
            tile=TILES[schedule],
            exact=self.exact,
            dtypes=self.dtypes,
            accumulate=accumulate,
        )


@dataclass(frozen=True)
class Case:
    """One kernel, and whether its results are exact where its accumulators are."""

    name: str
    composition: Composition
    n: int
    k: int
    dtype: torch.dtype
    tile: Tile | None = None
    exact: bool = False
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    alignments: tuple[tuple[str, int], ...] = ()
    accumulate: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What ``kernel_for`` and ``plan`` are told, the schedule apart."""
        return {
            "dtypes": dict(self.dtypes),
            "alignments": dict(self.alignments),
            "accumulate": self.accumulate,
        }

    def kernel(self) -> GemmKernel:
        """The kernel to compile."""
        options = {"n": self.n, "k": self.k, "dtype": self.dtype, **self.options}
        chosen = kernel_for(self.composition, **options)
        if self.tile is None:
            return chosen
        schedule = deepest(chosen.spec.problem, self.tile)
        return kernel_for(self.composition, **options, schedule=schedule)

    def __str__(self) -> str:
        return self.name


def deepest(problem: Problem, tile: Tile) -> Schedule:
    """The tile with as many stages as fit, six at most."""
    cluster_n = tile.cluster_n if -(-problem.rows // tile.tile_n) % 2 == 0 else 1
    for stages in (6, 5, 4, 3, 2):
        schedule = Schedule(
            tile.tile_m,
            tile.tile_n,
            tile.cluster_m,
            stages,
            tile.slots,
            cluster_n,
            tile.pingpong,
            tile.prefetch,
            tile.keep,
        )
        if shared_memory(schedule, problem) <= DEFAULT_TARGET.smem_per_block:
            break
    return schedule


def rope(head_dim: int, style: str) -> RoPE:
    """RoPE of a head in one of ``STYLES``."""
    pairing = style.split("-")[0]
    rotary = 0
    if style.endswith("partial"):
        rotary = {64: 32, 80: 32, 96: 48 if style == "partial" else 32}.get(head_dim, 64)
    return RoPE(head_dim, rotary, "interleaved" if pairing == "interleaved" else "half")


def qkv(q: int, kv: int, turn: Chain, place: Policy) -> Columns:
    """Fused QKV of ``q`` and ``kv`` columns; k is turned and placed, v placed."""
    return Columns(q=(q, turn >> Store(BF16)), k=(kv, turn >> place), v=(kv, place))


def heads(head_dim: int, style: str, norm: bool, cells: str) -> Skeleton:
    """Norm and RoPE of plain heads, or fused QKV of 3 query heads to one of k and v."""
    turn: Chain = rope(head_dim, style)
    turn = HeadNorm(head_dim, 1e-6, 1.0) >> turn if norm else turn
    dtype = CELLS[cells]

    def build(n: int, k: int) -> Chain:
        if dtype is None:
            return compose(turn) >> Store(BF16)
        return compose(qkv(n * 3 // 5, n // 5, turn, PlaceKV(head_dim, dtype)))

    known = {"head_dim": str(head_dim), "style": style, "norm": str(norm), "cells": cells}
    name = f"{'rope' if dtype is None else 'qkv'}.{head_dim}.{style}{'.norm' if norm else ''}"
    name += f".{cells}" if dtype else ""
    group = head_dim if dtype is None else 5 * head_dim
    return Skeleton(name, "heads" if dtype is None else "qkv", build, group, False, known)


def _of(family: str, exact: bool = True, group: int = 1, scaled: bool = False, **chains: Build):
    for name, build in chains.items():
        yield Skeleton(f"{family}.{name}", family, build, group, exact, scaled=scaled)


def _skeletons() -> Iterator[Skeleton]:
    yield from _of(
        "store",
        bf16=lambda n, k: Store(BF16),
        fp16=lambda n, k: Store(FP16),
        fp32=lambda n, k: Store(FP32),
        fp8=lambda n, k: Store(FP8),
        emit=lambda n, k: EmitFP8(),
        all=lambda n, k: Store(BF16, name="h") >> EmitFP8() >> Store(FP32),
    )
    yield from _of(
        "scales",
        scaled=True,
        tensor_column=lambda n, k: Dequantize("tensor", "column") >> Store(BF16),
        row_column=lambda n, k: Dequantize("row", "column") >> Store(FP32),
        row_tensor=lambda n, k: Dequantize("row", "tensor") >> Store(BF16),
        tensor_tensor=lambda n, k: Dequantize("tensor", "tensor") >> Store(BF16),
        none_column=lambda n, k: Dequantize(None, "column") >> Store(BF16),
        bias=lambda n, k: Dequantize() >> Bias() >> Store(BF16),
        gain=lambda n, k: Dequantize() >> Gain(1.0) >> Bias() >> Gain(name="g") >> Store(BF16),
    )
    yield from _of("scales", exact=False, row_scale=lambda n, k: RowScale(k) >> Store(BF16))
    out = ResidualAdd() >> SumSquares() >> Store(BF16) >> EmitFP8()
    for name, dtype in DTYPES.items():
        kept = FP32 if dtype == FP8 else dtype
        dtypes = (("residual", kept),)
        yield Skeleton(f"residual.{name}", "residual", lambda n, k: out, dtypes=dtypes)
    yield from _of(
        "swiglu",
        exact=False,
        store=lambda n, k: SwiGLU() >> Store(BF16),
        limited=lambda n, k: SwiGLU(1.702, 7.0) >> Store(FP32),
        emit=lambda n, k: RowScale(k) >> SwiGLU() >> EmitFP8(),
        bias=lambda n, k: Bias() >> SwiGLU() >> Bias(name="down") >> Store(BF16),
        residual=lambda n, k: ResidualAdd() >> SwiGLU() >> ResidualAdd(name="z") >> Store(BF16),
        kept=lambda n, k: Store(BF16, name="h") >> SwiGLU() >> SumSquares() >> Store(BF16),
    )
    yield from _of(
        "user",
        shifted=lambda n, k: shifted() >> Store(BF16),
        centred=lambda n, k: centred() >> Store(FP32),
        clipped=lambda n, k: clipped_to_largest() >> Store(BF16),
        watched=lambda n, k: shifted() >> watched(),
        rounded=lambda n, k: shifted() >> rounded_away(),
    )
    yield from _of("user", exact=False, soft_cap=lambda n, k: soft_cap(cap=30.0) >> Store(BF16))
    yield from _of("user", blended=lambda n, k: blended(floor=-1.0) >> EmitFP8())
    yield from _of("user", group=64, sheared=lambda n, k: sheared() >> Store(BF16))
    for some in product(HEAD_DIMS, STYLES, (False, True), CELLS):
        yield heads(*some)


SKELETONS = {skeleton.name: skeleton for skeleton in _skeletons()}


def operations() -> list[Case]:
    """Every operation of the two interpreters, a few to a kernel."""
    names = ("numbers", "curves", "waves", "truths", "logic")
    return [
        Case(f"operations.{name}", compose(Operations(chosen=some)), 192, 192, BF16)
        for name, some in zip(names, OPERATION_GROUPS, strict=True)
    ]


def projection(layer: str, shape: str, mode: str) -> Case:
    """A projection of a published layer as FuTransformer fuses it."""
    sizes = SHAPES[shape]
    n, k = projections(sizes)[layer]
    dtype, accumulate = MODES[mode]
    scaled = dtype == FP8
    if layer == "qkv":
        turn, place = RoPE(sizes.head_dim), PlaceKV(sizes.head_dim)
        chain = RowScale(k) >> qkv(sizes.q_width, sizes.kv_width, turn, place)
    elif layer == "gate_up":
        chain = RowScale(k) >> SwiGLU() >> (EmitFP8() if scaled else Store(BF16))
    else:
        chain = ResidualAdd() >> SumSquares() >> Store(BF16)
        chain = chain >> EmitFP8() if scaled else chain
    composition = Dequantize() >> chain if scaled else chain
    exact = layer in ("o", "down")
    name = f"{shape}.{layer}-{mode}"
    return Case(name, composition, n, k, dtype, exact=exact, accumulate=accumulate)
