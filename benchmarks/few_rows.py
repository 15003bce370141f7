"""Table ``projections``: few rows of x against a layer's weights in INT4, FP8 and BF16; and all four as a chain.

A row is one projection with a BF16 store, as its peers have it, or (``variant`` ``chain``) the four of a layer with the
epilogues that hand one to the next, each kernel started while the one before runs. ``stream-read`` reads the bytes of
our packed weight and does nothing with them: what any kernel takes that is launched for them alone. From 16 rows on
``ours-sync`` and ``ours-wgmma`` are the same weights by either MMA, each with its best schedule; ``ours`` is the one
that a plan takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import epicute.decode
from benchmarks import int4_peers
from benchmarks.check import checker
from benchmarks.data import CHUNK, clones, exactly
from benchmarks.floors import BANDWIDTH
from benchmarks.harness import Options, Session, fill
from benchmarks.ours import once
from benchmarks.provenance import Provenance
from benchmarks.resume import Progress
from benchmarks.stream import reading
from benchmarks.table import Row, Table
from benchmarks.timing import Run, Timer, copies_for
from epicute.decode import kernel_for
from epicute.decode.geometry import MMAS, RECORD_BYTES, TILES
from epicute.decode.model import choose
from epicute.decode.schedule import FEWEST, bucket_of
from epicute.decode.spec import WeightForm
from epicute.epilogues import Composition, Dequantize, ResidualAdd, Store, SwiGLU, compose
from epicute.errors import UnsupportedError
from epicute.jit import DEFAULT_TARGET
from epicute.layouts import Records
from epicute.models.shapes import SHAPES, LayerShape, projections
from epicute.quant import Int4Grid
from epicute.weights import FragmentPacked, Quantized, QuantizedInt4, Weight

__all__ = ["FLOOR", "PAPER", "Chain", "Few", "cases", "kernels", "measure", "table"]

PAPER = "FuTransformer (arXiv 2610.23796), sections 3.3.1, 3.3.4 and 4.4: the projections of decode"

FLOOR = (
    "the bytes of the packed weight, its scales among them, of x and of the result over 4.8 TB/s"
)

BF16 = torch.bfloat16
FORMATS = ("int4", "fp8", "bf16")
BITS = {"int4": 4, "fp8": 8, "bf16": 16}
GROUP = 128
LAYERS = ("qkv", "o", "gate_up", "down")
BOTH_FORMS = 16
"""Rows of x from which both MMAs are timed."""

STORE = Store(BF16)


def composed(weights: str, chain: Composition | Any) -> Composition:
    """With the scales of an fp8 weight in front."""
    return Dequantize(None, "column") >> chain if weights == "fp8" else compose(chain)


def records_of(composition: Composition, weights: str, n: int, k: int) -> Records:
    """How a weight of N x K is divided."""
    group = GROUP if weights == "int4" else 0
    rows = composition.row_order(n).rows
    return Records.of(rows, k, BITS[weights], group, False, TILES, RECORD_BYTES)


def kernel_of(
    composition: Composition, weights: str, n: int, k: int, m: int, mma: str | None = None
) -> Any:
    """The kernel of the bucket of M; of a smaller one where that has none. ``mma``: by that one alone."""
    scale = BF16 if weights == "int4" else None
    form = WeightForm(weights, n, k, records_of(composition, weights, n, k), scale)
    few = weights == "int4" and m <= FEWEST and mma is None
    for rows in (FEWEST if few else bucket_of(m), 32):
        try:
            found = kernel_for(composition, form, rows, target=DEFAULT_TARGET)
            if mma is None:
                return found
            schedule = choose(found.spec.problem, rows, found.target, mma=mma)
            return kernel_for(composition, form, rows, target=DEFAULT_TARGET, schedule=schedule)
        except UnsupportedError:
            continue
    raise UnsupportedError(f"{composition.title}: no kernel for {m} rows")


@dataclass
class Few:
    """One projection.

    Attributes:
        shape, layer: of a published model. M: rows of x. weights: their format.
        copies: of everything a call touches; as many as keep the L2 cold where not given.
    """

    shape: LayerShape
    layer: str
    M: int
    weights: str
    options: Options
    copies: int = 0
    random: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.N, self.K = projections(self.shape)[self.layer]
        self.composition = composed(self.weights, STORE)
        self.copies = self.copies or copies_for(self.bytes)
        self.random = torch.Generator(self.options.device).manual_seed(0)

    @property
    def case(self) -> dict[str, Any]:
        """The fields of the table's case."""
        found = {"shape": self.shape.name, "layer": self.layer, "M": self.M, "N": self.N}
        found |= {"K": self.K, "weights": self.weights}
        return found | ({"group": GROUP} if self.weights == "int4" else {})

    @cached_property
    def records(self) -> Records:
        """Of the packed weight."""
        return records_of(self.composition, self.weights, self.N, self.K)

    def kernel(self, mma: str | None = None) -> Any:
        """What serves its M."""
        return kernel_of(self.composition, self.weights, self.N, self.K, self.M, mma)

    @property
    def bytes(self) -> int:
        """Read and written."""
        scales = 4 * self.N if self.weights == "fp8" else 0
        return self.records.nbytes + scales + 2 * self.M * (self.N + self.K)

    @property
    def floor_us(self) -> float:
        """See FLOOR."""
        return self.bytes / BANDWIDTH * 1e6

    @cached_property
    def x(self) -> list[Tensor]:
        """(M, K) bfloat16, one per copy."""
        size = (self.M, self.K)
        device = self.options.device
        first = torch.randn(size, dtype=BF16, device=device, generator=self.random)
        return clones(first, self.copies)

    @cached_property
    def quantized(self) -> Quantized:
        """The weight, about N(0, 1/K)."""
        device = self.options.device
        values = torch.randn(self.N, self.K, dtype=BF16, device=device, generator=self.random).mul_(
            self.K**-0.5
        )
        grid = Int4Grid(GROUP, True, BF16) if self.weights == "int4" else None
        return Weight(values).quantize(self.weights, grid)

    @cached_property
    def packed(self) -> list[FragmentPacked]:
        """As ours streams it, one per copy."""
        first = epicute.decode.pack_few_rows(self.quantized, self.composition)
        rest = clones(first.data, self.copies)[1:]
        return [first, *(replace(first, data=data) for data in rest)]

    @cached_property
    def values(self) -> Tensor:
        """(N, K) bfloat16: what the BF16 peer multiplies."""
        quantized = self.quantized
        if isinstance(quantized, QuantizedInt4):
            return quantized.dequantize().to(BF16)
        codes = quantized.codes.float()
        return (codes if quantized.scale is None else codes * quantized.scale[:, None]).to(BF16)

    def exact(self) -> Tensor:
        """(M, N) float64."""
        quantized, x, parts = self.quantized, exactly(self.x[0]), []
        for start in range(0, self.N, CHUNK):
            chosen = slice(start, start + CHUNK)
            if isinstance(quantized, QuantizedInt4):
                some = replace(
                    quantized, codes=quantized.codes[chosen], scale=quantized.scales[chosen]
                )
                weight = some.int4.dequantize(torch.float64)
            else:
                weight = exactly(quantized.codes[chosen])
                if quantized.scale is not None:
                    weight = weight * quantized.scale[chosen, None].double()
            parts.append(x @ weight.T)
        return torch.cat(parts, dim=1)


def ours(found: Few, mma: str | None = None) -> Run:
    """epicute's few-row kernel, all copies admitted beforehand. ``mma``: the best with that one."""
    schedule = None if mma is None else found.kernel(mma).spec.schedule
    plan = epicute.decode.plan_few_rows(
        found.composition, found.packed[0], max_rows=found.M, schedule=schedule
    )
    device = found.options.device
    out = [torch.full((found.M, found.N), torch.nan, dtype=BF16, device=device)]
    out = clones(out[0], found.copies)
    if found.packed[0].device.type == "cuda":
        for packed in found.packed:
            plan.admit(packed)

    def run(copy: int) -> dict[str, Tensor]:
        plan.run(found.x[copy], found.packed[copy], out=out[copy])
        return {"out": out[copy]}

    return run


def cublas(found: Few) -> Run:
    """``torch.mm`` on BF16 weights."""
    weights = clones(found.values, found.copies)
    out = clones(
        torch.empty(found.M, found.N, dtype=BF16, device=found.options.device), found.copies
    )

    def run(copy: int) -> dict[str, Tensor]:
        torch.mm(found.x[copy], weights[copy].t(), out=out[copy])
        return {"out": out[copy]}

    return run


@dataclass
class Chain:
    """The four projections of a layer, one after the other; ``copies`` layers in turn."""

    shape: LayerShape
    M: int
    weights: str
    options: Options
    copies: int = 0

    def __post_init__(self) -> None:
        chains = {
            "qkv": compose(STORE),
            "o": ResidualAdd() >> STORE,
            "gate_up": SwiGLU() >> STORE,
            "down": ResidualAdd() >> STORE,
        }
        self.parts: dict[str, Few] = {}
        for name, chain in chains.items():
            part = Few(self.shape, name, self.M, self.weights, self.options, 1)
            part.composition = composed(self.weights, chain)
            part.random.manual_seed(LAYERS.index(name))
            self.parts[name] = part
        self.copies = self.copies or copies_for(self.bytes)
        for part in self.parts.values():
            part.copies = self.copies

    @property
    def case(self) -> dict[str, Any]:
        """The fields of the table's case."""
        found = {"shape": self.shape.name, "M": self.M, "weights": self.weights}
        found |= {"group": GROUP} if self.weights == "int4" else {}
        return {**found, "variant": "chain"}

    @property
    def bytes(self) -> int:
        """Read and written by all four."""
        return sum(part.bytes for part in self.parts.values())

    @property
    def floor_us(self) -> float:
        """See FLOOR."""
        return self.bytes / BANDWIDTH * 1e6


def chained(found: Chain) -> Run:
    """epicute's four kernels; each reads what the one before wrote, and the next layer what this one did."""
    m, shape, device = found.M, found.shape, found.options.device
    plans, packed = {}, {}
    for name, part in found.parts.items():
        packed[name] = part.packed
        plans[name] = epicute.decode.plan_few_rows(part.composition, part.packed[0], max_rows=m)
        if part.packed[0].device.type == "cuda":
            for one in part.packed:
                plans[name].admit(one)

    def empty(columns: int) -> list[Tensor]:
        return [
            torch.full((m, columns), torch.nan, dtype=BF16, device=device)
            for _ in range(found.copies)
        ]

    hidden = found.parts["o"].N
    states = empty(hidden)
    states[-1].normal_(generator=found.parts["qkv"].random)
    wide, middle = empty(found.parts["qkv"].N), empty(hidden)
    narrow = empty(found.parts["gate_up"].N // 2)

    def run(copy: int) -> dict[str, Tensor]:
        x = states[copy - 1]
        plans["qkv"].run(x, packed["qkv"][copy], out=wide[copy])
        query = wide[copy][:, : shape.q_width]
        plans["o"].run(query, packed["o"][copy], residual=x, out=middle[copy])
        plans["gate_up"].run(middle[copy], packed["gate_up"][copy], out=narrow[copy])
        plans["down"].run(
            narrow[copy], packed["down"][copy], residual=middle[copy], out=states[copy]
        )
        return {"out": states[copy]}

    return run


def finite(run: Run) -> Any:
    """A chain's check: its numbers exist; the single projections' rows vouch for them."""
    from benchmarks.check import Error, WrongResult

    for tensor in run(0).values():
        if not torch.isfinite(tensor).all():
            raise WrongResult("a chain gave a number that is none")
    return Error(0.0, 0.0)


def streamed(found: Few | Chain) -> Run:
    """A plain read of the packed weights' bytes; of a chain's as one launch for each projection."""
    parts = [found] if isinstance(found, Few) else list(found.parts.values())
    runs = [reading([p.data for p in part.packed]) for part in parts]

    def run(copy: int) -> dict[str, Tensor]:
        for one in runs:
            one(copy)
        return {}

    return run


def measure(found: Few | Chain, session: Session) -> list[Row]:
    """The row of one case."""
    names = ["stream-read"]
    if isinstance(found, Chain):
        session.add("ours", partial(chained, found), finite)
    else:
        check = checker({"out": found.exact()}, lambda _, out: out)
        session.add("ours", partial(ours, found), check)
        session.add("cublas-bf16", partial(cublas, found), check)
        names.append("cublas-bf16")
        for mma in MMAS if found.M >= BOTH_FORMS else ():
            session.add(f"ours-{mma}", partial(ours, found, mma), check)
            names.append(f"ours-{mma}")
        if isinstance(found.quantized, QuantizedInt4) and found.K % GROUP == 0:
            codes, scale = found.quantized.codes, found.quantized.scales
            for name, build in int4_peers.PEERS.items():
                session.add(name, partial(build, found.x, codes, scale, found.copies), check)
                names.append(name)
    session.add("stream-read", partial(streamed, found))
    session.measure(found.copies, found.floor_us)
    return [session.row(found.case, "ours", {name: name for name in names}, found.floor_us)]


def cases(options: Options) -> Iterator[Few | Chain]:
    """Every layer of every shape, at every M, in each format; then the chains."""
    for name in options.shapes:
        for m in options.M:
            for weights in FORMATS:
                for layer in options.layers:
                    yield Few(SHAPES[name], layer, m, weights, options)
                yield Chain(SHAPES[name], m, weights, options)


def progress_of(options: Options) -> Progress:
    """That of the options; here a case has one row, of one format."""
    return replace(options.progress, identity=dict)


def kernels(options: Options) -> Iterator[Any]:
    """Every kernel the table runs, each once."""

    def described() -> Iterator[Any]:
        for found in progress_of(options).left(cases(options), 1):
            parts = [found] if isinstance(found, Few) else found.parts.values()
            for part in parts:
                yield part.kernel()
                if part is found and part.M >= BOTH_FORMS:
                    yield from (part.kernel(mma) for mma in MMAS)

    return once(described())


def table(options: Options, timer: Timer, source: Provenance, folder: Path) -> Table:
    """Measure every case and write ``projections.json`` into ``folder``."""
    path = folder / "projections.json"
    found = Table("projections", PAPER, options.protocol, FLOOR, source, path)
    progress = progress_of(options)
    left = progress.left(cases(options), 1)
    return fill(found, left, measure, timer, options.rounds, progress)
