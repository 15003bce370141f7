"""Means of queries and keys over each request's valid tokens, as kernels (MpFA 4.2): ``smoothing="sequence"``.

``quant.smoothing.sequence_means`` on the device, summed in FP32 in a fixed order: a request's tokens in tiles of 128
from its first one on; in a tile eight or sixteen threads a channel, two sums each, then a tree; tiles from the first
one on, with what each addition rounds away carried along. The result is within 1e-6 of the mean magnitude, and a
request's bits do not depend on what is packed beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

import torch

from epicute.errors import require
from epicute.jit import CompileKey, ObjectCache, Report, Target, modules_digest
from epicute.layouts.qk4pv8 import HEAD_DIMS
from epicute.quant.launch import (
    Launcher,
    anchor_and_stream,
    check_apart,
    check_vector,
    device_of,
    wrong,
)
from epicute.quant.smoothing import Means, sequence_means

__all__ = ["MeansKernel", "MeansPlan", "MeansSpec", "MeansWorkspace", "plan_sequence_means"]

TILE = 128
"""Tokens of a partial sum."""

THREADS = 128
"""Threads of a block of either stage."""

MEANS_ARGUMENTS = (
    *("q", "q_row", "q_head", "k", "k_row", "k_head", "starts", "valid"),
    *("partials", "counts", "q_mean", "k_mean"),
    *("requests", "q_heads", "kv_heads", "blocks"),
)
"""Addresses, 0 where there is none; strides in bytes. ``partials``: (tiles, heads, D) float32, of the heads of q, then
of k; ``counts``: (tiles,) int32. Tiles of request b begin at starts[b] // 128 + b."""

MODULES = ("epicute.kv.qk4pv8_write_means_kernel", "epicute.kv.qk4pv8_write_means")

DTYPES = (torch.bfloat16, torch.float16)

STAGES = ("tiles", "requests")


@dataclass(frozen=True)
class MeansSpec:
    """What decides a kernel's code.

    Attributes:
        head_dim: D, 64 or 128.
        dtype: of q and k, bfloat16 or float16.
        masked: some tokens may not count.
        stage: ``tiles``, or ``requests``, which adds those.
    """

    head_dim: int
    dtype: torch.dtype
    masked: bool
    stage: str = "tiles"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("head_dim", HEAD_DIMS),
            ("dtype", DTYPES),
            ("stage", STAGES),
        ):
            value = getattr(self, name)
            require(value in allowed, name, value, f"one of {allowed}", "use sequence_means")


@dataclass(frozen=True)
class MeansKernel:
    """A stage as the compiler room sees it."""

    spec: MeansSpec
    target: Target

    @cached_property
    def key(self) -> CompileKey:
        """Everything that decides the machine code."""
        given = tuple((f.name, getattr(self.spec, f.name)) for f in fields(self.spec))
        return CompileKey("kv.sequence_means", given, self.target, (modules_digest(*MODULES),))

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        """The DSL function and its fake arguments."""
        from cutlass import Int64

        from epicute.kv.qk4pv8_write_means_kernel import SequenceMeans

        anchor, stream = anchor_and_stream()
        return SequenceMeans(self.spec), (anchor, tuple(Int64(0) for _ in MEANS_ARGUMENTS), stream)


@dataclass(frozen=True)
class MeansWorkspace:
    """Partial sums of a run; runs that may overlap need one each."""

    partials: torch.Tensor
    counts: torch.Tensor


def plan_sequence_means(
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    masked: bool = False,
    device: torch.device | str | None = None,
    objects: ObjectCache | None = None,
) -> MeansPlan:
    """Compile (or load) what takes the means of requests. One plan serves every batch, length and number of heads.

    Args:
        head_dim: 64 or 128.
        dtype: of q and k, bfloat16 or float16.
        masked: ``run`` takes ``valid``.
        device: where it will run; None is the current GPU, or the CPU where there is none.
        objects: object cache; by default the user's.

    Raises ArgumentError, naming the argument, before anything is compiled.
    """
    specs = [MeansSpec(head_dim, dtype, masked, stage) for stage in STAGES]
    idle = (0,) * (len(MEANS_ARGUMENTS) - 1) + (1,)
    launchers = [Launcher(partial(MeansKernel, spec), idle, device, objects) for spec in specs]
    return MeansPlan(specs[0], launchers)


class MeansPlan:
    """Compiled kernels. Make one with ``plan_sequence_means``."""

    def __init__(self, spec: MeansSpec, launchers: list[Launcher]) -> None:
        self.spec, self._launchers = spec, launchers

    @property
    def reports(self) -> list[Report | None]:
        """What the compiler said of both stages; None where no GPU asked for code."""
        return [launcher.report for launcher in self._launchers]

    def workspace(
        self, rows: int, requests: int, heads: int, device: torch.device | str
    ) -> MeansWorkspace:
        """For up to ``rows`` packed tokens of ``requests``, ``heads`` of q and k together."""
        tiles = rows // TILE + requests
        shape = (tiles, heads, self.spec.head_dim)
        return MeansWorkspace(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(tiles, dtype=torch.int32, device=device),
        )

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        starts: torch.Tensor,
        *,
        means: Means,
        workspace: MeansWorkspace | None = None,
        valid: torch.Tensor | None = None,
    ) -> None:
        """Write the means of every request.

        On a GPU two launches on the current stream of q's device, without waiting or allocating. On the CPU
        ``sequence_means``.

        Args:
            q, k: (T, q_heads, D) and (T, kv_heads, D), after RoPE; adjacent channels, heads and rows at multiples of 16
                bytes.
            starts: (B + 1,) int32 cumulative lengths, trusted on a GPU.
            means: B groups, written: zeros for a request without valid tokens; not finite where a valid value is not.
            workspace: on a GPU, of ``workspace(T, B, q_heads + kv_heads)`` or more.
            valid: with ``masked``: (T,) bool.

        Raises ArgumentError, naming the argument, before the launch.
        """
        arguments = self.bind(q, k, starts, means, workspace, valid)
        if q.device.type == "cpu":
            found = sequence_means(q, k, starts, valid)
            means.q.copy_(found.q)
            means.k.copy_(found.k)
            return
        for launcher, blocks in zip(self._launchers, arguments[1], strict=True):
            if blocks:
                launcher.launch(q.get_device(), (*arguments[0], blocks))

    def bind(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        starts: torch.Tensor,
        means: Means,
        workspace: MeansWorkspace | None = None,
        valid: torch.Tensor | None = None,
    ) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Check everything; the arguments but the last one, and the blocks of either stage."""
        device, width = device_of("q", q), self.spec.head_dim
        rows = q.shape[0] if q.ndim else 0
        found: dict[str, int] = dict.fromkeys(MEANS_ARGUMENTS[:-1], 0)
        for name, x in (("q", q), ("k", k)):
            found |= self._rows(name, x, rows, device)
        requests = starts.numel() - 1 if isinstance(starts, torch.Tensor) else 0
        check_vector("starts", starts, max(requests, 1) + 1, (torch.int32,), device)
        require(
            (valid is not None) == self.spec.masked,
            "valid",
            None if valid is None else "a mask",
            "a mask" if self.spec.masked else "None, of a plan with masked=False",
            "plan with masked=True, or leave it out",
        )
        if valid is not None:
            check_vector("valid", valid, rows, (torch.bool,), device)
            found["valid"] = valid.data_ptr()
        heads = q.shape[1] + k.shape[1]
        for name, mean, count in (("q", means.q, q.shape[1]), ("k", means.k, k.shape[1])):
            shape = (requests, count, width)
            if mean.shape != shape or mean.device != device or not mean.is_contiguous():
                raise wrong(f"means.{name}", mean, f"contiguous {shape} on {device}", "allocate it")
            found[f"{name}_mean"] = mean.data_ptr()
        tiles = rows // TILE + requests
        if device.type == "cuda" or workspace is not None:
            self._workspace(found, workspace, (tiles, heads), device)
        check_apart(q=q, k=k, q_mean=means.q, k_mean=means.k)
        found["starts"], found["requests"] = starts.data_ptr(), requests
        found["q_heads"], found["kv_heads"] = q.shape[1], k.shape[1]
        return tuple(found.values()), (tiles * heads, requests * heads)

    def _rows(self, name: str, x: Any, rows: int, device: torch.device) -> dict[str, int]:
        width, dtype = self.spec.head_dim, self.spec.dtype
        fits = isinstance(x, torch.Tensor) and x.ndim == 3 and x.device == device
        if not fits or x.dtype != dtype or x.shape[0] != rows or x.shape[2] != width:
            raise wrong(
                name, x, f"({rows}, heads, {width}) {dtype} on {device}", "view it by heads"
            )
        steps = zip(x.shape[:2], x.stride()[:2], strict=True)
        whole = all(n == 1 or step * 2 % 16 == 0 for n, step in steps)
        if rows and (x.stride(2) != 1 or not whole or x.data_ptr() % 16):
            raise wrong(
                name,
                x,
                "adjacent channels, and heads and rows at multiples of 16 bytes",
                f"pass {name}.contiguous()",
            )
        row, head = (2 * step for step in x.stride()[:2])
        return {name: x.data_ptr(), f"{name}_row": row, f"{name}_head": head}

    def _workspace(
        self,
        found: dict[str, int],
        workspace: Any,
        least: tuple[int, int],
        device: torch.device,
    ) -> None:
        tiles, heads = least
        sizes = {"partials": tiles * heads * self.spec.head_dim, "counts": tiles}
        for name, size in sizes.items():
            x = getattr(workspace, name, None)
            if not isinstance(x, torch.Tensor) or x.device != device or x.numel() < size:
                raise wrong(
                    f"workspace.{name}",
                    x,
                    f"{size} elements or more on {device}",
                    "make it with workspace(rows, requests, heads, device)",
                )
            found[name] = x.data_ptr()
