"""Table ``decode-attention``: one query token of each request over a cache in BF16, FP8 and INT4.

Requests of equal length; pages of 64 tokens in a random order, of which every request has its own. Ours over BF16 pages
is also there as ``ours-bf16`` beside the narrower caches; FlashAttention-4 and PyTorch's back-ends get contiguous BF16
keys and values of their own. An INT4 cache is rotated, and its new row is quantised and stored by the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import epicute.attention.decode
from benchmarks.check import checker
from benchmarks.data import clones, exactly
from benchmarks.floors import BANDWIDTH
from benchmarks.harness import Options, Session, fill
from benchmarks.ours import once
from benchmarks.provenance import Provenance
from benchmarks.table import Row, Table
from benchmarks.timing import Run, Timer, copies_for
from epicute.attention.decode_build import decode_kernel_for
from epicute.attention.decode_spec import CACHES, DecodeSpec
from epicute.kv.int4 import Int4Cache
from epicute.layouts.kv_int4 import Int4Record
from epicute.quant.hadamard import hadamard

__all__ = ["FLOOR", "PAPER", "Decode", "cases", "kernels", "measure", "table"]

PAPER = (
    "FuTransformer (arXiv 2610.23796), sections 3.3.2, 3.3.3 and 4.4: the attention of decode, of the "
    "8B, 70B and 405B shapes' heads"
)

FLOOR = "the bytes of keys, values and their scales, of q and of the result over 4.8 TB/s"

HEADS = ((32, 8), (64, 8), (128, 8))
HEAD_DIM, PAGE = 128, 64

CONTEXTS = {
    (32, 8): {1: (1024, 8192, 32768, 131072), 8: (1024,), 32: (1024, 4096, 16384)},
    (64, 8): {1: (1024,), 32: (4096,)},
    (128, 8): {1: (1024,), 32: (4096,)},
}
"""Heads → batch → contexts."""

BACKENDS = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
}
"""Peer → back-end of scaled_dot_product_attention."""


@dataclass
class Decode:
    """One token of each request; values about N(0, 1).

    Attributes:
        cache: ``bf16``, ``fp8`` or ``int4``.
        batch, context: requests, and keys of each, the new one among them.
        copies: of the cache, of q and of the result.
        seed: of the random values.
    """

    cache: str
    batch: int
    context: int
    heads: int
    kv_heads: int
    options: Options
    copies: int = 0
    seed: int = 0
    random: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.copies = self.copies or copies_for(self.bytes)
        self.random = torch.Generator(self.options.device).manual_seed(self.seed)

    @property
    def spec(self) -> DecodeSpec:
        """What ours is compiled for."""
        return DecodeSpec(self.heads, self.kv_heads, HEAD_DIM, self.cache, page=PAGE, prefetch=True)

    @property
    def case(self) -> dict[str, Any]:
        """The fields of the table's case."""
        sizes = {"batch": self.batch, "context": self.context}
        heads = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": HEAD_DIM}
        return {"cache": self.cache, **sizes, **heads, "page": PAGE}

    @property
    def bytes(self) -> int:
        """Read and written."""
        cached = self.context * self.kv_heads * self.spec.token_bytes
        return self.batch * (cached + 4 * self.heads * HEAD_DIM)

    @property
    def floor_us(self) -> float:
        """See FLOOR."""
        return self.bytes / BANDWIDTH * 1e6

    @property
    def pages(self) -> int:
        """Of a request."""
        return -(-self.context // PAGE)

    def normal(self, *shape: int) -> Tensor:
        """Random BF16."""
        return torch.randn(
            shape, dtype=torch.bfloat16, device=self.options.device, generator=self.random
        )

    @cached_property
    def q(self) -> list[Tensor]:
        """(batch, heads, 128), one per copy."""
        return clones(self.normal(self.batch, self.heads, HEAD_DIM), self.copies)

    @cached_property
    def table(self) -> Tensor:
        """(batch, pages) int32, all pages of the pool in a random order."""
        total = self.batch * self.pages
        order = torch.randperm(total, generator=self.random, device=self.options.device)
        return order.view(self.batch, self.pages).to(torch.int32)

    @cached_property
    def lengths(self) -> Tensor:
        """(batch,) int32."""
        size = (self.batch,)
        return torch.full(size, self.context, dtype=torch.int32, device=self.options.device)

    def slots(self, request: int) -> Tensor:
        """(context,) int64 slots of a request's tokens."""
        tokens = torch.arange(self.context, device=self.options.device)
        return self.table[request].long()[tokens // PAGE] * PAGE + tokens % PAGE

    # --- caches ---

    @cached_property
    def kind(self) -> Int4Cache:
        """Shape and rotation of an INT4 cache."""
        record = Int4Record(PAGE, HEAD_DIM)
        return Int4Cache(self.batch * self.pages, self.kv_heads, record, self.spec.rotation)

    @cached_property
    def new(self) -> list[Tensor]:
        """The new keys and values, (batch, kv_heads, 128) each."""
        return [self.normal(self.batch, self.kv_heads, HEAD_DIM) for _ in range(2)]

    @cached_property
    def pools(self) -> list[Any]:
        """What ``run`` takes as cache, one per copy: heads of a page lie apart from each other (HND)."""
        if self.cache == "int4":
            return clones(self._records(), self.copies)
        shape = (self.batch * self.pages, self.kv_heads, PAGE, HEAD_DIM)
        dtype = CACHES[self.cache]
        both = [clones(self.normal(*shape).to(dtype), self.copies) for _ in range(2)]
        return [tuple(x.transpose(1, 2) for x in one) for one in zip(*both, strict=True)]

    def _records(self) -> Tensor:
        """Random nibbles and scales, and the new row where it belongs."""
        found = self.kind.allocate(self.options.device)
        found.random_(0, 256, generator=self.random)
        scales = found[:, :, self.kind.record.key_scale(0) :].view(torch.float32)
        scales.uniform_(0.1, 0.4, generator=self.random)
        newest = torch.stack([self.slots(b)[-1] for b in range(self.batch)])
        self.kind.write(found, *self.new, newest)
        return found

    # --- reference ---

    @cached_property
    def rows(self) -> Tensor:
        """Requests that are checked: the first, the last, and random ones between."""
        count = min(self.options.check_rows, self.batch, 8)
        device = self.options.device
        found = torch.randperm(self.batch, generator=self.random, device=device)[:count]
        found[0], found[-1] = 0, self.batch - 1
        return found.unique()

    def view(self, name: str, out: Tensor) -> Tensor:
        """The checked requests of a result."""
        return out.reshape(self.batch, -1)[self.rows]

    def exact(self) -> Tensor:
        """(requests, heads * 128) float64 of the checked requests."""
        turn = None
        if self.spec.rotation:
            turn = hadamard(HEAD_DIM, self.spec.rotation).to(self.options.device)
        found = []
        for request in self.rows.tolist():
            slots = self.slots(request)
            pool = self.pools[0]
            if self.cache == "int4":
                k, v = (exactly(x) for x in self.kind.read(pool, slots))
            else:
                k, v = (exactly(x[slots // PAGE, slots % PAGE]) for x in pool)
            q = exactly(self.q[0][request])
            q = q if turn is None else q @ turn
            out = attended(q, k, v)
            found.append((out if turn is None else out @ turn).reshape(-1))
        return torch.stack(found)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(heads, D): q (heads, D) over all of k and v (keys, kv_heads, D)."""
    groups = q.view(k.shape[1], -1, q.shape[1])
    scores = torch.einsum("hgd,shd->hgs", groups, k) * q.shape[1] ** -0.5
    return torch.einsum("hgs,shd->hgd", scores.softmax(dim=-1), v).reshape(q.shape)


# --- candidates ---


def ours(found: Decode) -> Run:
    """epicute's decode attention over pages."""
    plan = epicute.attention.decode.plan_decode(found.spec)
    workspace = plan.workspace(found.batch)
    outputs = [torch.full_like(x, float("nan")) for x in found.q]
    given: dict[str, Any] = {"kv_lengths": found.lengths, "page_table": found.table}
    if found.cache == "int4":
        given |= dict(zip(("new_k", "new_v"), found.new, strict=True))
    if found.cache == "fp8":
        ones = torch.ones(found.kv_heads, device=found.options.device)
        given |= {"k_scale": ones, "v_scale": ones}

    def run(copy: int) -> dict[str, Tensor]:
        q, cache, out = found.q[copy], found.pools[copy], outputs[copy]
        plan.run(q, cache, out=out, workspace=workspace, **given)
        return {"out": out}

    return run


def contiguous(found: Decode) -> list[tuple[Tensor, Tensor]]:
    """(batch, context, kv_heads, 128) keys and values of BF16 pages, one pair per copy."""
    order = torch.stack([found.slots(b) for b in range(found.batch)])
    first = [x[order // PAGE, order % PAGE] for x in found.pools[0]]
    return list(zip(*(clones(x, found.copies) for x in first), strict=True))


def fa4(found: Decode) -> Run:
    """FlashAttention-4 as its users call it; on Hopper its sm_90 kernels run."""
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]

    pairs = contiguous(found)

    def run(copy: int) -> dict[str, Tensor]:
        out = flash_attn_func(found.q[copy].unsqueeze(1), *pairs[copy], causal=True)
        return {"out": out[0] if isinstance(out, tuple) else out}

    return run


def sdpa(found: Decode, backend: SDPBackend) -> Run:
    """scaled_dot_product_attention with one back-end, on transposed views."""
    pairs = contiguous(found)

    def run(copy: int) -> dict[str, Tensor]:
        q = found.q[copy].unsqueeze(2)
        k, v = (x.transpose(1, 2) for x in pairs[copy])
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return {"out": out}

    return run


# --- the table ---


def measure(found: Decode, session: Session) -> list[Row]:
    """The row of one case."""
    session.add("ours", partial(ours, found), checker({"out": found.exact()}, found.view))
    names: list[str] = []
    if found.cache == "bf16":
        peers: dict[str, Callable[[Decode], Run]] = {"fa4": fa4}
        peers |= {name: partial(sdpa, backend=backend) for name, backend in BACKENDS.items()}
        check = checker({"out": found.exact()}, found.view)
        for name, build in peers.items():
            session.add(name, partial(build, found), check)
        names = list(peers)
    else:
        wide = replace(found, cache="bf16")
        check = checker({"out": wide.exact()}, wide.view)
        session.add("ours-bf16", partial(ours, wide), check)
        names = ["ours-bf16"]
    session.measure(found.copies, found.floor_us)
    return [session.row(found.case, "ours", {name: name for name in names}, found.floor_us)]


def cases(options: Options) -> Iterator[Decode]:
    """Every batch and context of every head count, in each format."""
    for heads, sizes in CONTEXTS.items():
        for batch, contexts in sizes.items():
            for context in options.lengths or contexts:
                for cache in ("bf16", "fp8", "int4"):
                    yield Decode(cache, batch, context, *heads, options)


def kernels(options: Options) -> Iterator[Any]:
    """Every kernel the table runs, each once."""
    return once(decode_kernel_for(found.spec) for found in cases(options))


def table(options: Options, timer: Timer, source: Provenance, folder: Path) -> Table:
    """Measure every case and write ``decode-attention.json`` into ``folder``."""
    path = folder / "decode-attention.json"
    found = Table("decode-attention", PAPER, options.protocol, FLOOR, source, path)
    return fill(found, cases(options), measure, timer, options.rounds)
