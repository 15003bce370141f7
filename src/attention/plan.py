"""Plan once, run many times: ``run`` checks, collects addresses and launches.

It allocates nothing on the device, does not wait for it, launches on the current stream of q's device, and may be
captured in a CUDA graph: lengths and page tables are read by the kernel alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from epicute.attention.arguments import ARGUMENTS
from epicute.attention.build import AttentionKernel, kernel_for
from epicute.attention.launch import Loaded
from epicute.attention.schedule import AttentionSchedule
from epicute.attention.spec import AttentionSpec
from epicute.errors import ArgumentError, require
from epicute.jit import ObjectCache, Report, Target

__all__ = ["AttentionPlan", "plan_attention"]

SECTION_BYTES = 24 << 20
"""Keys and values that the tiles in flight may keep in L2."""

REMEMBERED = 256
"""Sets of tensors, by address and shape, that a plan remembers to have checked."""

ROWS = 2**31 - 2**16
"""Rows that 32-bit tile arithmetic can count."""


def plan_attention(
    spec: AttentionSpec,
    *,
    target: Target | None = None,
    schedule: AttentionSchedule | None = None,
    device: torch.device | str | int | None = None,
    cache: ObjectCache | None = None,
) -> AttentionPlan:
    """Choose, compile (or load) and return what runs ``spec``.

    One plan serves every batch, length, stride and page table. What recompiles: another field of the spec, schedule or
    target.

    Args:
        spec: what to compute.
        target: by default the device's, or sm_90a without one.
        schedule: by default ``choose(spec)``.
        device: the GPU whose first ``run`` may be captured, as the code is loaded there now; by default the current
            one. Others load with their own first ``run``.
        cache: object cache; by default the user's.

    Raises UnsupportedError for what ``LEGALITY`` refuses, ArgumentError for a schedule that does not fit, CompileError
    where the kernel would spill or serialise.
    """
    require(
        isinstance(spec, AttentionSpec),
        "spec",
        type(spec).__name__,
        "an AttentionSpec",
        "write plan_attention(AttentionSpec(heads=32, kv_heads=8, head_dim=128))",
    )
    index = _index(device)
    target = Target.detect(index) if target is None else target
    return AttentionPlan(kernel_for(spec, target=target, schedule=schedule), cache, index)


def _index(device: torch.device | str | int | None) -> int | None:
    """Of a CUDA device; None where there is no GPU."""
    if device is None:
        return torch.cuda.current_device() if torch.cuda.is_available() else None
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    require(
        found.type == "cuda" and torch.cuda.is_available(),
        "device",
        device,
        "a CUDA device of this machine, or None",
        "leave it out to plan without a GPU",
    )
    return torch.cuda.current_device() if found.index is None else found.index


@dataclass(frozen=True)
class Rows:
    """Shape of q or of dense k and v: ``batches`` of ``rows`` (packed: one of all)."""

    batches: int
    rows: int


class AttentionPlan:
    """A compiled kernel and what its operands must be.

    Attributes:
        kernel: spec, schedule and target.
        report: what the compiler said.
    """

    def __init__(
        self, kernel: AttentionKernel, cache: ObjectCache | None = None, index: int | None = None
    ) -> None:
        self.kernel = kernel
        self._loaded = Loaded(kernel, kernel.target, self._idle, cache)
        self.report: Report = self._loaded.report
        self._bound: dict[Any, tuple[int, ...] | None] = {}
        self._loaded.prepare(index)

    @property
    def spec(self) -> AttentionSpec:
        """What it computes."""
        return self.kernel.spec

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        out: torch.Tensor,
        **operands: Any,
    ) -> None:
        """Write the attention of ``q`` over ``k`` and ``v`` to ``out``.

        Rows of B requests are packed, T in all, or padded, S for each. Queries of a request stand at its end: query i
        of Sq is the key Sk - Sq + i.

        Args:
            q, out: (T, heads, head_dim) packed, (B, S, heads, head_dim) padded.
            k, v: packed (Tk, kv_heads, head_dim); padded (B, Sk, kv_heads, head_dim); paged (pages, page, kv_heads,
                head_dim), any strides with the channels of a head adjacent.
            q_starts: packed: (B + 1,) int32, first row of each request, and T.
            kv_starts: packed, not paged: (B + 1,) int32 for k and v.
            q_lengths: padded: (B,) int32, or left out for S each.
            kv_lengths: paged, and padded (or left out): (B,) int32, keys of each request, new ones included.
            page_table: paged: (B, pages) int32, page of each stretch of tokens; entries behind a request's end are
                not read.
            sinks: (heads,) float32. lse: (heads, T) or (B, heads, S) float32, written.
            k_scale, v_scale: (kv_heads,) float32, of float8 k and v.
            out_scale: (1,) float32; amax (1,) float32, saturated and nans (1,) int64, raised: of a float8 output, as
                ``EmitFP8`` says.

        A query that sees no key gets 0 and lse -inf. Rows behind a length are not written; keys and values behind one
        take no part, NaN or not. Those within it must be finite also where a mask hides them, as values of tiles that
        it cuts are multiplied by 0; pages that lie before every window may be -1, which reads as zeros. The numbers in
        starts, lengths and tables are trusted: they must lie within what was passed.

        ``out`` may be q itself, row for row; it must not share other memory with q, k or v.

        Raises ArgumentError before any launch.
        """
        operands = {name: x for name, x in operands.items() if x is not None}
        # The checks are functions of these alone: tensors like those of a call before need no other.
        try:
            given = (q, k, v, out, *operands.values())
            seen = (
                *operands,
                *[(t.data_ptr(), t.shape, t.stride(), t.dtype, t.get_device()) for t in given],
            )
            arguments = self._bound[seen]
        except (AttributeError, KeyError, RuntimeError, TypeError):
            arguments = self._bind((q, k, v), out, operands)
            if len(self._bound) >= REMEMBERED:
                self._bound.clear()
            self._bound[seen] = arguments
        if arguments is not None:
            self._loaded.launch(q.get_device(), arguments)

    def _bind(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        operands: dict[str, Any],
    ) -> tuple[int, ...] | None:
        """Check everything and return the kernel's arguments; None where there is nothing to do."""
        q, k, v = tensors
        self._check_names(operands)
        spec = self.spec
        queries = self._check_rows("q", q, spec.heads, spec.dtype)
        require(
            q.device.type == "cuda",
            "q",
            f"a tensor on {q.device}",
            "a CUDA tensor",
            "move q, k and v to a Hopper GPU; without one, use epicute.models' CPU backend",
        )
        processors = self._loaded.processors(q.device)
        found = dict.fromkeys(ARGUMENTS, 0)
        _take(found, "q", q, spec.packed)
        written = self._check_rows("out", out, spec.heads, spec.out_dtype)
        if written != queries:
            raise _wrong("out", out, f"the shape of q, {tuple(q.shape)}", "allocate it like q")
        _take(found, "out", out, spec.packed)
        keys = self._take_keys(found, k, v, q)
        batch = self._take_vectors(found, operands, queries, q)
        if spec.page is None and not spec.packed and keys.batches != batch:
            raise _wrong("k", k, f"a batch of {batch}, as q has", "pass k and v of each request")
        for name, tensor in {"k": k, "v": v, "out": out, **operands}.items():
            if tensor.device != q.device:
                raise _wrong(name, tensor, f"q's device, {q.device}", f"{name}.to(q.device)")
        for name, x in (("q", q), ("k", k), ("v", v)):
            in_place = name == "q" and _place(x) == _place(out)
            if not in_place and _overlap(out, x):
                raise _wrong(
                    "out", out, f"memory apart from {name}", f"allocate it apart from {name}"
                )
        if queries.rows == 0 or batch == 0:
            return None
        schedule = self.kernel.schedule
        found["batch"], found["q_rows"] = batch, queries.rows
        found["kv_rows"], found["kv_batches"] = keys.rows, keys.batches
        found["clusters"] = processors // schedule.cluster
        found["section"] = self._section(keys, batch)
        return tuple(found.values())

    def _section(self, keys: Rows, batch: int) -> int:
        """KV heads whose keys and values fit in L2 together: a divisor of them all."""
        spec = self.spec
        if spec.page is not None:
            return spec.kv_heads
        size = 2 * keys.rows * keys.batches * spec.head_dim * spec.dtype.itemsize
        most = max(1, SECTION_BYTES // max(size, 1))
        return max(n for n in range(1, spec.kv_heads + 1) if spec.kv_heads % n == 0 and n <= most)

    def _idle(self, address: int) -> tuple[int, ...]:
        """Arguments of a launch for no request, which loads the code and reads no operand."""
        found = dict.fromkeys(ARGUMENTS, 0)
        for name in ("q", "k", "v"):
            found[name] = address
            for step in ("row", "head", "batch"):
                found[f"{name}_{step}"] = self.spec.head_dim
        found["out_scale"] = address
        found["clusters"], found["section"] = 1, self.spec.kv_heads
        return tuple(found.values())

    def _check_names(self, operands: dict[str, Any]) -> None:
        """Refuse operands that the spec does not know, and the lack of those it needs."""
        spec = self.spec
        needed, optional = set(), set()
        if spec.packed:
            needed.add("q_starts")
        else:
            optional.add("q_lengths")
        if spec.page is not None:
            needed |= {"kv_lengths", "page_table"}
        elif spec.packed:
            needed.add("kv_starts")
        else:
            optional.add("kv_lengths")
        for wanted, names in (
            (spec.sinks, ("sinks",)),
            (spec.lse, ("lse",)),
            (spec.kv_dtype != spec.dtype, ("k_scale", "v_scale")),
            (spec.out_is_fp8, ("out_scale", "amax", "saturated", "nans")),
        ):
            needed |= set(names) if wanted else set()
        missing, unknown = needed - set(operands), set(operands) - needed - optional
        require(
            not missing and not unknown,
            "operands",
            ", ".join(
                [f"no {name}" for name in sorted(missing)]
                + [f"{n} too many" for n in sorted(unknown)]
            ),
            ", ".join(sorted(needed))
            + (f"; at will {', '.join(sorted(optional))}" if optional else ""),
            f"bind what this spec takes ({spec})",
        )
        for name, x in operands.items():
            if not isinstance(x, torch.Tensor):
                raise ArgumentError(
                    f"{name}: got {type(x).__name__}, expected a tensor. Fix: make a tensor of it"
                )

    def _check_rows(self, name: str, x: torch.Tensor, heads: int, dtype: torch.dtype) -> Rows:
        """Refuse an x that is not rows of heads; its rows."""
        spec = self.spec
        packed = spec.packed
        shape = f"({'T' if packed else 'B, S'}, {heads}, {spec.head_dim}) {dtype}"
        if (
            not isinstance(x, torch.Tensor)
            or x.dtype != dtype
            or x.ndim != (3 if packed else 4)
            or tuple(x.shape[-2:]) != (heads, spec.head_dim)
        ):
            raise _wrong(name, x, shape, "reshape or convert it, or plan for it")
        if x.shape[-3] > ROWS:
            raise _wrong(name, x, f"at most {ROWS} rows", "split the batch")
        _check_steps(name, x)
        return Rows(1 if packed else x.shape[0], x.shape[-3])

    def _take_keys(
        self, found: dict[str, int], k: torch.Tensor, v: torch.Tensor, q: torch.Tensor
    ) -> Rows:
        """Check k and v and put them among the arguments; their rows."""
        spec = self.spec
        rows = None
        for name, x in (("k", k), ("v", v)):
            if spec.page is None:
                here = self._check_rows(name, x, spec.kv_heads, spec.kv_dtype)
            else:
                wanted = (spec.page, spec.kv_heads, spec.head_dim)
                if (
                    not isinstance(x, torch.Tensor)
                    or x.dtype != spec.kv_dtype
                    or x.ndim != 4
                    or tuple(x.shape[1:]) != wanted
                ):
                    shape = f"(pages, {', '.join(map(str, wanted))}) {spec.kv_dtype}"
                    raise _wrong(name, x, shape, "HND pools: pass pool.transpose(1, 2)")
                _check_steps(name, x)
                here = Rows(x.shape[0], spec.page)
            if rows is not None and here != rows:
                raise _wrong(
                    name, x, f"the shape of k, {tuple(k.shape)}", "pass keys with their values"
                )
            rows = here
            # Nothing is read of an empty one, but the hardware wants an address.
            _take(found, name, x if x.numel() else q, spec.packed and spec.page is None)
        assert rows is not None
        return rows

    def _take_vectors(
        self, found: dict[str, int], operands: dict[str, Any], queries: Rows, q: torch.Tensor
    ) -> int:
        """Check the other operands and put their addresses among the arguments; the number of requests."""
        spec = self.spec
        batch = queries.batches
        if spec.packed:
            starts = operands["q_starts"]
            batch = max(starts.numel() - 1, 0)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "q_starts": ((batch + 1,), torch.int32),
            "kv_starts": ((batch + 1,), torch.int32),
            "q_lengths": ((batch,), torch.int32),
            "kv_lengths": ((batch,), torch.int32),
            "sinks": ((spec.heads,), torch.float32),
            "k_scale": ((spec.kv_heads,), torch.float32),
            "v_scale": ((spec.kv_heads,), torch.float32),
            "out_scale": ((1,), torch.float32),
            "amax": ((1,), torch.float32),
            "saturated": ((1,), torch.int64),
            "nans": ((1,), torch.int64),
        }
        for name, x in operands.items():
            if name in shapes:
                shape, dtype = shapes[name]
                if x.dtype != dtype or tuple(x.shape) != shape or not x.is_contiguous():
                    raise _wrong(name, x, f"contiguous {shape} {dtype}", "convert it once, ahead")
            elif name == "page_table":
                if x.dtype != torch.int32 or x.ndim != 2 or x.shape[0] != batch:
                    raise _wrong(name, x, f"({batch}, pages) int32", "one row per request")
                if x.shape[1] > 1 and x.stride(1) != 1:
                    raise _wrong(name, x, "adjacent entries of a row", "call .contiguous()")
                found["table_row"] = x.stride(0)
            else:
                self._take_lse(found, x, queries)
            found[name] = x.data_ptr()
        return batch

    def _take_lse(self, found: dict[str, int], lse: torch.Tensor, queries: Rows) -> None:
        heads = self.spec.heads
        wanted: tuple[int, ...] = (heads, queries.rows)
        if not self.spec.packed:
            wanted = (queries.batches, *wanted)
        adjacent = lse.ndim > 0 and (lse.shape[-1] <= 1 or lse.stride(-1) == 1)
        if lse.dtype != torch.float32 or tuple(lse.shape) != wanted or not adjacent:
            raise _wrong("lse", lse, f"{wanted} float32, rows adjacent", "allocate it so")
        found["lse_head"] = lse.stride(-2)
        found["lse_batch"] = 0 if self.spec.packed else lse.stride(0)

    def __str__(self) -> str:
        return f"{self.spec}\n{self.kernel.schedule}; {self.kernel.target}\n{self.report}"


def _take(found: dict[str, int], name: str, x: torch.Tensor, packed: bool) -> None:
    """Address and strides of rows of heads. An axis of one element has no step, and views give it any."""
    steps = [s if n > 1 else x.shape[-1] for n, s in zip(x.shape, x.stride(), strict=True)]
    found[name] = x.data_ptr()
    found[f"{name}_row"], found[f"{name}_head"] = steps[-3], steps[-2]
    found[f"{name}_batch"] = x.shape[-1] if packed or x.ndim == 3 else steps[0]


def _place(x: torch.Tensor) -> tuple[int, tuple[int, ...], int]:
    """Two tensors of one place are the same bytes, element for element."""
    return x.data_ptr(), x.stride(), x.element_size()


def _overlap(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether rows of heads share bytes; heads of one row that lie apart, as in a fused buffer, do not."""
    if one.numel() == 0 or two.numel() == 0:
        return False
    spans = []
    for x in (one, two):
        steps = [(n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)]
        first, size = x.data_ptr(), x.element_size()
        row = (sum(steps[-2:]) + 1) * size
        spans.append((first, first + (sum(steps) + 1) * size, x.stride(-3) * size, row))
    (a, a_end, a_step, a_row), (b, b_end, b_step, b_row) = spans
    if a >= b_end or b >= a_end:
        return False
    apart = a_step == b_step > 0 and b_row <= (a - b) % b_step <= b_step - a_row
    whole = all(x.ndim == 3 or x.stride(0) % x.stride(1) == 0 for x in (one, two))
    return not (apart and whole)


def _check_steps(name: str, x: torch.Tensor) -> None:
    """Refuse strides that 16-byte accesses cannot follow."""
    if x.numel() == 0:
        return
    size = x.element_size()
    steps = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    whole = all(n == 1 or step * size % 16 == 0 for n, step in steps)
    if x.stride(-1) != 1 or not whole or x.data_ptr() % 16:
        raise _wrong(
            name,
            x,
            "adjacent channels, and heads and rows that start at multiples of 16 bytes",
            f"pass {name}.contiguous(), or align what it is a view of",
        )


def _wrong(name: str, given: Any, expected: str, fix: str) -> ArgumentError:
    got = type(given).__name__
    if isinstance(given, torch.Tensor):
        got = f"{tuple(given.shape)} {given.dtype}, strides {given.stride()}, on {given.device}"
    return ArgumentError(f"{name}: got {got}, expected {expected}. Fix: {fix}")
