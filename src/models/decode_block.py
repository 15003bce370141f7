"""One decoder layer for one new token of each request: five kernels (FuTransformer 3.3, 4.4).

      x ──► qkv ──► q ───────► attention ──► o ──► x₁ ──► gate_up ──► z ──► down ──► y
            │                    ▲  │        ▲     │                        ▲
            ├─► new row ─────────┤  ▼        x     └────────────────────────┘
            └─► its cell ─► cache ──┘

    qkv        weights streamed; row factor, bias, head norms, RoPE; the new row goes to its cell in a 16- or 8-bit
               cache, and to a buffer where attention is to quantise it
    attention  split over the keys; whoever comes last to a head merges its parts, so that there is no kernel for that.
               It rotates, quantises, uses and stores the new row of INT4 and QK4PV8 caches
    o, down    add the residual stream, and write it with its sums of squares for the row factors behind
    gate_up    row factor, activation

Each kernel lets the next one start at once and waits for the one in front before it touches what that may write;
meanwhile projections read their weights, and with ``prefetch`` attention reads keys of earlier steps. Nothing is
planned for a length: a captured step serves requests of any.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from epicute.attention.decode_schedule import DecodeSchedule
from epicute.decode import MOST_ROWS
from epicute.errors import ArgumentError, UnsupportedError, require
from epicute.models.block_spec import PROJECTIONS
from epicute.models.block_state import Stream, matrix
from epicute.models.decode_block_spec import DecodeBlockSpec, chain_schedule
from epicute.models.decode_cache import DecodeCache
from epicute.models.decode_step import DecodeStep
from epicute.models.decode_weights import DecodeWeights
from epicute.models.kernels import GPU, Kernels, Streamed
from epicute.models.shapes import projections

__all__ = ["MOST_LENGTH", "DecodeBlock", "DecodeMemory"]

MOST_LENGTH = 2**24
"""Positions up to which a float32, which RoPE multiplies frequencies by, holds every one."""


@dataclass(frozen=True, eq=False)
class DecodeMemory:
    """Scratch memory that all blocks of a model may share, one step at a time.

    Attributes:
        q: (max_batch, q_width). attended: the same, attention's output. z: (max_batch, intermediate), the activated
            product. All of the activations' dtype.
        new_k, new_v: (max_batch, kv_heads, head_dim), new rows that attention is to quantise; None for caches that the
            projection writes.
        own: (max_batch,) int64, the numbers of these rows, which are their slots where they have no cell.
        attention: what its CTAs leave for each other.
    """

    q: torch.Tensor
    attended: torch.Tensor
    z: torch.Tensor
    new_k: torch.Tensor | None
    new_v: torch.Tensor | None
    own: torch.Tensor
    attention: Any

    @staticmethod
    def plan(
        spec: DecodeBlockSpec, max_batch: int, attention: Any, device: torch.device | str
    ) -> DecodeMemory:
        """Allocate for steps of up to ``max_batch`` requests; ``attention``: its plan."""
        shape, dtype = spec.block.shape, spec.dtype
        rows: dict[str, torch.Tensor | None] = dict.fromkeys(("new_k", "new_v"))
        if spec.cache.writes_records:
            size = (max_batch, shape.kv_heads, shape.head_dim)
            rows = {name: torch.empty(size, dtype=dtype, device=device) for name in rows}
        return DecodeMemory(
            matrix(max_batch, shape.q_width, dtype, device),
            matrix(max_batch, shape.q_width, dtype, device),
            matrix(max_batch, shape.intermediate, dtype, device),
            own=torch.arange(max_batch, device=device),
            attention=attention.workspace(max_batch, device),
            **rows,
        )

    @property
    def rows(self) -> int:
        """Requests that fit."""
        return self.q.shape[0]

    def check(self, spec: DecodeBlockSpec, max_batch: int, device: torch.device) -> None:
        """Refuse memory that was planned for another spec, device or fewer requests."""
        shape = spec.block.shape
        right = (
            (self.q.shape[1], self.z.shape[1]) == (shape.q_width, shape.intermediate)
            and self.q.dtype == spec.dtype
            and (self.new_k is not None) == spec.cache.writes_records
            and (self.new_k is None or self.new_k.shape[1:] == (shape.kv_heads, shape.head_dim))
        )
        require(
            right and self.rows >= max_batch and self.q.device == device,
            "memory",
            f"{self.rows} requests, q {self.q.dtype} on {self.q.device}",
            f"{max_batch} requests for {spec} on {device}",
            "share the memory of blocks with one spec, planned for the largest max_batch",
        )


@dataclass(frozen=True, eq=False)
class DecodeBlock:
    """A planned layer. Make it with ``plan``, or from another layer's with ``with_weights``.

    Attributes:
        weights: on the device; ``weights.spec`` says which cache is read.
        inv_freq: (rotary_dim / 2,) float32, rotary frequencies with whatever scaling the model has.
        max_len: tokens of the longest request.
        memory: scratch; it bounds the requests of a step.
        projections: what runs ``qkv``, ``o``, ``gate_up`` and ``down``.
        attention: what runs attention.
        kernels: where they are from.
    """

    weights: DecodeWeights
    inv_freq: torch.Tensor
    max_len: int
    memory: DecodeMemory
    projections: dict[str, Streamed]
    attention: Any
    kernels: Kernels = GPU

    @staticmethod
    def plan(
        weights: DecodeWeights,
        inv_freq: torch.Tensor,
        *,
        max_batch: int,
        max_len: int,
        batch_invariant: bool = False,
        prefetch: bool = False,
        schedule: DecodeSchedule | None = None,
        memory: DecodeMemory | None = None,
        kernels: Kernels = GPU,
    ) -> DecodeBlock:
        """Choose, compile (or load) the kernels and allocate all that a step needs. Waits for the device.

        Args:
            weights: of the layer, on the device that will run it, packed beside the cache that it will read.
            inv_freq: (rotary_dim / 2,) float32 on that device.
            max_batch: most requests of a step, rows that take no part included.
            max_len: tokens of the longest request. Bounds what page tables may hold; decides no kernel.
            batch_invariant: a request's result has the same bits whatever else is in the batch, however large that is
                and wherever its pages are. Over QK4PV8 caches attention is so in any case.
            prefetch: attention reads lengths, page tables and keys of earlier steps before the kernels in front of it
                are done. The caller vouches that none of those in a chain without a full edge between writes them:
                between a copy to ``step`` and ``run`` stands another kernel or copy that is no part of the chain.
            schedule: of attention, instead of ``chain_schedule``'s.
            memory: scratch of a block with the same spec, to share; by default the block's own.
            kernels: where to get the kernels from.

        Raises:
            ArgumentError, UnsupportedError: before anything is compiled; CompileError.
        """
        spec, device = weights.spec, weights.device
        _check_counts(max_batch, max_len)
        half = spec.block.rotary_dim // 2
        require(
            inv_freq.shape == (half,)
            and inv_freq.dtype == torch.float32
            and inv_freq.device == device,
            "inv_freq",
            f"{tuple(inv_freq.shape)} {inv_freq.dtype} on {inv_freq.device}",
            f"({half},) float32 on {device}",
            "compute theta ** (-2 j / rotary_dim) in float64 and round once",
        )
        # Code is loaded where the weights are, so that a first run may be captured there.
        with _on(device):
            attention = _attention(spec, batch_invariant, prefetch, schedule, kernels)
            found = {}
            for name in PROJECTIONS:
                options = {"max_rows": max_batch, "batch_invariant": batch_invariant}
                options |= spec.options(name)
                packed = getattr(weights, name)
                found[name] = kernels.few_rows(spec.compositions[name], packed, options)
        memory = memory or DecodeMemory.plan(spec, max_batch, attention, device)
        memory.check(spec, max_batch, device)
        block = DecodeBlock(weights, inv_freq, max_len, memory, found, attention, kernels)
        return block.with_weights(weights)

    @staticmethod
    def chain(
        layers: Sequence[DecodeWeights], inv_freq: torch.Tensor, **options: Any
    ) -> list[DecodeBlock]:
        """The blocks of a model, first to last: one set of kernels and one scratch memory.

        Args:
            layers: weights of all of them.
            inv_freq, options: as of ``plan``.

        Raises:
            ArgumentError: no layers, or layers of different specs or devices; as ``plan``.
        """
        require(len(layers) > 0, "layers", "none", "one at least", "pass the weights of a model")
        first = DecodeBlock.plan(layers[0], inv_freq, **options)
        return [first, *(first.with_weights(weights) for weights in layers[1:])]

    def with_weights(self, weights: DecodeWeights) -> DecodeBlock:
        """The same kernels and memory with another layer's weights. Waits for the device.

        Raises:
            ArgumentError: weights of another spec or on another device.
        """
        mine = self.weights
        require(
            weights.spec == mine.spec and weights.device == mine.device,
            "weights",
            f"{weights.spec} on {weights.device}",
            f"{mine.spec} on {mine.device}",
            "plan that layer by itself",
        )
        if weights.device.type == "cuda":
            for name in PROJECTIONS:
                self.projections[name].admit(getattr(weights, name))
        return replace(self, weights=weights)

    @property
    def spec(self) -> DecodeBlockSpec:
        """What the kernels were compiled for."""
        return self.weights.spec

    @property
    def max_batch(self) -> int:
        """Most requests of a step."""
        return self.memory.rows

    def run(self, x: Stream, step: DecodeStep, cache: DecodeCache, out: Stream) -> Stream:
        """The layer, on the current stream: allocates nothing, waits for nothing, and can be captured.

        Args:
            x: (B, hidden), a row for each request; rows that take no part may hold anything.
            step: where their tokens stand.
            cache: of this layer; it is read, and holds the new tokens afterwards.
            out: memory for B rows of the result, and for x₁ meanwhile; may be ``x``.

        Returns:
            ``out``. Rows that take no part are 0.

        Raises:
            ArgumentError: before the first launch, where an argument is not what was planned.
            UnsupportedError: a layer on the CPU.
        """
        rows = x.rows
        self._check(x, step, cache, out)
        if rows == 0:
            return out
        weights, memory = self.weights, self.memory
        q, attended, z = (t[:rows] for t in (memory.q, memory.attended, memory.z))
        stored = {"out": out.values, "sumsq_out": out.sumsq}

        self._project("qkv", x.values, self._qkv_operands(x, step, cache, q), weights.x_gain)
        self._attend(q, attended, step, cache.first(rows))
        self._project("o", attended, {"residual": x.values, "slots": step.slots, **stored})
        self._project("gate_up", out.values, {"sumsq": out.sumsq, "out": z}, weights.x1_gain)
        self._project("down", z, {"residual": out.values, **stored})
        return out

    # --- the steps ---

    def _project(
        self,
        name: str,
        x: torch.Tensor,
        operands: dict[str, torch.Tensor],
        gain: torch.Tensor | None = None,
    ) -> None:
        if gain is not None:
            operands["norm_gain"] = gain
        self.projections[name].run(x, getattr(self.weights, name), **operands)

    def _qkv_operands(
        self, x: Stream, step: DecodeStep, cache: DecodeCache, q: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        weights, memory, rows = self.weights, self.memory, x.rows
        found = {
            "sumsq": x.sumsq,
            "positions": step.positions,
            "slots": step.slots,
            "inv_freq": self.inv_freq,
            "q_out": q,
        }
        for name in ("bias", "q_gain", "k_gain"):
            given = getattr(weights, name)
            if given is not None:
                found[name if name == "bias" else f"{name[0]}_head_gain"] = given
        if cache.main is not None:
            found |= cache.main.cells()
        if memory.new_k is None or memory.new_v is None:
            return found
        for name, buffer in (("k", memory.new_k), ("v", memory.new_v)):
            if cache.main is not None:
                found[f"{name}_out"] = buffer[:rows].flatten(1)
            else:
                found[f"{name}_cells"] = buffer[None]
        if cache.main is None:
            found["slots"] = memory.own[:rows]
        return found

    def _attend(
        self, q: torch.Tensor, out: torch.Tensor, step: DecodeStep, cache: DecodeCache
    ) -> None:
        shape, memory, rows = self.spec.block.shape, self.memory, q.shape[0]
        q, out = (x.view(rows, shape.heads, shape.head_dim) for x in (q, out))
        given: dict[str, Any] = {
            "out": out,
            "kv_lengths": step.lengths,
            "workspace": memory.attention,
        }
        if step.page_table is not None:
            given["page_table"] = step.page_table
        if memory.new_k is not None and memory.new_v is not None:
            given |= {"new_k": memory.new_k[:rows], "new_v": memory.new_v[:rows]}
        main = cache.main
        if cache.memory is not None:
            self._mixed(cache).run(q, cache.memory, means=cache.means, **given)
        elif cache.records is not None:
            self.attention.run(q, cache.records, **given)
        else:
            assert main is not None
            if main.k_scale is not None:
                given |= {"k_scale": main.k_scale, "v_scale": main.v_scale}
            self.attention.run(q, (main.k, main.v), **given)

    def _mixed(self, cache: DecodeCache) -> Any:
        """The plan for a pool of this many pages: its code does not depend on them."""
        assert cache.memory is not None
        pages = cache.memory.records.shape[0]
        if self.attention.cache.pages == pages:
            return self.attention
        found = copy(self.attention)
        found.cache = replace(found.cache, pages=pages)
        return found

    # --- checks ---

    # What is wrong is put into words only where something is: this runs with every call.

    def _check(self, x: Stream, step: DecodeStep, cache: DecodeCache, out: Stream) -> None:
        spec, rows = self.spec, x.rows
        if self.kernels is GPU and self.weights.device.type == "cpu":
            raise UnsupportedError(
                "weights: got a layer on the CPU, expected one on a CUDA device. "
                "Fix: move it there, or run the model by Llama.from_folder(…, device='cpu')"
            )
        x.check("x", spec.block, rows)
        out.check("out", spec.block, rows)
        if rows > self.max_batch:
            raise ArgumentError(
                f"x: got {rows} rows, expected at most {self.max_batch}, as planned. "
                "Fix: plan with a larger max_batch"
            )
        if step.rows != rows:
            raise ArgumentError(
                f"step: got {step.rows} requests, expected {rows}, as x has rows. "
                "Fix: describe every row; one that takes no part has slot -1 and length 0"
            )
        form = cache.form
        if form != spec.cache:
            raise ArgumentError(
                f"cache: got {form}, expected {spec.cache}. Fix: plan for this cache, with weights.reading(cache.form)"
            )
        if (step.page_table is None) != (form.page is None):
            raise ArgumentError(
                f"step.page_table: got {'none' if step.page_table is None else 'one'}, expected "
                f"{'none' if form.page is None else 'one'} for {form}. Fix: DecodeStep.of(lengths, page, table)"
            )
        room = cache.tokens
        if step.page_table is not None and form.page is not None:
            room = step.page_table.shape[1] * form.page
        assert room is not None
        if room >= self.max_len + (form.page or 1):
            raise ArgumentError(
                f"step.page_table: got room for {room} tokens of a request, expected at most {self.max_len} and the "
                "rest of a page, as planned. Fix: plan with a larger max_len"
            )

    def __str__(self) -> str:
        where = f"up to {self.max_batch} requests of {self.max_len} tokens"
        lines = []
        sizes = projections(self.spec.block.shape)
        for name in PROJECTIONS:
            n, k = sizes[name]
            title = self.spec.compositions[name].title
            lines.append((name, f"{n} x {k}", title))
            if name == "qkv":
                lines.append(("attention", "", str(getattr(self.attention, "spec", ""))))
        widths = [max(len(line[i]) for line in lines) for i in range(2)]
        rows = ["  ".join(c.ljust(w) for c, w in zip(x, (*widths, 0), strict=True)) for x in lines]
        return "\n".join([str(self.spec), where, *(f"  {row.rstrip()}" for row in rows)])


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _check_counts(max_batch: int, max_len: int) -> None:
    require(
        type(max_batch) is int and 1 <= max_batch <= MOST_ROWS,
        "max_batch",
        max_batch,
        f"1 to {MOST_ROWS} requests",
        "run larger batches as prefills of one token a request, whose GEMM reads the weight once for all",
        UnsupportedError if type(max_batch) is int and max_batch > MOST_ROWS else ArgumentError,
    )
    require(
        type(max_len) is int and 1 <= max_len <= MOST_LENGTH,
        "max_len",
        max_len,
        f"1 to {MOST_LENGTH} tokens, whose positions are float32 numbers",
        "give the longest request",
    )


def _attention(
    spec: DecodeBlockSpec,
    batch_invariant: bool,
    prefetch: bool,
    schedule: DecodeSchedule | None,
    kernels: Kernels,
) -> Any:
    """What runs attention over the spec's cache."""
    kind = spec.cache.records
    if kind is None:
        wanted = spec.attention(batch_invariant, prefetch)
        return kernels.decode(wanted, chain_schedule(wanted) if schedule is None else schedule)
    require(
        schedule is None,
        "schedule",
        schedule,
        "None for a QK4PV8 cache, whose kernel has schedules of its own",
        "leave it out",
    )
    options = {"scale": spec.block.softmax_scale, "prefetch": prefetch}
    return kernels.mixed_decode(kind, spec.dtype, options)
