"""What flows through a block and what stays with it: residual stream, FP8 scales, KV cache, scratch memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from epicute.errors import ArgumentError, require
from epicute.kv import PAGE_SIZES, KVPool
from epicute.kv.cache import KVCache
from epicute.models.block_spec import BlockSpec
from epicute.quant import DelayedScale, quantize_rows
from epicute.quant.group import DelayedGroup

__all__ = ["BlockScales", "LayerCache", "Stream", "Workspace", "model_sites"]

FP8 = torch.float8_e4m3fn

SITES = ("attention", "x1", "z", "y")
"""What a block writes in FP8, in that order."""

ALIGNED = 256
"""Bytes that each part of the scratch memory starts at a multiple of."""


@dataclass(frozen=True, eq=False)
class Stream:
    """The residual stream between two projections, never normalised.

    Attributes:
        values: (M, hidden) in the spec's dtype.
        sumsq: (M, ceil(hidden / 64)) float32, sums of squares of ``values`` over 64 columns.
        codes: (M, hidden) float8_e4m3fn, the form that FP8 projections read; None without FP8.
        scale: the scale of ``codes``: (1,) float32, the very tensor of the site that wrote them, which holds until that
            site's next invocation; or (M,) with row-wise scales.
    """

    values: torch.Tensor
    sumsq: torch.Tensor
    codes: torch.Tensor | None = None
    scale: torch.Tensor | None = None

    @staticmethod
    def allocate(spec: BlockSpec, rows: int, device: torch.device | str = "cpu") -> Stream:
        """Memory for ``rows`` rows, not initialised; a delayed scale comes with what is written."""
        hidden = spec.shape.hidden
        fp8 = spec.format == "fp8"
        return Stream(
            matrix(rows, hidden, spec.dtype, device),
            torch.empty(rows, spec.partials, dtype=torch.float32, device=device),
            matrix(rows, hidden, FP8, device) if fp8 else None,
            torch.empty(rows, dtype=torch.float32, device=device) if spec.rowwise else None,
        )

    @staticmethod
    @torch.no_grad()
    def of(
        spec: BlockSpec,
        values: torch.Tensor,
        entry: DelayedScale | None = None,
        slots: torch.Tensor | None = None,
        gain: torch.Tensor | None = None,
    ) -> Stream:
        """The stream that enters a first block, from its values.

        Args:
            spec: the block's.
            values: (M, hidden), rounded to the spec's dtype.
            entry: delayed scaling's state of what enters the model. It records what it sees; roll it once an
                invocation.
            slots: (M,) int64 of the requests: rows of none (-1) become zeros, as the embedding makes them, and are not
                recorded. None: every row is a token's.
            gain: (hidden,) float32, the first layer's ``x_gain``, which the codes have in them; None with folded gains.
        """
        require(
            slots is None or (slots.dtype == torch.int64 and slots.shape == values.shape[:1]),
            "slots",
            None if slots is None else f"{tuple(slots.shape)} {slots.dtype}",
            f"({values.shape[0]},) int64, one of each row",
            "pass requests.slots",
        )
        require(
            (entry is not None) == spec.delayed,
            "entry",
            "None" if entry is None else "a DelayedScale",
            "a DelayedScale for delayed scales, None otherwise",
            "pass DelayedScale.create(device) of this request group",
        )
        require(
            (gain is not None) == (spec.gains == "operand"),
            "gain",
            None if gain is None else tuple(gain.shape),
            "the first layer's x_gain" if spec.gains == "operand" else "None, as gains are folded",
            "pass weights.x_gain of the first layer",
        )
        found = Stream.allocate(spec, values.shape[0], values.device)
        if slots is not None:
            values = torch.where((slots >= 0)[:, None], values, 0.0)
        found.values.copy_(values)
        wide = torch.zeros(values.shape[0], spec.partials * 64, device=values.device)
        wide[:, : spec.shape.hidden] = found.values
        found.sumsq.copy_(wide.unflatten(1, (spec.partials, 64)).square().sum(2))
        if found.codes is None:
            return found
        read = found.values if gain is None else found.values.float() * gain
        codes, scale = quantize_rows(read) if entry is None else entry.quantize(read)
        found.codes.view(torch.uint8).copy_(codes.view(torch.uint8))
        return replace(found, scale=scale)

    @property
    def rows(self) -> int:
        """M."""
        return self.values.shape[0]

    def first(self, rows: int) -> Stream:
        """The first ``rows`` rows, the same memory."""
        scale = self.scale
        return Stream(
            self.values[:rows],
            self.sumsq[:rows],
            None if self.codes is None else self.codes[:rows],
            scale if scale is None or scale.shape == (1,) else scale[:rows],
        )

    def check(self, name: str, spec: BlockSpec, rows: int) -> None:
        """Refuse, as the argument ``name``, a stream that a block of ``spec`` does not take for ``rows`` rows.

        What is only written to (``"out"``) has no delayed scale yet.
        """
        wanted = (rows, spec.shape.hidden)
        if self.values.shape != wanted or self.values.dtype != spec.dtype:
            raise ArgumentError(
                f"{name}.values: got {tuple(self.values.shape)} {self.values.dtype}, expected "
                f"{wanted} {spec.dtype}. Fix: use Stream.of, Stream.allocate and Stream.first"
            )
        fp8, later = spec.format == "fp8", name == "out" and spec.delayed
        scaled = later or (self.scale is not None) == fp8
        if (self.codes is not None) != fp8 or not scaled:
            raise ArgumentError(
                f"{name}.codes: got {'no ' * (self.codes is None)}codes and "
                f"{'no ' * (self.scale is None)}scale, expected {'both' if fp8 else 'neither'} for "
                f"{spec.format} weights. Fix: use Stream.of for what enters, and what run returned "
                "for what goes on"
            )


@dataclass(frozen=True, eq=False)
class BlockScales:
    """Delayed scaling's states of the four FP8 activations that one block writes, for one request group.

    A state belongs to its writer: what a block reads, the block before it has written, in the same invocation. So a
    block may roll its own states when it starts, and those of all blocks may be rolled at once.

    Attributes:
        attention: attention's output, which the output projection reads.
        x1: the stream between attention and MLP, which gate and up read.
        z: the activated product, which the down projection reads.
        y: the stream that leaves, which the next block's QKV projection reads: the next layer's x. None behind the
            last layer, where nothing reads it in FP8.
        group: these as a group, which one launch rolls; None where they are states without one.
    """

    attention: DelayedScale
    x1: DelayedScale
    z: DelayedScale
    y: DelayedScale | None = None
    group: DelayedGroup | None = None

    @staticmethod
    def create(
        device: torch.device | str = "cpu",
        history: int = 16,
        initial: float = 1.0,
        margin: int = 0,
        *,
        last: bool = False,
    ) -> BlockScales:
        """Fresh states; see ``DelayedScale.create``, and ``PrefillBlock.calibrate`` for scales that fit at once.

        ``last``: of a model's last layer, as ``BlockSpec.last`` says.
        """
        sites = SITES[:3] if last else SITES
        group = DelayedGroup.create(sites, device, history=history, initial=initial, margin=margin)
        return BlockScales(**{site: group[site] for site in sites}, group=group)

    @staticmethod
    def of(group: DelayedGroup, layer: int) -> BlockScales:
        """One layer's states among a model's, whose group is named by ``model_sites``; that rolls all of them at once.

        Raises:
            ArgumentError: a group of other sites.
        """
        names = [f"{layer}.{site}" for site in SITES[:3]]
        if f"{layer + 1}.x" in group.names:
            names.append(f"{layer + 1}.x")
        part = group.part(names)
        states = {site: group[name] for site, name in zip(SITES, part, strict=False)}
        return BlockScales(**states, group=part)

    @property
    def sites(self) -> tuple[DelayedScale, ...]:
        """The states in the order in which they are written."""
        return tuple(self._named.values())

    @property
    def _named(self) -> dict[str, DelayedScale]:
        found = {site: getattr(self, site) for site in SITES}
        return {site: state for site, state in found.items() if state is not None}

    def roll(self) -> None:
        """Take what the last invocation saw into these scales; see ``DelayedScale.roll``."""
        if self.group is not None:
            self.group.roll()
            return
        for site in self.sites:
            site.roll()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors, as ``x1.scale_used``."""
        return {
            f"{site}.{name}": tensor
            for site, scale in self._named.items()
            for name, tensor in scale.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from ``state``; see ``DelayedScale.load_state_dict``. Refuses names of other sites."""
        found: dict[str, dict[str, torch.Tensor]] = {site: {} for site in self._named}
        for name, tensor in state.items():
            site, _, rest = name.partition(".")
            require(site in found, "state", name, ", ".join(found), "pass a state_dict()")
            found[site][rest] = tensor
        for site, given in found.items():
            getattr(self, site).load_state_dict(given)


def model_sites(layers: int) -> tuple[str, ...]:
    """Names of a model's delayed scales, for one ``DelayedGroup`` that one launch rolls.

    ``0.x`` is what the embedding writes, ``1.x`` what the first layer gives to the second, and so on; what the last one
    gives nobody reads in FP8.
    """
    return tuple(f"{layer}.{site}" for layer in range(layers) for site in ("x", *SITES[:3]))


@dataclass(frozen=True, eq=False)
class LayerCache:
    """One layer's keys and values. Make it with ``of``.

    Attributes:
        k, v: (pages, page, kv_heads, head_dim) of any strides; or dense, (batch, max_len, kv_heads, head_dim).
        page: tokens of a page; None where the cache is dense.
        k_scale, v_scale: (kv_heads,) float32 of FP8 caches: value = code * scale.
        counters: FP8: ``k_cells_saturated``, ``k_cells_nans`` and v's, (1,) int64, which grow.
    """

    k: torch.Tensor
    v: torch.Tensor
    page: int | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    counters: Mapping[str, torch.Tensor]

    @staticmethod
    def of(
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        *,
        dense: bool = False,
    ) -> LayerCache:
        """Check a cache once, which waits for the device.

        Args:
            k, v: paged, or dense with ``dense=True``; bfloat16, float16 or float8_e4m3fn.
            k_scale, v_scale: (kv_heads,) float32 for float8, finite and positive.
            dense: read the first axis as requests and the second as positions.

        Raises:
            ArgumentError: shapes, strides, dtypes or scales that no kernel serves.
        """
        describe = KVPool.dense if dense else KVPool.paged
        pool, other = describe(k), describe(v)
        require(
            pool.sizes == other.sizes and k.dtype == v.dtype and k.device == v.device,
            "v",
            f"{other.sizes} {v.dtype} on {v.device}",
            f"{pool.sizes} {k.dtype} on {k.device}, as k",
            "allocate both alike",
        )
        fp8 = k.dtype == FP8
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            _check_scale(name, scale, pool.kv_heads if fp8 else None, k.device)
        names = [f"{n}_cells_{c}" for n in "kv" for c in ("saturated", "nans")] if fp8 else []
        counters = {n: torch.zeros(1, dtype=torch.int64, device=k.device) for n in names}
        return LayerCache(k, v, None if dense else pool.page_size, k_scale, v_scale, counters)

    @staticmethod
    def of_model(cache: KVCache, layer: int) -> LayerCache:
        """One layer of a model's cache, in pages, with its scales and counters."""
        cells, read = cache.cells(layer), cache.attention(layer)
        counters = {n: x for n, x in cells.items() if n.endswith(("_saturated", "_nans"))}
        return LayerCache(
            cache.keys(layer),
            cache.values(layer),
            cache.spec.page_size,
            read["k_scale"],
            read["v_scale"],
            counters,
        )

    def in_pages(self, page: int = 128) -> tuple[LayerCache, torch.Tensor]:
        """A dense cache seen as pages, the same memory, and its page table (batch, max_len / page) int32.

        Args:
            page: 16, 32, 64 or 128; must divide max_len.
        """
        batch, length = self.k.shape[:2]
        require(
            self.page is None and page in PAGE_SIZES and length % page == 0,
            "page",
            page,
            f"one of {PAGE_SIZES} that divides max_len={length} of a dense cache",
            "round max_len up",
        )
        for name, cells in (("k", self.k), ("v", self.v)):
            require(
                batch == 1 or cells.stride(0) == length * cells.stride(1),
                f"{name}.strides",
                cells.stride(),
                "sequences right behind each other",
                "allocate (batch, max_len, kv_heads, head_dim) contiguous",
            )
        k, v = (x.flatten(0, 1).unflatten(0, (-1, page)) for x in (self.k, self.v))
        table = torch.arange(batch * length // page, dtype=torch.int32, device=self.k.device)
        return replace(self, k=k, v=v, page=page), table.reshape(batch, -1)

    def cells(self) -> dict[str, torch.Tensor]:
        """The operands that ``PlaceKV`` writes K and V by."""
        found = {"k_cells": self.k, "v_cells": self.v, **self.counters}
        if self.k_scale is not None and self.v_scale is not None:
            found |= {"k_cell_scale": self.k_scale, "v_cell_scale": self.v_scale}
        return found


def _check_scale(
    name: str, scale: torch.Tensor | None, heads: int | None, device: torch.device
) -> None:
    shown = "None" if scale is None else f"{tuple(scale.shape)} {scale.dtype} on {scale.device}"
    if heads is None:
        require(scale is None, name, shown, "None for a 16-bit cache", "leave it out")
        return
    require(
        scale is not None
        and scale.shape == (heads,)
        and scale.dtype == torch.float32
        and scale.device == device
        and scale.is_contiguous(),
        name,
        shown,
        f"({heads},) float32 on {device}, one multiplier per KV head",
        "give amax / 448 of typical keys and values",
    )
    assert scale is not None
    require(
        bool((scale.isfinite() & (scale > 0)).all()),
        name,
        scale.tolist(),
        "finite positive multipliers",
        "give amax / 448 of typical keys and values",
    )


@dataclass(frozen=True, eq=False)
class Workspace:
    """Scratch memory that all blocks of a model may share, one invocation at a time.

    z is written when q and attention's output have been read, and takes their place.

    Attributes:
        q: (rows, q_width), the spec's dtype.
        attended: (rows, q_width), attention's output: float8_e4m3fn with delayed scales.
        z: (rows, intermediate), the activated product: float8_e4m3fn with delayed scales.
        attended_codes, z_codes: their codes, with row-wise scales.
        attended_scale, z_scale: (rows,) float32, with row-wise scales.
    """

    q: torch.Tensor
    attended: torch.Tensor
    z: torch.Tensor
    attended_codes: torch.Tensor | None = None
    z_codes: torch.Tensor | None = None
    attended_scale: torch.Tensor | None = None
    z_scale: torch.Tensor | None = None

    @staticmethod
    def plan(spec: BlockSpec, max_rows: int, device: torch.device | str = "cpu") -> Workspace:
        """Allocate for invocations of up to ``max_rows`` rows."""
        require(max_rows >= 1, "max_rows", max_rows, "at least 1", "give the longest prefill")
        width, wide = spec.shape.q_width, spec.shape.intermediate
        written = FP8 if spec.delayed else spec.dtype
        q_bytes = _bytes(max_rows, width, spec.dtype)
        needed = max(q_bytes + _bytes(max_rows, width, written), _bytes(max_rows, wide, written))
        memory = torch.empty(needed, dtype=torch.uint8, device=device)
        extra: dict[str, torch.Tensor] = {}
        if spec.rowwise:
            for name, columns in (("attended", width), ("z", wide)):
                extra[f"{name}_codes"] = matrix(max_rows, columns, FP8, device)
                extra[f"{name}_scale"] = torch.empty(max_rows, device=device)
        return Workspace(
            _carve(memory, 0, max_rows, width, spec.dtype),
            _carve(memory, q_bytes, max_rows, width, written),
            _carve(memory, 0, max_rows, wide, written),
            **extra,
        )

    def check(self, spec: BlockSpec, max_rows: int, device: torch.device) -> None:
        """Refuse memory that was planned for another spec, device or fewer rows."""
        shape, written = spec.shape, FP8 if spec.delayed else spec.dtype
        right = (
            (self.q.shape[1], self.z.shape[1]) == (shape.q_width, shape.intermediate)
            and (self.q.dtype, self.z.dtype) == (spec.dtype, written)
            and (self.z_codes is not None) == spec.rowwise
        )
        require(
            right and self.rows >= max_rows and self.q.device == device,
            "workspace",
            f"{self.rows} rows, q {self.q.dtype}, z {self.z.dtype} on {self.q.device}",
            f"{max_rows} rows for {spec} on {device}",
            "share the workspace of blocks with one spec, planned for the largest max_rows",
        )

    @property
    def rows(self) -> int:
        """Rows that fit."""
        return self.q.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        extra = (self.attended_codes, self.z_codes, self.attended_scale, self.z_scale)
        shared = self.q.untyped_storage().nbytes()
        return shared + sum(x.untyped_storage().nbytes() for x in extra if x is not None)


def _pitch(columns: int, dtype: torch.dtype) -> int:
    """Elements from row to row: whole 16 bytes, as TMA demands."""
    per_vector = 16 // dtype.itemsize
    return -(-columns // per_vector) * per_vector


def matrix(rows: int, columns: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """(rows, columns) whose rows start at multiples of 16 bytes, not initialised."""
    return torch.empty(rows, _pitch(columns, dtype), dtype=dtype, device=device)[:, :columns]


def _bytes(rows: int, columns: int, dtype: torch.dtype) -> int:
    size = rows * _pitch(columns, dtype) * dtype.itemsize
    return -(-size // ALIGNED) * ALIGNED


def _carve(
    memory: torch.Tensor, start: int, rows: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """A matrix at ``start`` bytes of ``memory``."""
    length = rows * _pitch(columns, dtype) * dtype.itemsize
    whole = memory[start : start + length].view(dtype)
    return whole.view(rows, _pitch(columns, dtype))[:, :columns]
