"""Table ``qk4pv8-decode``: one query token of each request over an NVFP4/FP8 cache, beside BF16 caches.

Requests of equal length; pages of 128 tokens in a random order, of which every request has its own. ``ours-bf16`` is
epicute's split-KV decode over BF16 pages in the same order; PyTorch's back-ends get contiguous keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.check import Error, checker
from benchmarks.floors import BANDWIDTH
from benchmarks.harness import Options, Session, fill
from benchmarks.ours import once
from benchmarks.provenance import Provenance
from benchmarks.table import Row, Table
from benchmarks.timing import Run, Timer, copies_for
from epicute.attention.decode import plan_decode
from epicute.attention.decode_spec import DecodeSpec
from epicute.attention.mixed_decode import plan_mixed_decode
from epicute.attention.mixed_decode_build import mixed_decode_kernel_for
from epicute.attention.mixed_decode_spec import MixedDecodeSpec
from epicute.kv.qk4pv8 import Memory, QK4PV8Cache
from epicute.kv.qk4pv8_write import plan_cache_write
from epicute.layouts.qk4pv8 import QK4PV8Page
from epicute.quant.smoothing import Means

__all__ = ["FLOOR", "PAPER", "Decode", "cases", "kernels", "measure", "table"]

PAPER = "MpFA, sections 5.4 and 7.2: decode over NVFP4 keys and FP8 values, GQA 32:8 and 40:8"

FLOOR = "the bytes of pages and ΔS, of q and of the result over 4.8 TB/s"

HEADS = ((32, 8), (40, 8))
HEAD_DIM, PAGE = 128, 128
CONTEXTS = {1: (4096, 8192, 16384, 32768, 65536, 131072), 32: (4096, 8192, 32768)}
"""Batch → contexts."""

TERMS = {"none": 0, "static": 1}
BUDGET = Error(0.3, 0.6)
"""NVFP4 keys by themselves are off by about 0.15 of an output of random normal data."""

BACKENDS = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
}


@dataclass
class Decode:
    """One token of each request; values N(0, 1).

    Attributes:
        batch, context: requests, and keys of each.
        smoothing: ``none``, or ``static`` with one term of ΔS.
        copies: of the caches; of BF16 ones fewer, as they are larger.
    """

    batch: int
    context: int
    heads: int
    kv_heads: int
    smoothing: str
    options: Options
    copies: int = 0
    seed: int = 0
    random: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.copies = self.copies or copies_for(self.bytes)
        self.random = torch.Generator(self.options.device).manual_seed(self.seed)

    @property
    def case(self) -> dict[str, Any]:
        """The fields of the table's case."""
        sizes = {"batch": self.batch, "context": self.context}
        heads = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": HEAD_DIM}
        how = {"page": PAGE, "pv": "two_level", "smoothing": self.smoothing}
        return {"cache": "qk4pv8", **sizes, **heads, **how}

    @property
    def pages(self) -> int:
        """Of a request."""
        return -(-self.context // PAGE)

    @property
    def bytes(self) -> int:
        """Read and written."""
        token = self.kv_heads * (HEAD_DIM // 2 + HEAD_DIM // 16 + HEAD_DIM)
        token += 2 * self.heads * TERMS[self.smoothing]
        return self.batch * (self.context * token + 4 * self.heads * HEAD_DIM)

    @property
    def cache(self) -> QK4PV8Cache:
        """Of as many pages as the requests take."""
        page, pages = QK4PV8Page(PAGE, HEAD_DIM), self.batch * self.pages
        return QK4PV8Cache(pages, self.kv_heads, self.heads, page, TERMS[self.smoothing])

    def normal(self, *shape: int) -> Tensor:
        """Random BF16."""
        return torch.randn(
            shape, dtype=torch.bfloat16, device=self.options.device, generator=self.random
        )

    @cached_property
    def q(self) -> Tensor:
        """(batch, heads, 128)."""
        return self.normal(self.batch, self.heads, HEAD_DIM)

    @cached_property
    def keys(self) -> Tensor:
        """(batch, pages * 128, kv_heads, 128), the newest token's among them."""
        return self.normal(self.batch, self.pages * PAGE, self.kv_heads, HEAD_DIM)

    @cached_property
    def values(self) -> Tensor:
        """As keys."""
        return self.normal(self.batch, self.pages * PAGE, self.kv_heads, HEAD_DIM)

    @cached_property
    def table(self) -> Tensor:
        """(batch, pages) int32, all pages of the pool in a random order."""
        order = torch.randperm(
            self.batch * self.pages, generator=self.random, device=self.options.device
        )
        return order.view(self.batch, self.pages).to(torch.int32)

    @cached_property
    def lengths(self) -> Tensor:
        """(batch,) int32."""
        return torch.full((self.batch,), self.context, dtype=torch.int32, device=self.q.device)

    @cached_property
    def means(self) -> Means | None:
        """Static means, where keys are smoothed."""
        if self.smoothing == "none":
            return None
        return Means("static", self.q[:1].float(), self.keys[0, :PAGE].float().mean(0)[None])

    @cached_property
    def slots(self) -> Tensor:
        """(batch * pages * 128,) int64 of all tokens, request after request."""
        token = torch.arange(PAGE, device=self.q.device)
        return (self.table.long()[..., None] * PAGE + token).reshape(-1)

    def exact(self) -> Tensor:
        """(batch * heads, 128) float64 of all keys and values before quantisation, a request at a time."""
        found = []
        for q, k, v in zip(self.q, self.keys, self.values, strict=True):
            q, k, v = q.double(), k[: self.context].double(), v[: self.context].double()
            groups = q.view(self.kv_heads, -1, HEAD_DIM)
            weights = torch.einsum("hgd,shd->hgs", groups, k).mul_(HEAD_DIM**-0.5).softmax(-1)
            found.append(torch.einsum("hgs,shd->hgd", weights, v).reshape(self.heads, -1))
        return torch.cat(found)

    def view(self, name: str, out: Tensor) -> Tensor:
        """A result as rows."""
        return out.reshape(-1, HEAD_DIM)


def ours(found: Decode) -> Run:
    """The kernel, which appends the newest row: every run stores the same bytes again."""
    writer = plan_cache_write(found.cache, counted=False)
    plan = plan_mixed_decode(found.cache, prefetch=True)
    workspace = plan.workspace(found.batch, found.q.device)
    rows = [x.view(-1, found.kv_heads, HEAD_DIM) for x in (found.keys, found.values)]
    memories: list[Memory] = []
    for _ in range(found.copies):
        memories.append(found.cache.allocate(found.q.device))
        writer.run(memories[-1], *rows, means=found.means, slots=found.slots)
    newest = [x[:, found.context - 1].contiguous() for x in (found.keys, found.values)]
    out = torch.full_like(found.q, float("nan"))

    def run(copy: int) -> dict[str, Tensor]:
        plan.run(
            found.q,
            memories[copy],
            out=out,
            workspace=workspace,
            kv_lengths=found.lengths,
            page_table=found.table,
            new_k=newest[0],
            new_v=newest[1],
            means=found.means,
        )
        return {"out": out}

    return run


def ours_bf16(found: Decode) -> Run:
    """epicute's decode over BF16 pages."""
    spec = DecodeSpec(found.heads, found.kv_heads, HEAD_DIM, page=PAGE, prefetch=True)
    plan = plan_decode(spec)
    workspace = plan.workspace(found.batch, found.q.device)
    order = torch.argsort(found.table.reshape(-1).long())
    pools = []
    for x in (found.keys, found.values):
        pool = x.view(-1, PAGE, found.kv_heads, HEAD_DIM)[order]
        pools.append([pool, *(pool.clone() for _ in range(_copies(found) - 1))])
    out = torch.full_like(found.q, float("nan"))

    def run(copy: int) -> dict[str, Tensor]:
        number = copy % _copies(found)
        plan.run(
            found.q,
            (pools[0][number], pools[1][number]),
            out=out,
            kv_lengths=found.lengths,
            workspace=workspace,
            page_table=found.table,
        )
        return {"out": out}

    return run


def _copies(found: Decode) -> int:
    """Copies of BF16 keys and values, which are read 2.56 times as fast."""
    return copies_for(4 * found.batch * found.context * found.kv_heads * HEAD_DIM)


def sdpa(found: Decode, backend: SDPBackend) -> Run:
    """scaled_dot_product_attention with one back-end over contiguous keys and values."""
    sides = []
    for x in (found.keys, found.values):
        whole = x[:, : found.context].transpose(1, 2).contiguous()
        sides.append([whole, *(whole.clone() for _ in range(_copies(found) - 1))])

    def run(copy: int) -> dict[str, Tensor]:
        number = copy % _copies(found)
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(
                found.q[:, :, None], sides[0][number], sides[1][number], enable_gqa=True
            )
        return {"out": out}

    return run


PEERS: dict[str, Callable[[Decode], Run]] = {
    "ours-bf16": ours_bf16,
    **{name: partial(sdpa, backend=backend) for name, backend in BACKENDS.items()},
}


def measure(found: Decode, session: Session) -> list[Row]:
    """The row of one case."""
    exact = {"out": found.exact()}
    session.add("ours", partial(ours, found), checker(exact, found.view, lambda _: BUDGET))
    for name, build in PEERS.items():
        session.add(name, partial(build, found), checker(exact, found.view))
    floor = found.bytes / BANDWIDTH * 1e6
    session.measure(found.copies, floor)
    return [session.row(found.case, "ours", {name: name for name in PEERS}, floor)]


def cases(options: Options) -> Iterator[Decode]:
    """Both ratios of heads, one request and many, with smoothing and, of one request, without."""
    for heads, kv_heads in HEADS:
        for batch, contexts in CONTEXTS.items():
            for smoothing in TERMS if batch == 1 else ("static",):
                for context in options.lengths or contexts:
                    yield Decode(batch, context, heads, kv_heads, smoothing, options)


def kernels(options: Options) -> Iterator[Any]:
    """Every kernel the table runs beside the writer's and BF16's, each once."""
    page = QK4PV8Page(PAGE, HEAD_DIM)
    specs = (
        MixedDecodeSpec(c.heads, c.kv_heads, page, TERMS[c.smoothing], prefetch=True)
        for c in cases(options)
    )
    return once(mixed_decode_kernel_for(spec) for spec in specs)


def table(options: Options, timer: Timer, source: Provenance, folder: Path) -> Table:
    """Measure every case and write ``qk4pv8-decode.json`` into ``folder``."""
    path = folder / "qk4pv8-decode.json"
    found = Table("qk4pv8-decode", PAPER, options.protocol, FLOOR, source, path)
    return fill(found, cases(options), measure, timer, options.rounds)
