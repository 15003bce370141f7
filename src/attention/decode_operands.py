"""Operands of decode attention: checked, and turned into the kernel's integers."""

from __future__ import annotations

from typing import Any

import torch

from epicute.attention.decode_arguments import DECODE_ARGUMENTS
from epicute.attention.decode_schedule import DecodeSchedule
from epicute.attention.decode_spec import CACHES, DecodeSpec
from epicute.attention.plan import _overlap, _place
from epicute.errors import ArgumentError, require
from epicute.kv.records import RecordPool
from epicute.layouts.kv_int4 import SCALE_BYTES, Int4Record
from epicute.quant.launch import wrong

__all__ = ["Binder"]

MOST_REQUESTS = 2**20
"""Requests that 32-bit arithmetic on units can count."""


class Binder:
    """Checks operands of one spec."""

    def __init__(self, spec: DecodeSpec, schedule: DecodeSchedule) -> None:
        self.spec, self.schedule = spec, schedule

    def workspace(self, batch: int, ctas: int) -> tuple[int, int]:
        """(int32 counters, float32 of partial results) for ``batch`` requests on ``ctas`` CTAs.

        Raises ArgumentError for a batch that is no count.
        """
        require(
            type(batch) is int and 0 <= batch <= MOST_REQUESTS,
            "batch",
            batch,
            f"0 to {MOST_REQUESTS} requests",
            "pass the largest batch",
        )
        heads = self.schedule.cut(self.spec).heads
        columns = self.schedule.columns(self.spec)
        return batch * heads, self._slots(batch, ctas) * columns * (2 + self.spec.head_dim)

    def _slots(self, batch: int, ctas: int) -> int:
        parts = self.schedule.parts(self.spec)
        return 4 * ctas if parts is None else batch * self.schedule.cut(self.spec).heads * parts

    def check_device(self, q: Any) -> None:
        """Refuse a q that is not on a GPU."""
        found = isinstance(q, torch.Tensor)
        require(
            found and q.device.type == "cuda",
            "q",
            f"a tensor on {q.device}" if found else type(q).__name__,
            "a CUDA tensor",
            "move q and the cache to a Hopper GPU; without one, use epicute.models' CPU backend",
        )

    def bind(self, q: Any, cache: Any, ctas: int, given: dict[str, Any]) -> tuple[int, ...] | None:
        """The kernel's integers; None for a batch of none. ``given``: all other operands by name.

        Raises ArgumentError.
        """
        given = {name: x for name, x in given.items() if x is not None}
        self._check_names(given)
        spec = self.spec
        found = dict.fromkeys(DECODE_ARGUMENTS, 0)
        batch = self._take_rows(found, "q", q, spec.heads, spec.dtype, None)
        self._take_rows(found, "out", given["out"], spec.heads, spec.out_dtype, batch)
        if spec.append:
            for name in ("new_k", "new_v"):
                self._take_rows(found, name, given[name], spec.kv_heads, spec.dtype, batch)
        self._take_cache(found, cache, batch, q)
        self._take_vectors(found, given, batch)
        self._take_workspace(found, given["workspace"], batch, ctas)
        tensors = [cache] if isinstance(cache, torch.Tensor) else list(cache)
        workspace = given["workspace"]
        tensors += [x for x in given.values() if isinstance(x, torch.Tensor)]
        for tensor in (*tensors, workspace.counters, workspace.data):
            if tensor.device != q.device:
                raise wrong("operands", tensor, f"tensors on {q.device}", "move all to one device")
        self._check_apart(q, given["out"], [q, *tensors[: 1 if spec.packed else 2]])
        found["batch"], found["ctas"] = batch, ctas
        return tuple(found.values()) if batch else None

    def _check_apart(self, q: torch.Tensor, out: torch.Tensor, read: list[torch.Tensor]) -> None:
        """Refuse an output over what is read. In the place of q it may be, as a head is read before it is written."""
        for x in read:
            if not (x is q and _place(x) == _place(out)) and _overlap(out, x):
                name = "q" if x is q else "the cache"
                raise wrong(
                    "out", out, f"memory apart from {name}", f"allocate it apart from {name}"
                )

    def _check_names(self, given: dict[str, Any]) -> None:
        """Refuse operands that the spec does not know, and the lack of those it needs."""
        spec = self.spec
        needed = {"out", "kv_lengths", "workspace"}
        for wanted, names in (
            (spec.page is not None, ("page_table",)),
            (spec.append, ("new_k", "new_v")),
            (spec.sinks, ("sinks",)),
            (spec.lse, ("lse",)),
            (spec.cache == "fp8", ("k_scale", "v_scale")),
            (spec.out_is_fp8, ("out_scale", "amax", "saturated", "nans")),
        ):
            needed |= set(names) if wanted else set()
        missing, unknown = needed - set(given), set(given) - needed
        require(
            not missing and not unknown,
            "operands",
            ", ".join(
                [f"no {name}" for name in sorted(missing)]
                + [f"{n} too many" for n in sorted(unknown)]
            ),
            ", ".join(sorted(needed)),
            f"bind what this spec takes ({spec})",
        )
        for name, x in given.items():
            if name != "workspace" and not isinstance(x, torch.Tensor):
                raise ArgumentError(
                    f"{name}: got {type(x).__name__}, expected a tensor. Fix: make a tensor of it"
                )

    def _take_rows(
        self,
        found: dict[str, int],
        name: str,
        x: Any,
        heads: int,
        dtype: torch.dtype,
        batch: int | None,
    ) -> int:
        """Check new tokens' rows and put them among the arguments; requests."""
        spec = self.spec
        shape = (spec.rows, heads, spec.head_dim)
        if spec.rows == 1 and isinstance(x, torch.Tensor) and x.ndim == 3:
            x = x.unsqueeze(1)
        expected = f"({'B' if batch is None else batch}, {', '.join(map(str, shape))}) {dtype}"
        if spec.rows == 1:
            expected += ", or without the axis of one row"
        if (
            not isinstance(x, torch.Tensor)
            or x.dtype != dtype
            or x.ndim != 4
            or tuple(x.shape[1:]) != shape
            or (batch is not None and x.shape[0] != batch)
            or x.shape[0] > MOST_REQUESTS
        ):
            raise wrong(name, x, expected, "reshape or convert it, or plan for it")
        _take(found, name, x, ("batch", "row", "head"))
        return x.shape[0]

    def _take_cache(self, found: dict[str, int], cache: Any, batch: int, q: torch.Tensor) -> None:
        spec = self.spec
        if spec.packed:
            self._take_records(found, cache, batch)
            return
        tokens = "max_len" if spec.page is None else spec.page
        pages = batch if spec.page is None else "pages"
        dtype = CACHES[spec.cache]
        expected = f"({pages}, {tokens}, {spec.kv_heads}, {spec.head_dim}) {dtype}"
        if not isinstance(cache, tuple) or len(cache) != 2:
            raise wrong("cache", cache, f"(k, v), each {expected}", "pass keys and values")
        for name, x in zip("kv", cache, strict=True):
            if (
                not isinstance(x, torch.Tensor)
                or x.dtype != dtype
                or x.ndim != 4
                or tuple(x.shape[2:]) != (spec.kv_heads, spec.head_dim)
                or (spec.page is None and x.shape[0] != batch)
                or (spec.page is not None and x.shape[1] != spec.page)
                or x.shape[1] >= 2**31
            ):
                raise wrong(name, x, expected, "HND pools: pass pool.transpose(1, 2)")
            if x.shape != cache[0].shape:
                raise wrong(
                    name,
                    x,
                    f"the shape of k, {tuple(cache[0].shape)}",
                    "pass keys with their values",
                )
            # Nothing is read of an empty one, but the hardware wants an address.
            _take(found, name, x, ("page", "token", "head"))
            if x.numel() == 0:
                found[name] = q.data_ptr()
        found["pages"], found["tokens"] = cache[0].shape[:2]

    def _take_records(self, found: dict[str, int], memory: Any, batch: int) -> None:
        spec = self.spec
        each = 2 * (spec.row_bytes + SCALE_BYTES)
        if not isinstance(memory, torch.Tensor) or memory.ndim != 3:
            shape = f"(pages, {spec.kv_heads}, record bytes) uint8"
            raise wrong("cache", memory, shape, "allocate it with Int4Cache.allocate()")
        tokens = memory.shape[2] // each if spec.page is None else spec.page
        record = Int4Record(tokens, spec.head_dim)
        pool = RecordPool.describe(memory, tokens, record.bytes)
        require(
            pool.kv_heads == spec.kv_heads and (spec.page is not None or pool.pages == batch),
            "cache.shape",
            tuple(memory.shape),
            f"({'pages' if spec.page else batch}, {spec.kv_heads}, {record.bytes})",
            "allocate it for this spec",
        )
        found["k"], found["tokens"], found["pages"] = memory.data_ptr(), tokens, pool.pages
        found["k_page"], found["k_head"] = pool.page_stride, pool.head_stride

    def _take_vectors(self, found: dict[str, int], given: dict[str, Any], batch: int) -> None:
        """Check the other operands and put their addresses among the arguments."""
        spec = self.spec
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "kv_lengths": ((batch,), torch.int32),
            "sinks": ((spec.heads,), torch.float32),
            "k_scale": ((spec.kv_heads,), torch.float32),
            "v_scale": ((spec.kv_heads,), torch.float32),
            "out_scale": ((1,), torch.float32),
            "amax": ((1,), torch.float32),
            "saturated": ((1,), torch.int64),
            "nans": ((1,), torch.int64),
        }
        for name, x in given.items():
            if name in shapes:
                shape, dtype = shapes[name]
                if x.dtype != dtype or tuple(x.shape) != shape or not x.is_contiguous():
                    raise wrong(name, x, f"contiguous {shape} {dtype}", "convert it once, ahead")
                found[name] = x.data_ptr()
            elif name == "page_table":
                if x.dtype != torch.int32 or x.ndim != 2 or x.shape[0] != batch:
                    raise wrong(name, x, f"({batch}, pages) int32", "one row per request")
                if x.shape[1] > 1 and x.stride(1) != 1:
                    raise wrong(name, x, "adjacent entries of a row", "call .contiguous()")
                found[name], found["table_row"] = x.data_ptr(), x.stride(0)
            elif name == "lse":
                self._take_lse(found, x, batch)

    def _take_lse(self, found: dict[str, int], lse: torch.Tensor, batch: int) -> None:
        spec = self.spec
        if spec.rows == 1 and lse.ndim == 2:
            lse = lse.unsqueeze(2)
        wanted = (batch, spec.heads, spec.rows)
        adjacent = lse.ndim == 3 and (spec.rows == 1 or lse.stride(2) == 1)
        if lse.dtype != torch.float32 or tuple(lse.shape) != wanted or not adjacent:
            raise wrong("lse", lse, f"{wanted} float32, rows adjacent", "allocate it so")
        found["lse"] = lse.data_ptr()
        found["lse_batch"], found["lse_head"] = lse.stride(0), lse.stride(1)

    def _take_workspace(self, found: dict[str, int], workspace: Any, batch: int, ctas: int) -> None:
        counters, data = (getattr(workspace, name, None) for name in ("counters", "data"))
        needed = self.workspace(batch, ctas)
        fits = [
            isinstance(x, torch.Tensor)
            and x.dtype == dtype
            and x.is_contiguous()
            and x.numel() >= count
            and x.data_ptr() % 16 == 0
            for x, dtype, count in zip(
                (counters, data), (torch.int32, torch.float32), needed, strict=True
            )
        ]
        require(
            all(fits),
            "workspace",
            f"{type(workspace).__name__} of {getattr(counters, 'shape', None)}, "
            f"{getattr(data, 'shape', None)}",
            f"{needed[0]} counters and {needed[1]} floats for {batch} requests, at multiples of 16 bytes",
            f"pass plan.workspace({batch}), or a larger one",
        )
        stats = self._slots(batch, ctas) * self.schedule.columns(self.spec) * 2
        assert counters is not None
        assert data is not None
        found["counters"], found["stats"] = counters.data_ptr(), data.data_ptr()
        found["partials"] = data.data_ptr() + 4 * stats


def _take(found: dict[str, int], name: str, x: torch.Tensor, axes: tuple[str, str, str]) -> None:
    """Address and strides of heads. An axis of one element has no step, and views give it any."""
    steps = [s if n > 1 else x.shape[-1] for n, s in zip(x.shape, x.stride(), strict=True)]
    if x.numel():
        size = x.element_size()
        whole = all(step > 0 and step * size % 16 == 0 for step in steps[:3])
        if x.stride(-1) != 1 or not whole or x.data_ptr() % 16:
            raise wrong(
                name,
                x,
                "adjacent channels, and heads that start at multiples of 16 bytes",
                f"pass {name}.contiguous(), or align what it is a view of",
            )
    found[name] = x.data_ptr()
    for axis, step in zip(axes, steps[:3], strict=True):
        found[f"{name}_{axis}"] = step
