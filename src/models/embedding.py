"""The first kernel of a forward pass: from token ids to the residual stream.

    x[m]      = table[ids[m]]                             as stored
    sumsq[m]  = sums of squares over 64 columns of x[m]   what RowScale of the first QKV projection reads
    codes[m]  = e4m3(x[m] * (1 / scale))                  what that projection multiplies, under a delayed scale

(FuTransformer 3.2.2, 3.2.3.) RMSNorm's gain belongs to the projection's weights; where these could not absorb it, the
codes are of x * gain.

An id of -1 is padding, as graphs captured for more rows than are live have it: a row of zeros that no maximum or
counter sees. Any other id outside of the table gives a row of zeros too and is counted in ``strays``; on the CPU it is
refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from epicute.errors import require
from epicute.jit import CompileKey, ObjectCache, Report, Target, modules_digest
from epicute.models.partials import PARTIAL, partial_sums
from epicute.quant.delayed import DelayedScale
from epicute.quant.launch import (
    Launcher,
    anchor_and_stream,
    check_apart,
    check_matrix,
    check_vector,
    device_of,
    wrong,
)

__all__ = [
    "PADDING",
    "EmbeddingKernel",
    "EmbeddingPlan",
    "EmbeddingSpec",
    "embedding_kernel",
    "plan_embedding",
]

ARGUMENTS = (
    *("ids", "table", "table_stride", "vocabulary", "x", "x_stride", "sumsq", "sumsq_stride"),
    *("strays", "codes", "codes_stride", "scale", "amax", "saturated", "nans", "gain"),
    *("rows", "blocks"),
)
"""The kernel's integers: addresses, strides in bytes, V, M, blocks to launch."""

MODULES = ("epicute.models.embedding_kernel", "epicute.models.embedding")

PADDING = -1
"""The id of a row that holds no token."""

WARPS = 8
"""Warps of a block."""

WAVES = 8
"""Blocks for each multiprocessor, at most."""

DTYPES = (torch.bfloat16, torch.float16)
IDS = (torch.int32, torch.int64)

LARGEST_HIDDEN = 2**20
LARGEST_PIECES = 2**31 - 2**20
"""Pieces of 512 columns, of all rows together, that 32-bit arithmetic can count."""


@dataclass(frozen=True)
class EmbeddingSpec:
    """What decides the kernel's code.

    Attributes:
        hidden: columns, a multiple of 8.
        dtype: of the table and of x, bfloat16 or float16.
        ids_dtype: int32 or int64.
        fp8: whether codes are written too.
        gain: whether a norm's gain goes into the codes.
    """

    hidden: int
    dtype: torch.dtype
    ids_dtype: torch.dtype
    fp8: bool
    gain: bool = False

    def __post_init__(self) -> None:
        require(
            type(self.hidden) is int
            and 1 <= self.hidden <= LARGEST_HIDDEN
            and self.hidden % 8 == 0,
            "hidden",
            self.hidden,
            f"a multiple of 8 up to {LARGEST_HIDDEN}: rows of whole 16-byte vectors",
            "pad the table's columns with zeros",
        )
        for name, allowed in (("dtype", DTYPES), ("ids_dtype", IDS)):
            require(
                getattr(self, name) in allowed,
                name,
                getattr(self, name),
                " or ".join(map(str, allowed)),
                "convert the tensor",
            )
        require(
            self.fp8 or not self.gain,
            "gain",
            self.gain,
            "False without codes, as x itself has no gain",
            "plan with fp8=True, or leave gain out",
        )

    @property
    def groups(self) -> int:
        """Partial sums of a row."""
        return -(-self.hidden // PARTIAL)

    @property
    def octets(self) -> int:
        """Pieces of a row: eight groups, one warp's work at a time."""
        return -(-self.groups // 8)

    @property
    def reach(self) -> int:
        """Largest vector that any thread can ask for."""
        return 64 * self.octets - 1


@dataclass(frozen=True)
class EmbeddingKernel:
    """The kernel as the compiler room sees it."""

    spec: EmbeddingSpec
    target: Target

    @cached_property
    def key(self) -> CompileKey:
        """Everything that decides the machine code."""
        sources = (modules_digest(*MODULES),)
        return CompileKey("models.embedding", tuple(vars(self.spec).items()), self.target, sources)

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        """The DSL function and its fake arguments."""
        from cutlass import Int64

        from epicute.models.embedding_kernel import Embedding

        anchor, stream = anchor_and_stream()
        return Embedding(self.spec), (anchor, tuple(Int64(0) for _ in ARGUMENTS), stream)


def embedding_kernel(
    hidden: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    ids_dtype: torch.dtype = torch.int64,
    fp8: bool = True,
    gain: bool = False,
    target: Target | None = None,
) -> EmbeddingKernel:
    """Describe the kernel; see ``plan_embedding``. Raises as there, and compiles nothing."""
    spec = EmbeddingSpec(hidden, dtype, ids_dtype, fp8, gain)
    return EmbeddingKernel(spec, target or Target.detect())


def plan_embedding(
    hidden: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    ids_dtype: torch.dtype = torch.int64,
    fp8: bool = True,
    gain: bool = False,
    device: torch.device | str | None = None,
    cache: ObjectCache | None = None,
) -> EmbeddingPlan:
    """Compile (or load) the embedding of a model. One plan serves every vocabulary and every M, including 0.

    Args:
        hidden: columns of the table, a multiple of 8.
        dtype: of table and x, bfloat16 or float16.
        ids_dtype: int32 or int64.
        fp8: whether to write codes under a delayed scale too.
        gain: whether these are of x * gain, for a first projection that could not absorb its norm's gain.
        device: where it will run; None is the current GPU, or the CPU where there is none. Others are prepared at
            their first run.
        cache: object cache; by default the user's.

    Raises ArgumentError, naming the argument, before anything is compiled.
    """
    spec = EmbeddingSpec(hidden, dtype, ids_dtype, fp8, gain)
    idle = (0,) * (len(ARGUMENTS) - 1) + (1,)
    launcher = Launcher(lambda target: EmbeddingKernel(spec, target), idle, device, cache)
    return EmbeddingPlan(spec, launcher)


class EmbeddingPlan:
    """A compiled embedding. Make one with ``plan_embedding``."""

    def __init__(self, spec: EmbeddingSpec, launcher: Launcher) -> None:
        self.spec = spec
        self._launcher = launcher

    @property
    def report(self) -> Report | None:
        """What the compiler said; None where no GPU asked for code."""
        return self._launcher.report

    def run(
        self,
        ids: torch.Tensor,
        table: torch.Tensor,
        x: torch.Tensor,
        sumsq: torch.Tensor,
        strays: torch.Tensor,
        codes: torch.Tensor | None = None,
        site: DelayedScale | None = None,
        gain: torch.Tensor | None = None,
    ) -> None:
        """Gather ``table``'s rows, on the current stream of their device.

        On a GPU one launch, without waiting or allocating. On the CPU the same in PyTorch, to the bit.

        Args:
            ids: (M,) of the plan's dtype; -1 for a row without a token.
            table: (V, hidden), V > 0, rows of adjacent elements at multiples of 16 bytes. A tied head multiplies the
                same table, packed.
            x: (M, hidden) of the table's dtype, written; rows as the table's.
            sumsq: (M, ⌈hidden/64⌉) float32, written as ``SumSquares`` writes it.
            strays: (1,) int64, raised by the number of ids that are neither -1 nor a row of the table.
            codes: (M, hidden) float8_e4m3fn, written, rows at multiples of 8 bytes; with ``fp8`` alone.
            site: the delayed scale of the codes: quantises with ``scale_used``, raises ``amax_next``, ``saturated``
                and ``nans`` as ``EmitFP8`` does; with ``fp8`` alone.
            gain: (hidden,) float32 at a multiple of 16 bytes; with ``gain`` alone.

        Raises:
            ArgumentError: naming the argument, before the launch; on the CPU for stray ids too.
        """
        arguments = self.bind(ids, table, x, sumsq, strays, codes, site, gain)
        if arguments is None:
            return
        if table.device.type == "cpu":
            self._run_here(ids, table, x, sumsq, codes, site, gain)
        else:
            self._launcher.launch(table.get_device(), arguments)

    def bind(
        self,
        ids: torch.Tensor,
        table: torch.Tensor,
        x: torch.Tensor,
        sumsq: torch.Tensor,
        strays: torch.Tensor,
        codes: torch.Tensor | None = None,
        site: DelayedScale | None = None,
        gain: torch.Tensor | None = None,
    ) -> tuple[int, ...] | None:
        """Check everything and return the kernel's arguments; None where M is 0."""
        spec, device = self.spec, device_of("table", table)
        table_stride = check_matrix("table", table, (None, spec.hidden), spec.dtype, device, 16)
        if table.shape[0] == 0:
            raise wrong("table", table, "at least one row", "give the whole table")
        rows = ids.numel() if isinstance(ids, torch.Tensor) else 0
        check_vector("ids", ids, rows, (spec.ids_dtype,), device)
        most = LARGEST_PIECES // spec.octets
        if rows > most:
            raise wrong("ids", ids, f"at most {most} rows", "split the batch")
        x_stride = check_matrix("x", x, (rows, spec.hidden), spec.dtype, device, 16)
        sums_stride = check_matrix("sumsq", sumsq, (rows, spec.groups), torch.float32, device, 4)
        check_vector("strays", strays, 1, (torch.int64,), device)
        emitted = self._check_fp8(codes, site, rows, device)
        factors = self._check_gain(gain, device)
        check_apart(ids=ids, table=table, x=x, sumsq=sumsq, strays=strays, codes=codes, gain=gain)
        most = WAVES * self._launcher.multiprocessors(device)
        found = (
            *(ids.data_ptr(), table.data_ptr(), table_stride, table.shape[0]),
            *(x.data_ptr(), x_stride, sumsq.data_ptr(), sums_stride, strays.data_ptr()),
            *(*emitted, factors, rows, min(-(-rows * spec.octets // WARPS), most)),
        )
        return found if rows else None

    def _check_fp8(
        self,
        codes: torch.Tensor | None,
        site: DelayedScale | None,
        rows: int,
        device: torch.device,
    ) -> tuple[int, ...]:
        """The arguments of the FP8 copy."""
        if not self.spec.fp8:
            for name, given in (("codes", codes), ("site", site)):
                if given is not None:
                    raise wrong(name, given, "nothing", "plan with fp8=True, or leave it out")
            return (0,) * 6
        dtype = torch.float8_e4m3fn
        stride = check_matrix("codes", codes, (rows, self.spec.hidden), dtype, device, 8)
        if not isinstance(site, DelayedScale) or site.scale_used.device != device:
            given = site.scale_used if isinstance(site, DelayedScale) else site
            raise wrong(
                "site", given, f"a DelayedScale on {device}", "plan with fp8=False, or give one"
            )
        assert codes is not None
        state = (site.scale_used, site.amax_next, site.saturated, site.nans)
        return (codes.data_ptr(), stride, *(t.data_ptr() for t in state))

    def _check_gain(self, gain: torch.Tensor | None, device: torch.device) -> int:
        """Its address, 0 for none."""
        if not self.spec.gain:
            if gain is not None:
                raise wrong("gain", gain, "nothing", "plan with gain=True, or leave it out")
            return 0
        check_vector("gain", gain, self.spec.hidden, (torch.float32,), device)
        assert gain is not None
        if gain.data_ptr() % 16:
            raise wrong("gain", gain, "a start at a multiple of 16 bytes", "gain.clone()")
        return gain.data_ptr()

    def _run_here(
        self,
        ids: torch.Tensor,
        table: torch.Tensor,
        x: torch.Tensor,
        sumsq: torch.Tensor,
        codes: torch.Tensor | None,
        site: DelayedScale | None,
        gain: torch.Tensor | None,
    ) -> None:
        live = ids != PADDING
        outside = live & ((ids < 0) | (ids >= table.shape[0]))
        if bool(outside.any()):
            first = int(outside.nonzero()[0])
            require(
                False,
                "ids",
                f"{int(ids[first])} in row {first}",
                f"-1 or a row of the table, 0 to {table.shape[0] - 1}",
                "use the tokenizer of this checkpoint",
            )
        x.zero_()
        x[live] = table[ids[live].long()]
        sumsq.copy_(partial_sums(x))
        if codes is not None and site is not None:
            none = (
                torch.zeros(codes.shape[1]) if gain is None else 0.0 * gain
            )  # -0 where it is negative
            codes.view(torch.uint8)[~live] = none.to(codes.dtype).view(torch.uint8)
            found, _ = site.quantize(x[live] if gain is None else x[live].float() * gain)
            codes[live] = found
