"""A layer's decode step with everything it needs, in every pair of formats, and what it should give in float64.

Requests have history in the cache: random rows, quantised as the cache does it, in pages at random with NaN wherever no
token is. Expected values come from the formulas (FuTransformer 2.1), over the weights' own values and the rows that the
cache holds after the step; the new rows themselves are compared with the formulas, and their records with the CPU's
quantisers, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from epicute.kv import Int4Cache, QK4PV8Cache
from epicute.kv.qk4pv8 import Memory
from epicute.layouts.qk4pv8 import QK4PV8Page
from epicute.models.block_spec import BlockSpec
from epicute.models.block_state import LayerCache, Stream
from epicute.models.decode_block import DecodeBlock
from epicute.models.decode_cache import DecodeCache
from epicute.models.decode_step import DecodeStep
from epicute.models.decode_weights import DecodeWeights
from epicute.models.kernels import GPU, Kernels
from epicute.models.layer_weights import LayerWeights
from epicute.quant.hadamard import rotate
from epicute.quant.smoothing import Means
from epicute.testing import Budget, assert_within
from tests.models.layers import inv_freq, state_of

FP8 = torch.float8_e4m3fn
CACHES = ("bf16", "fp8", "int4", "qk4pv8")
WEIGHTS = ("bf16", "fp8", "int4")

NEW = Budget(0.006, 0.012)
"""Of new rows: products of 16-bit activations, and one rounding to BF16."""

ATTENDED = Budget(0.008, 0.016)
"""Of attention's output: queries, probabilities and the result are rounded to 16 bits."""

MIXED = Budget(0.05, 0.09)
"""The same over QK4PV8 pages, where probabilities are FP8, each off by up to 6 per cent."""

LAYER = Budget(0.008, 0.016)
"""Of what the layer adds to the stream, given attention's output: x₁ and z are rounded to 16 bits on the way."""


def block_spec(spec: BlockSpec, weights: str, cache: str) -> BlockSpec:
    """The prefill's spec for weights of that format beside that cache."""
    from dataclasses import replace

    format = "fp16" if weights == "fp16" else "fp8" if weights == "fp8" else spec.format
    dtype = torch.float16 if format == "fp16" else torch.bfloat16
    return replace(spec, format=format, scaling="row", cache=FP8 if cache == "fp8" else dtype)


@dataclass(eq=False)
class Scene:
    """One layer, its cache and requests.

    Attributes:
        plain: the layer's options. weights, format: of weights and of the cache. mirror: a main copy beside records.
        lengths: of each request with its new token; 0: takes no part. page: tokens of a page, None: contiguous.
        pages: of a request in the table. terms: of ΔS. given: INT4 codes of the checkpoint's own names.
    """

    plain: BlockSpec
    weights: str
    format: str
    lengths: Sequence[int]
    mirror: bool = False
    page: int | None = 32
    pages: int = 3
    terms: int = 1
    seed: int = 0
    device: str = "cpu"
    kernels: Kernels = GPU
    given: Mapping[str, Any] | None = None
    state: dict[str, Tensor] = field(init=False)
    layer: DecodeWeights = field(init=False)
    cache: DecodeCache = field(init=False)

    def __post_init__(self) -> None:
        self.state = state_of(self.plain, self.seed)
        self.random = torch.Generator().manual_seed(self.seed + 100)
        spec = block_spec(self.plain, self.weights, self.format)
        self.dtype = spec.dtype
        self.count = len(self.lengths)
        self.table = self._table()
        self.cache = self._cache(spec)
        if self.weights == "int4":
            self.layer = DecodeWeights.int4(
                self.state, spec, self.cache.form, given=self.given, device=self.device
            )
        else:
            folded = LayerWeights.build(self.state, spec, device=self.device)
            self.layer = DecodeWeights.of(folded, self.cache.form)
        self.x = self._normal(self.count, spec.shape.hidden).to(self.dtype)
        self.history = self._fill()

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def _table(self) -> Tensor | None:
        if self.page is None:
            return None
        order = torch.randperm(self.count * self.pages + 2, generator=self.random)
        return order[: self.count * self.pages].reshape(self.count, self.pages).int()

    # --- the cache ---

    @property
    def tokens(self) -> int:
        """Tokens of a page, or of a request's stretch."""
        return self.page or 32 * self.pages

    def _pages(self) -> int:
        return self.count if self.page is None else self.count * self.pages + 2

    def _cache(self, spec: BlockSpec) -> DecodeCache:
        shape = spec.shape
        size = (self._pages(), self.tokens, shape.kv_heads, shape.head_dim)
        main = None
        if self.format in ("bf16", "fp16", "fp8") or self.mirror:
            k, v = (torch.full(size, math.nan, device=self.device).to(spec.cache) for _ in "kv")
            scales = {}
            if spec.cache == FP8:
                ramp = 1 + torch.arange(shape.kv_heads, device=self.device)
                scales = {"k_scale": 0.02 * ramp, "v_scale": 0.2 / ramp}
            main = LayerCache.of(k, v, dense=self.page is None, **scales)
        if self.format == "int4":
            kind = Int4Cache.create(self._pages(), self.tokens, shape.kv_heads, shape.head_dim)
            memory = kind.allocate(self.device).fill_(0xFF)  # scales of NaN
            self.kind: Any = kind
            return DecodeCache.int4(kind, memory, main, dense=self.page is None)
        if self.format == "qk4pv8":
            return self._mixed(spec, main)
        assert main is not None
        return DecodeCache.of(main)

    def _mixed(self, spec: BlockSpec, main: LayerCache | None) -> DecodeCache:
        shape = spec.shape
        page = QK4PV8Page(self.tokens, shape.head_dim, "exact16")
        heads = (shape.kv_heads, shape.heads)
        kind = QK4PV8Cache(self._pages(), *heads, page, self.terms)
        memory = kind.allocate(self.device)
        memory.records.fill_(0x7F)
        means = None
        if self.terms:
            assert memory.delta is not None
            memory.delta.fill_(math.nan)
            q, k = (self._normal(1, n, shape.head_dim).to(self.device) for n in heads[::-1])
            means = Means("static", q, 2 * k)
        self.kind = kind
        return DecodeCache.qk4pv8(kind, memory, means, main)

    def slots(self, request: int, count: int) -> Tensor:
        """(count,) int64 of a request's first tokens."""
        at = torch.arange(count)
        if self.table is None:
            return request * self.tokens + at
        return self.table[request].long()[at // self.tokens] * self.tokens + at % self.tokens

    def _fill(self) -> list[tuple[Tensor, Tensor]]:
        """Rows of each request before its new one, put into the cache; as they were."""
        shape, found = self.plain.shape, []
        for request, length in enumerate(self.lengths):
            size = (max(length - 1, 0), shape.kv_heads, shape.head_dim)
            k, v = (self._normal(*size).to(self.dtype) for _ in "kv")
            self.store(k, v, self.slots(request, len(k)))
            found.append((k, v))
        return found

    def store(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Put rows into the cache as prefill would."""
        cache, device = self.cache, self.device
        if cache.main is not None:
            for cells, x, name in ((cache.main.k, k, "k"), (cache.main.v, v, "v")):
                scale = getattr(cache.main, f"{name}_scale")
                rows = x.float() if scale is None else x.float() / scale.cpu()[:, None]
                size = cells.shape[1]
                made = rows.to(cells.dtype).to(device)
                flat, at = cells.view(torch.uint8), (slots // size, slots % size)
                flat[at[0].to(device), at[1].to(device)] = made.view(torch.uint8)
        if cache.records is not None:
            self._write(cache.records, lambda m: self.kind.write(m, k, v, slots))
        if cache.memory is not None:
            self._write(cache.memory.records, lambda m: self._place(m, k, v, slots))

    def _write(self, memory: Tensor, write: Any) -> None:
        """Change memory by a function of the CPU."""
        here = memory.cpu()
        write(here)
        memory.copy_(here)

    def _place(self, records: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
        cache = self.cache
        assert cache.memory is not None
        delta = None if cache.memory.delta is None else cache.memory.delta.cpu()
        rows = self.kind.quantize(k, v, self.means)
        self.kind.place(Memory(records, delta), rows, slots)
        if delta is not None:
            cache.memory.delta.copy_(delta)

    @property
    def means(self) -> Means | None:
        """Of keys, on the CPU."""
        means = self.cache.means
        return None if means is None else Means(means.kind, means.q.cpu(), means.k.cpu())

    def rows(self, request: int, count: int) -> tuple[Tensor, Tensor]:
        """(count, kv_heads, head_dim) float64 keys and values as the cache holds them: QK4PV8's keys are centred."""
        cache, slots = self.cache, self.slots(request, count)
        if cache.records is not None:
            k, v = self.kind.read(cache.records.cpu(), slots)
            width = self.kind.width
            return tuple(rotate(x, width).double() if width else x.double() for x in (k, v))  # type: ignore[return-value]
        if cache.memory is not None:
            delta = None if cache.memory.delta is None else cache.memory.delta.cpu()
            found = self.kind.fetch(Memory(cache.memory.records.cpu(), delta), slots)
            k, v, _ = self.kind.dequantize(found)
            return k.double(), v.double()
        main = cache.main
        assert main is not None
        out = []
        for cells, scale in ((main.k, main.k_scale), (main.v, main.v_scale)):
            rows = cells.cpu().double()[slots // self.tokens, slots % self.tokens]
            out.append(rows if scale is None else rows * scale.cpu().double()[:, None])
        return out[0], out[1]

    # --- running ---

    def step(self) -> DecodeStep:
        """Where the new tokens stand."""
        return DecodeStep.of(self.lengths, self.tokens, self.table, device=self.device)

    def plan(self, **options: Any) -> DecodeBlock:
        """A block for these requests."""
        frequencies = inv_freq(self.plain).to(self.device)
        given = {"max_batch": self.count, "max_len": self.pages * 128, "kernels": self.kernels}
        return DecodeBlock.plan(self.layer, frequencies, **{**given, **options})

    def stream(self, values: Tensor | None = None) -> Stream:
        """The entering stream; NaN where a row takes no part."""
        x = (self.x if values is None else values).clone()
        x[[n == 0 for n in self.lengths]] = 0.0
        return Stream.of(self.layer.spec.block, x.to(self.device))

    def out(self) -> Stream:
        """Memory of NaN for the result."""
        found = Stream.allocate(self.layer.spec.block, self.count, self.device)
        found.values.fill_(math.nan)
        found.sumsq.fill_(math.nan)
        return found

    def run(self, block: DecodeBlock) -> Tensor:
        """One step; (B, hidden) on the CPU."""
        return block.run(self.stream(), self.step(), self.cache, self.out()).values.cpu().clone()

    # --- what it should give ---

    def matrix(self, name: str) -> Tensor:
        """(N, K) float64 values of a projection, in logical order."""
        return getattr(self.layer, name).to("cpu").unpack().dequantize().double()

    def _gained(self, x: Tensor, gain: Tensor | None) -> Tensor:
        return x if gain is None else (x.float() * gain.cpu()).to(self.dtype).double()

    def _rstd(self, x: Tensor) -> Tensor:
        return (x.square().mean(-1, keepdim=True) + self.plain.eps).rsqrt()

    def _heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """(B, heads, head_dim) of q, k and v, rotated."""
        shape, layer = self.plain.shape, self.layer
        x = self.x.double()
        y = self._gained(x, layer.x_gain) @ self.matrix("qkv").T * self._rstd(x)
        if layer.bias is not None:
            y = y + layer.bias.cpu().double()
        widths = (shape.q_width, shape.kv_width, shape.kv_width)
        q, k, v = (part.unflatten(1, (-1, shape.head_dim)) for part in y.split(widths, 1))
        if layer.q_gain is not None and layer.k_gain is not None:
            q = q * self._rstd(q) * layer.q_gain.cpu().double()
            k = k * self._rstd(k) * layer.k_gain.cpu().double()
        return self._rotate(q), self._rotate(k), v

    def _rotate(self, x: Tensor) -> Tensor:
        spec = self.plain
        assert spec.rope is not None
        turned, rest = x[..., : spec.rotary_dim], x[..., spec.rotary_dim :]
        position = torch.tensor(self.lengths).double() - 1
        angle = (position[:, None] * inv_freq(spec).double())[:, None]
        cos, sin = angle.cos(), angle.sin()
        if spec.rope.style == "interleaved":
            a, b = turned[..., 0::2], turned[..., 1::2]
            both = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        else:
            a, b = turned.chunk(2, -1)
            both = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return torch.cat([both, rest], -1)

    def _attended(self, q: Tensor) -> Tensor:
        """(B, q_width) over what the cache holds now."""
        spec, shape = self.plain, self.plain.shape
        found = torch.zeros(self.count, shape.heads, shape.head_dim, dtype=torch.float64)
        for request, length in enumerate(self.lengths):
            k, v = (
                x.repeat_interleave(shape.heads // shape.kv_heads, 1)
                for x in self.rows(request, length)
            )
            first = 0 if spec.window is None else max(length - spec.window, 0)
            scale = shape.head_dim**-0.5 if spec.softmax_scale is None else spec.softmax_scale
            scores = self._scores(request, q[request], k) * scale
            if spec.softcap is not None:
                scores = spec.softcap * (scores / spec.softcap).tanh()
            if length:
                weights = scores[:, first:].softmax(-1)
                found[request] = torch.einsum("hn,nhd->hd", weights, v[first:])
        return found.flatten(1)

    def _scores(self, request: int, q: Tensor, k: Tensor) -> Tensor:
        """(heads, n) products; of smoothed keys q_c·k_c + ΔS, which lack what is the same for all keys of a head."""
        memory, means = self.cache.memory, self.means
        if memory is None or means is None:
            return torch.einsum("hd,nhd->hn", q, k)
        assert memory.delta is not None
        held = Memory(memory.records.cpu(), memory.delta.cpu())
        delta = self.kind.dequantize(self.kind.fetch(held, self.slots(request, len(k))))[2]
        return torch.einsum("hd,nhd->hn", q - means.q[0].double(), k) + delta.double().T

    def expected(self, attended: Tensor) -> Tensor:
        """(B, hidden) float64 of what the layer adds, from attention's output."""
        x = self.x.double()
        x1 = x + attended.double() @ self.matrix("o").T
        rounded = x1.to(self.dtype).double()
        h = self._gained(rounded, self.layer.x1_gain) @ self.matrix("gate_up").T
        gate, up = (h * self._rstd(rounded)).chunk(2, 1)
        z = gate * gate.sigmoid() * up
        return x1 + z @ self.matrix("down").T - x

    def check(self, block: DecodeBlock, found: Tensor) -> None:
        """Compare a step's result, its new rows and their records."""
        live = torch.tensor([n > 0 for n in self.lengths])
        assert (found[~live] == 0).all()
        q, k, v = self._heads()
        attended = block.memory.attended[: self.count].cpu()
        budget = MIXED if self.format == "qk4pv8" else ATTENDED
        assert (attended[~live] == 0).all()
        assert_within(attended[live], self._attended(q)[live], budget)
        added = found.double() - self.x.double()
        assert_within(added[live], self.expected(attended)[live], LAYER)
        for request in torch.nonzero(live)[:, 0].tolist():
            last = self.lengths[request]
            if self.format in ("bf16", "fp16"):
                for mine, right in zip(self.rows(request, last), (k, v), strict=True):
                    assert_within(mine[-1], right[request], NEW)
        memory = block.memory
        if memory.new_k is None or memory.new_v is None:
            return
        rows = [x[: self.count].cpu() for x in (memory.new_k, memory.new_v)]
        for mine, right in zip(rows, (k, v), strict=True):
            assert_within(mine[live], right[live], NEW)
        self.check_records(rows[0], rows[1])

    def check_records(self, k: Tensor, v: Tensor) -> None:
        """Records of the new rows are those of the CPU's quantiser, to the bit; ΔS, a sum, nearly."""
        from epicute.testing import assert_equal_bits

        for request, length in enumerate(self.lengths):
            if length == 0:
                continue
            slot = self.slots(request, length)[-1:]
            one = slice(request, request + 1)
            if self.cache.records is not None:
                wanted = torch.zeros_like(self.cache.records.cpu())
                self.kind.write(wanted, k[one], v[one], slot)
                pairs = zip(
                    self.kind.read(self.cache.records.cpu(), slot),
                    self.kind.read(wanted, slot),
                    strict=True,
                )
                for mine, right in pairs:
                    assert_equal_bits(mine, right)
            memory = self.cache.memory
            if memory is not None:
                delta = None if memory.delta is None else memory.delta.cpu()
                mine = self.kind.fetch(Memory(memory.records.cpu(), delta), slot)
                right = self.kind.quantize(k[one], v[one], self.means)
                for name in ("codes", "scales", "values"):
                    assert_equal_bits(getattr(mine, name), getattr(right, name), name)
                if delta is not None:
                    close = (mine.delta.float() - right.delta.float()).abs()
                    assert (
                        float(close.max()) <= 0.02 * float(right.delta.float().abs().max()) + 0.02
                    )
