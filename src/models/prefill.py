"""Prefill of one decoder layer: four projections with their epilogues, and attention (FuTransformer 2.1, 3.2).

      x ──► qkv ──► q ───────► attention ──► o ──► x₁ ──► gate_up ──► z ──► down ──► y
            │                    ▲           ▲     │                        ▲
            └─► K, V ─► cache ───┘           x     └────────────────────────┘

    x, x₁, y   the residual stream in 16 bits, its sums of squares, and with FP8 its codes: all three written by the
               projection before. The normalised activation is nowhere: its gain is in the weights, its row factor in
               the epilogue that reads it.
    q          rotated; K and V go to their cache cells from the epilogue, and attention reads them there.
    z, and attention's output, are FP8 where the weights are.

With delayed scales a layer is these five launches, and one more an invocation that rolls the scales. Row-wise scales
cost a launch for each of the four activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from epicute.errors import ArgumentError, UnsupportedError, require
from epicute.models.block_spec import PROJECTIONS, BlockSpec
from epicute.models.block_state import BlockScales, LayerCache, Stream, Workspace
from epicute.models.kernels import GPU, Kernels, Projection
from epicute.models.layer_weights import LayerWeights
from epicute.models.requests import Requests
from epicute.models.shapes import projections
from epicute.quant import DelayedScale
from epicute.quant.calibration import calibrate

__all__ = ["PrefillBlock"]


@dataclass(frozen=True, eq=False)
class PrefillBlock:
    """A planned layer. Make it with ``plan``, or from another layer's with ``with_weights``.

    Attributes:
        weights: on the device; ``weights.spec`` says whether it is a model's last layer.
        inv_freq: (rotary_dim / 2,) float32, rotary frequencies with whatever scaling the model has.
        packed: whether requests come row after row, or padded to one length.
        page: tokens of a cache page; None for a dense cache.
        workspace: scratch memory; it bounds the rows of an invocation.
        projections: what runs ``qkv``, ``o``, ``gate_up`` and ``down``.
        attention: what runs attention.
        rows: what quantises rows, by their width and whether a norm's gain goes in; empty without row-wise scales.
        kernels: where they are from.
    """

    weights: LayerWeights
    inv_freq: torch.Tensor
    packed: bool
    page: int | None
    workspace: Workspace
    projections: dict[str, Projection]
    attention: Any
    rows: dict[tuple[int, bool], Any]
    kernels: Kernels = GPU

    @staticmethod
    def plan(
        weights: LayerWeights,
        inv_freq: torch.Tensor,
        *,
        max_rows: int,
        packed: bool = True,
        page: int | None = 64,
        expected_m: int | None = None,
        workspace: Workspace | None = None,
        kernels: Kernels = GPU,
    ) -> PrefillBlock:
        """Choose, compile (or load) five kernels and allocate all that an invocation needs.

        Args:
            weights: of the layer, on the device that will run it.
            inv_freq: (rotary_dim / 2,) float32 on that device.
            max_rows: most rows of an invocation, padding included.
            packed: requests row after row; False: padded to one length.
            page: tokens of a cache page; None for a dense cache (batch, max_len, kv_heads, head_dim), which padded
                requests alone may have.
            expected_m: rows to choose the schedules for, by default ``max_rows``.
            workspace: scratch memory of a block with the same spec, to share; by default the block's own.
            kernels: where to get the kernels from.

        Raises:
            ArgumentError, UnsupportedError: before anything is compiled; CompileError.
        """
        spec, device = weights.spec, weights.device
        require(
            inv_freq.shape == (spec.rotary_dim // 2,)
            and inv_freq.dtype == torch.float32
            and inv_freq.device == device,
            "inv_freq",
            f"{tuple(inv_freq.shape)} {inv_freq.dtype} on {inv_freq.device}",
            f"({spec.rotary_dim // 2},) float32 on {device}",
            "compute theta ** (-2 j / rotary_dim) in float64 and round once",
        )
        require(
            page is not None or not packed,
            "page",
            None,
            "tokens of a cache page for packed requests",
            "view the dense cache as pages: cache, table = cache.in_pages()",
        )
        workspace = workspace or Workspace.plan(spec, max_rows, device)
        workspace.check(spec, max_rows, device)
        # Code is loaded where the weights are, so that a first run may be captured there.
        here = torch.cuda.device(device) if torch.device(device).type == "cuda" else nullcontext()
        with here:
            attention = kernels.attention(spec.attention(packed, page))
        rows = max_rows if expected_m is None else expected_m
        found = {
            name: kernels.projection(
                spec.compositions[name], getattr(weights, name), spec.options(name, rows)
            )
            for name in PROJECTIONS
        }
        shape, gained = spec.shape, spec.gains == "operand"
        kinds = {(shape.hidden, gained), (shape.q_width, False), (shape.intermediate, False)}
        quantisers = {
            (width, gain): kernels.rows(width, spec.dtype, device, gain)
            for width, gain in sorted(kinds)
            if spec.rowwise
        }
        return PrefillBlock(
            weights, inv_freq, packed, page, workspace, found, attention, quantisers, kernels
        )

    @staticmethod
    def chain(
        layers: Sequence[LayerWeights],
        inv_freq: torch.Tensor,
        *,
        workspace: Workspace | None = None,
        **options: Any,
    ) -> list[PrefillBlock]:
        """The blocks of a model, first to last: one set of kernels, but for what the last layer has of its own, and one
        scratch memory.

        Args:
            layers: weights of all of them, those of the last alone with ``spec.last``.
            inv_freq, workspace: as of ``plan``.
            options: the others of ``plan``.

        Raises:
            ArgumentError: no layers, or layers of different specs or devices; as ``plan``.
        """
        require(len(layers) > 0, "layers", "none", "one at least", "pass the weights of a model")
        found: list[PrefillBlock] = []
        for weights in layers:
            before = found[-1] if found else None
            if before is None or weights.spec == replace(before.spec, last=True):
                shared = workspace if before is None else before.workspace
                found.append(PrefillBlock.plan(weights, inv_freq, workspace=shared, **options))
            else:
                found.append(before.with_weights(weights))
        return found

    def with_weights(self, weights: LayerWeights) -> PrefillBlock:
        """The same kernels and memory with another layer's weights.

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
        return replace(self, weights=weights)

    @property
    def spec(self) -> BlockSpec:
        """What the kernels were compiled for."""
        return self.weights.spec

    def run(
        self,
        x: Stream,
        requests: Requests,
        cache: LayerCache,
        out: Stream,
        scales: BlockScales | None = None,
        *,
        roll: bool = True,
    ) -> Stream:
        """The layer, on the current stream: allocates nothing, waits for nothing, and can be captured.

        Args:
            x: (M, hidden) of all rows, those that are no token included; these may hold anything.
            requests: whose they are.
            cache: of this layer; the tokens' keys and values are written to their slots and read from there.
            out: memory for M rows of the result, and for x₁ meanwhile; may be ``x``.
            scales: delayed scaling's states of this layer and this request group; None without.
            roll: whether to roll the states first. An invocation rolls each state once; a model that has rolled all of
                its blocks' at the start leaves it out here.

        Returns:
            ``out`` with the scale its codes were written with; of a model's last layer without codes. Rows that are no
            token are 0.

        Raises:
            ArgumentError: before the first launch, where an argument is not what was planned; with ``roll``, codes of
                ``x`` that one of ``scales`` has written, and whose scale the roll would change.
            UnsupportedError: a layer on the CPU.
        """
        self._check(x, requests, cache, out, scales)
        if scales is not None and roll and any(x.scale is s.scale_used for s in scales.sites):
            raise ArgumentError(
                "x.scale: got that of a state which this call rolls, expected the scale x was written with. "
                "Fix: give each layer states of its own, or roll them before x is written and pass roll=False"
            )
        at_attention = at_x1 = at_z = at_y = None
        if scales is not None:
            at_attention, at_x1, at_z, at_y = scales.attention, scales.x1, scales.z, scales.y
        if x.rows == 0:
            return self._left(out, at_y)
        if scales is not None and roll:
            self.kernels.roll(scales)
        work = self.workspace
        q, attended, z = (t[: x.rows] for t in (work.q, work.attended, work.z))
        weights = self.weights
        stored = {"out": out.values, "sumsq_out": out.sumsq}

        self._project("qkv", _read(x, x.scale), self._qkv_operands(x, requests, cache, q))
        self._attend(q, attended, requests, cache, at_attention)
        operands = {"residual": x.values, "slots": requests.slots, **stored}
        read = self._quantized("attended", attended, at_attention)
        self._project("o", read, operands | _emitted(out.codes, at_x1, weights.x1_gain))
        self._code_rows(out, weights.x1_gain)
        made = _emitted(z, at_z) or {"out": z}
        scale = out.scale if at_x1 is None else at_x1.scale_used
        self._project("gate_up", _read(out, scale), {"sumsq": out.sumsq, **made})
        operands = {"residual": out.values, **stored}
        read = self._quantized("z", z, at_z)
        self._project("down", read, operands | _emitted(out.codes, at_y, weights.y_gain))
        if not self.spec.last:
            self._code_rows(out, weights.y_gain)
        return self._left(out, at_y)

    def calibrate(
        self,
        x: Stream,
        requests: Requests,
        cache: LayerCache,
        out: Stream,
        scales: BlockScales,
    ) -> int:
        """Give the states scales that fit ``x``, in at most as many runs as there are sites; arguments as of ``run``.

        See ``epicute.quant.calibration.calibrate``: what the states knew is forgotten, their counters are zero, and the
        next ``run`` finds in them what it would see itself. ``x`` and ``out`` must be apart. Cells are written again
        and again with the same keys and values, but the cache's counters stay what they were.

        Returns:
            How many runs it took.
        """
        require(
            x.values.data_ptr() != out.values.data_ptr(),
            "out",
            "the memory of x",
            "memory of its own, since x is read again",
            "allocate it: Stream.allocate(spec, rows, device)",
        )
        counted = {name: counter.clone() for name, counter in cache.counters.items()}
        runs = calibrate(
            scales.sites,
            lambda: self.run(x, requests, cache, out, scales, roll=False),
            lambda: self.kernels.roll(scales),
            most=len(scales.sites),
        )
        for name, counter in counted.items():
            cache.counters[name].copy_(counter)
        return runs

    # --- the steps ---

    def _project(
        self,
        name: str,
        read: Read,
        operands: dict[str, torch.Tensor],
    ) -> None:
        x, scale = read
        if scale is not None:
            operands["scale"] = scale
        self.projections[name].run(x, getattr(self.weights, name), **operands)

    def _qkv_operands(
        self, x: Stream, requests: Requests, cache: LayerCache, q: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        weights = self.weights
        found = {
            "sumsq": x.sumsq,
            "positions": requests.positions,
            "slots": requests.slots,
            "inv_freq": self.inv_freq,
            "q_out": q,
            **cache.cells(),
        }
        optional = (
            ("bias", weights.bias),
            ("q_head_gain", weights.q_gain),
            ("k_head_gain", weights.k_gain),
        )
        return found | {name: value for name, value in optional if value is not None}

    def _attend(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        requests: Requests,
        cache: LayerCache,
        site: DelayedScale | None,
    ) -> None:
        shape = self.spec.shape
        heads = (shape.heads, shape.head_dim)
        leading = (q.shape[0],) if self.packed else (requests.count, -1)
        q, out = (x.view(*leading, *heads) for x in (q, out))
        places: dict[str, Any] = {"kv_lengths": requests.kv_lengths}
        if self.packed:
            places["q_starts"] = requests.starts
        else:
            places["q_lengths"] = requests.lengths
        k, v = cache.k, cache.v
        if self.page is None:
            k, v = k[: requests.count], v[: requests.count]
        else:
            places["page_table"] = requests.page_table
        if cache.k_scale is not None:
            places |= {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
        if site is not None:
            places |= _delayed(site)
        self.attention.run(q, k, v, out=out, **places)

    def _quantized(self, name: str, x: torch.Tensor, site: DelayedScale | None) -> Read:
        """An activation in the form its projection reads, and its scale."""
        if not self.spec.rowwise:
            return x, None if site is None else site.scale_used
        codes, scale = (
            getattr(self.workspace, f"{name}_{part}")[: x.shape[0]] for part in ("codes", "scale")
        )
        self.rows[x.shape[1], False].run(x, codes, scale)
        return codes, scale

    def _code_rows(self, out: Stream, gain: torch.Tensor | None) -> None:
        """With row-wise scales: codes of the values that a projection has written."""
        if self.spec.rowwise:
            given = {} if gain is None else {"gain": gain}
            quantiser = self.rows[self.spec.shape.hidden, gain is not None]
            quantiser.run(out.values, out.codes, out.scale, **given)

    def _left(self, out: Stream, site: DelayedScale | None) -> Stream:
        """What a layer gives in ``out``: no codes where nobody has written any."""
        if self.spec.last:
            return Stream(out.values, out.sumsq)
        return out if site is None else Stream(out.values, out.sumsq, out.codes, site.scale_used)

    # --- checks ---

    # What is wrong is put into words only where something is: this runs with every call.

    def _check(
        self,
        x: Stream,
        requests: Requests,
        cache: LayerCache,
        out: Stream,
        scales: BlockScales | None,
    ) -> None:
        spec, rows = self.spec, x.rows
        if self.kernels is GPU and self.weights.device.type == "cpu":
            raise UnsupportedError(
                "weights: got a layer on the CPU, expected one on a CUDA device. "
                "Fix: move it there, or run the model by Llama.from_folder(…, device='cpu')"
            )
        x.check("x", spec, rows)
        out.check("out", spec, rows)
        if rows > self.workspace.rows:
            raise ArgumentError(
                f"x: got {rows} rows, expected at most {self.workspace.rows}, as planned. "
                "Fix: plan with a larger max_rows, or prefill in chunks"
            )
        if requests.rows != rows:
            raise ArgumentError(
                f"requests: got {requests.rows} rows, expected {rows}, as x. "
                "Fix: describe every row; those that are no token have slot -1"
            )
        layout = (requests.starts is not None, requests.page_table is not None)
        if layout != (self.packed, self.page is not None):
            raise ArgumentError(
                f"requests: got {_layout(*layout)}, expected "
                f"{_layout(self.packed, self.page is not None)}. Fix: plan a block for each layout"
            )
        if cache.page != self.page or cache.k.dtype != spec.cache:
            raise ArgumentError(
                f"cache: got {cache.k.dtype} in pages of {cache.page}, expected {spec.cache} in "
                f"pages of {self.page}. Fix: plan for this cache"
            )
        if (scales is not None) != spec.delayed:
            raise ArgumentError(
                f"scales: got {type(scales).__name__}, expected "
                f"{'BlockScales' if spec.delayed else 'None'} for {spec.scaling} scales of "
                f"{spec.format}. Fix: keep one BlockScales.create(device) per layer and request group"
            )
        if scales is not None and (scales.y is None) != spec.last:
            raise ArgumentError(
                f"scales: got {'no ' * (scales.y is None)}state of what leaves, expected "
                f"{'none of' if spec.last else 'one of'} {'the' if spec.last else 'all layers but the'} "
                "last layer. Fix: BlockScales.create(device, last=spec.last), or BlockScales.of(group, layer)"
            )

    def __str__(self) -> str:
        kind = "packed" if self.packed else "padded"
        where = "a dense cache" if self.page is None else f"pages of {self.page}"
        size = self.workspace.nbytes
        memory = f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
        head = f"{self.spec}\n{kind} requests of up to {self.workspace.rows} rows, {where}, {memory} of scratch"
        sizes = projections(self.spec.shape)
        lines = []
        for name in PROJECTIONS:
            n, k = sizes[name]
            title = self.spec.compositions[name].title
            lines.append((name, f"{n} x {k}", _schedule(self.projections[name]), title))
            if name == "qkv":
                spec = self.spec.attention(self.packed, self.page)
                lines.append(("attention", "", _schedule(self.attention), str(spec)))
        widths = [max(len(line[i]) for line in lines) for i in range(3)]
        rows = ["  ".join(c.ljust(w) for c, w in zip(x, (*widths, 0), strict=True)) for x in lines]
        return "\n".join([head, *(f"  {row.rstrip()}" for row in rows)])


Read = tuple[torch.Tensor, torch.Tensor | None]
"""What a projection multiplies, and its scale where it is FP8."""


def _read(x: Stream, scale: torch.Tensor | None) -> Read:
    """The stream in the form that a projection multiplies; ``scale``: of its codes."""
    return (x.values, None) if x.codes is None else (x.codes, scale)


def _emitted(
    codes: torch.Tensor | None, site: DelayedScale | None, gain: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """The operands of ``EmitFP8``, and of ``Gain`` before it; none where it is not in the compositions."""
    if site is None:
        return {}
    assert codes is not None
    found = {"out_fp8": codes, **_delayed(site)}
    return found if gain is None else {"gain": gain, **found}


def _delayed(site: DelayedScale) -> dict[str, torch.Tensor]:
    """What a kernel that writes FP8 is told of its site."""
    return {
        "out_scale": site.scale_used,
        "amax": site.amax_next,
        "saturated": site.saturated,
        "nans": site.nans,
    }


def _layout(packed: bool, paged: bool) -> str:
    return (
        f"{'packed' if packed else 'padded'} requests with a {'paged' if paged else 'dense'} cache"
    )


def _schedule(kernel: Any) -> str:
    """How a kernel prints: schedule and registers where it knows them."""
    schedule = getattr(kernel, "schedule", None) or getattr(
        getattr(kernel, "kernel", None), "schedule", None
    )
    if schedule is None:
        return type(kernel).__name__
    registers = getattr(getattr(kernel, "report", None), "registers", None)
    return f"{schedule}{'' if registers is None else f'; {registers} registers'}"
