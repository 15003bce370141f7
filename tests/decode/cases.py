"""Few-row projections with inputs: run by a plan, or from a kernel's PTX; results of the NumPy interpreter.

Weights are whole numbers times powers of two, and so small that sums in float32 are exact in any order: what is
compared must be equal bit for bit.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch

from epicute.decode import (
    FewRowKernel,
    FewRowSchedule,
    FewRowsPlan,
    kernel_for,
    pack_few_rows,
    plan_few_rows,
)
from epicute.decode.geometry import RECORD_BYTES, TILES
from epicute.decode.model import choose
from epicute.decode.schedule import Shared, turned
from epicute.decode.spec import WeightForm
from epicute.epilogues import (
    Bias,
    Columns,
    Composition,
    Counter,
    Dequantize,
    EmitFP8,
    Gain,
    HeadNorm,
    Maximum,
    PlaceKV,
    ResidualAdd,
    RoPE,
    RowScale,
    Store,
    SumSquares,
    SwiGLU,
    compose,
)
from epicute.epilogues.operands import Cells, Operand, PartialsOutput
from epicute.gemm.readers import reader
from epicute.jit import DEFAULT_TARGET
from epicute.layouts import CHANNEL, Records
from epicute.weights import DTYPES, FragmentPacked, Quantized, QuantizedInt4
from tests.gemm.device import Output, embed, embed_rows, unchanged, whole
from tests.gemm.jobs import PAGE_SIZE, compare, drawn
from tests.ptx import Kernel, TensorMap, ptx_of

BITS = {"int4": 4, "fp8": 8, "bf16": 16, "fp16": 16}
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


@dataclass(frozen=True)
class Few:
    """A projection.

    Attributes:
        composition, n, k, format, x_dtype: what is multiplied. group, zeros, scale_dtype: of int4.
        rows: of x at a time. exact: whether the policies' results have the interpreter's bits.
        changes: of the chosen schedule. gain: whether x is multiplied by one. invariant: batch-invariant.
        mma: the only one to choose a schedule with.
    """

    composition: Composition
    n: int
    k: int
    format: str = "int4"
    rows: int = 8
    x_dtype: torch.dtype = BF16
    group: int = 128
    zeros: bool = False
    scale_dtype: torch.dtype = FP16
    exact: bool = True
    gain: bool = False
    invariant: bool = False
    changes: tuple[tuple[str, Any], ...] = ()
    mma: str | None = None

    def __str__(self) -> str:
        changes = "".join(f"-{name}{value}" for name, value in self.changes)
        kind = (
            f"{self.format}-{self.group}{'z' if self.zeros else ''}"
            if self.format == "int4"
            else self.format
        )
        x = str(self.x_dtype).removeprefix("torch.")
        title = self.composition.title.replace(" ", "")
        form = "" if self.mma is None else f"-{self.mma}"
        return f"{title[:40]}-{self.n}x{self.k}-{kind}-{x}-{self.rows}{form}{changes}"

    def quantized(self, seed: int = 1, exact: bool = True, device: str = "cpu") -> Quantized:
        """A weight: whole numbers with scales of powers of two where ``exact``."""
        generator = torch.Generator().manual_seed(seed)

        def integers(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high + 1, shape, generator=generator)

        n, k = self.n, self.k
        if self.format == "int4":
            grouped = (n, 1 if self.group == CHANNEL else -(-k // self.group))
            scale = 2.0 ** integers(-2, 1, *grouped)
            if not exact:
                scale = torch.rand(grouped, generator=generator) * 0.02 + 0.005
            zero = integers(0, 15, *grouped).to(torch.uint8) if self.zeros else None
            codes = integers(0, 15, n, k).to(torch.uint8)
            found: Quantized = QuantizedInt4(
                "int4", codes, scale.to(self.scale_dtype), "w", zero, self.group
            )
        else:
            values = integers(-8, 8, n, k) / 4.0
            if not exact:
                values = torch.randn(n, k, generator=generator)
            scale = 2.0 ** integers(-2, 2, n) if self.format == "fp8" else None
            found = Quantized(self.format, values.to(DTYPES[self.format]), scale, "w")
        tensors = {"codes": found.codes.to(device)}
        if found.scale is not None:
            tensors["scale"] = found.scale.to(device)
        if isinstance(found, QuantizedInt4) and found.zero is not None:
            tensors["zero"] = found.zero.to(device)
        return replace(found, **tensors)

    def kernel(self) -> FewRowKernel:
        """What is compiled."""
        return _kernel(self)

    def schedule(self) -> FewRowSchedule:
        """Its schedule."""
        return self.kernel().spec.schedule


def form_of(case: Few) -> WeightForm:
    """What its weight will be packed in."""
    rows, bits = case.composition.row_order(case.n).rows, BITS[case.format]
    group, scale = (case.group, case.scale_dtype) if bits == 4 else (0, None)
    records = Records.of(rows, case.k, bits, group, case.zeros, TILES, RECORD_BYTES)
    return WeightForm(case.format, case.n, case.k, records, scale)


@cache
def _kernel(case: Few) -> FewRowKernel:
    packed = form_of(case)
    options = {"x_dtype": case.x_dtype, "gain": case.gain, "batch_invariant": case.invariant}
    found = kernel_for(case.composition, packed, case.rows, target=DEFAULT_TARGET, **options)
    if case.mma is not None:
        problem = found.spec.problem
        chosen = choose(problem, case.rows, DEFAULT_TARGET, case.invariant, case.mma)
        found = found.scheduled(chosen)
    if not case.changes:
        return found
    wanted = replace(found.spec.schedule, **dict(case.changes))
    if turned(wanted) and "conversion" not in dict(case.changes):
        wanted = replace(wanted, conversion="registers")
    most = Shared(found.spec.problem, wanted).held
    wanted = replace(wanted, chunks=min(wanted.chunks, most))
    if "wide" not in dict(case.changes):
        wanted = replace(wanted, wide=1, sums=1)
    return kernel_for(
        case.composition, packed, case.rows, target=DEFAULT_TARGET, schedule=wanted, **options
    )


def in_place(case: Few, cluster: int = 1) -> Few:
    """The same where activations become integers where TMA has brought them, multiplied by warpgroups."""
    chunks = replace(case, changes=()).kernel().spec.problem.chunks(cluster)
    changes = (("conversion", "integers"), ("mma", "wgmma"), ("cluster", cluster))
    return replace(case, changes=(*changes, ("slots", 3), ("in_flight", 2), ("chunks", chunks)))


def packed_of(case: Few) -> FragmentPacked:
    """The exact weight on the CPU, packed once for all schedules."""
    plain = {"rows": 8, "gain": False, "invariant": False, "changes": (), "mma": None}
    return _packed(replace(case, **plain))


@cache
def _packed(case: Few) -> FragmentPacked:
    return pack_few_rows(case.quantized(), case.composition)


@cache
def emulated(case: Few) -> Kernel:
    """The kernel's PTX; a launch gives its threads what its CTAs on an SM leave them."""
    found = Kernel(ptx_of(case.kernel()))
    share = 65536 // found.program.threads
    found.program.registers_per_thread = share // 8 * 8
    return found


@cache
def planned(case: Few, device: str = "cpu") -> FewRowsPlan:
    """A plan of the case's kernel alone."""
    return plan_few_rows(
        case.composition,
        packed_of(case).to(device),
        x_dtype=case.x_dtype,
        norm_gain=case.gain,
        batch_invariant=case.invariant,
        schedule=case.schedule(),
    )


def two_bytes(m: int, k: int, generator: torch.Generator) -> torch.Tensor:
    """Rows whose integers are all of two bytes, of powers of two that differ by row and group, and lose nothing."""
    x = torch.randint(-255, 256, (m, k), generator=generator) / 128.0
    x[:, 5::32] = 64.0 * torch.randint(0, 2, x[:, 5::32].shape, generator=generator).mul(2).sub(1)
    return x * 2.0 ** (torch.arange(m)[:, None] % 3 + torch.arange(k) // 128 % 2)


@dataclass
class FewJob:
    """Inputs and outputs of one launch.

    x: (m, K) whole numbers, or what takes both bytes of an integer (``two_bytes``), with NaN around; operands: what is
    read, in NaN too; outputs: poisoned, in guards.
    """

    case: Few
    m: int
    seed: int = 0
    device: str = "cpu"
    exact: bool = True
    operands: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, Output] = field(default_factory=dict)

    def __post_init__(self) -> None:
        case, device = self.case, self.device
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randint(-2, 3, (self.m, case.k), generator=generator).float()
        if turned(case.schedule()):
            x = two_bytes(self.m, case.k, generator)
        if not self.exact:
            x = torch.randn(self.m, case.k, generator=generator)
        self.x = embed_rows(x.to(case.x_dtype), device)
        self.gain: torch.Tensor | None = None
        if case.gain:
            gain = 2.0 ** torch.randint(-1, 2, (case.k,), generator=generator)
            self.gain = gain.to(device)
        self.packed = packed_of(case).to(device)
        for spec in case.kernel().spec.layout.operands:
            sizes: dict[Any, Any] = {
                "M": self.m,
                "pages": -(-self.m // PAGE_SIZE) + 2,
                "page_size": PAGE_SIZE,
            }
            shape = [int(sizes.get(d, d)) for d in spec.shape]
            if spec.kind.written:
                self.outputs[spec.name] = self._output(spec.name, spec.kind, shape, spec.dtype)
            elif spec.name == "weight_scale" and self.packed.scale is not None:
                continue
            else:
                values = drawn(spec.kind, shape, spec, generator)
                self.operands[spec.name] = embed(values, device=device)

    def _output(self, name: str, kind: Operand, shape: list[int], dtype: torch.dtype) -> Output:
        start, strides = None, None
        if isinstance(kind, (Maximum, Counter)):
            start = torch.full(shape, 0 if isinstance(kind, Maximum) else 5).to(dtype)
        elif not isinstance(kind, Cells):
            strides = (shape[1] + (3 if isinstance(kind, PartialsOutput) else 16), 1)
        return Output(shape, dtype, strides, start, self.device, name)

    @cached_property
    def given(self) -> dict[str, torch.Tensor]:
        """All operands by name."""
        found = {**self.operands, **{name: o.tensor for name, o in self.outputs.items()}}
        if self.packed.scale is not None and "weight_scale" in self.case.composition.operands:
            found["weight_scale"] = self.packed.scale
        return found

    def values(self) -> torch.Tensor:
        """x as it is multiplied, float64."""
        x = self.x.double()
        return x if self.gain is None else (x * self.gain).to(self.case.x_dtype).double()

    def sums(self) -> torch.Tensor:
        """(m, N) x · wᵀ in float64, fp8's scales apart."""
        quantized = self.packed.unpack()
        if isinstance(quantized, QuantizedInt4):
            weight = quantized.int4.dequantize(torch.float64)
        else:
            weight = quantized.codes.double()
        return self.values() @ weight.T

    def expected(self) -> dict[str, torch.Tensor]:
        """What the NumPy interpreter gives; call it before the run, as it starts from the outputs as they are."""
        given = {name: x.cpu().clone() for name, x in self.given.items()}
        return self.case.composition.evaluate(self.sums().float().cpu(), **given)

    def check(self, wanted: dict[str, torch.Tensor]) -> None:
        """Compare the outputs; nothing beside them may have been written."""
        kinds = self.case.composition.operands
        for name, value in wanted.items():
            self.outputs[name].assert_intact()
            got = self.outputs[name].tensor
            compare(f"{self.case} M={self.m}: {name}", kinds[name], got, value, self.case.exact)

    def launch(self, plan: FewRowsPlan) -> None:
        """Run the plan, unchecked."""
        given = {**self.operands, **{name: o.tensor for name, o in self.outputs.items()}}
        if self.gain is not None:
            given["norm_gain"] = self.gain
        plan.run(self.x, self.packed, **given)

    def run(self, plan: FewRowsPlan) -> None:
        """Run the plan and compare; the inputs may not change."""
        wanted = self.expected()
        with unchanged(x=self.x, data=self.packed.data, **self.operands):
            self.launch(plan)
        if self.m:
            self.check(wanted)

    def emulate(self, clusters: int = 1, **options: Any) -> None:
        """Run the kernel's PTX, ``clusters`` of CTAs side by side, and compare."""
        kernel = self.case.kernel()
        spec, cluster = kernel.spec, kernel.spec.schedule.cluster
        wanted = self.expected()
        stride = self.x.stride(0) * 2
        arguments = [self.x.data_ptr(), stride, self.m, min(clusters, spec.problem.tiles)]
        for operand in spec.layout.operands:
            reader(operand)(self.given[operand.name], self.m, arguments)
        arguments += [options.pop("early", 1), 0 if self.gain is None else self.gain.data_ptr()]
        tensors = [whole(x) for x in (self.packed.data, self.x, *self.given.values())]
        if self.gain is not None:
            tensors.append(self.gain)
        weight = 2 if Shared(spec.problem, spec.schedule).direct else 0  # behind x's map and rows
        emulated(self.case).launch(
            arguments,
            *tensors,
            grid=arguments[3] * cluster,
            cluster=cluster,
            maps=self._maps(stride),
            parameters={weight: struct.pack("<Q", self.packed.data.data_ptr())},
            shared=kernel.shared_memory + 1024,
            **{"early": [self.packed.data] if arguments[-2] else (), **options},
        )
        self.check(wanted)

    def _maps(self, stride: int) -> list[TensorMap]:
        """What TMA knows of x, where it brings it."""
        spec = self.case.kernel().spec
        if not Shared(spec.problem, spec.schedule).direct:
            return []
        sizes, box = (self.case.k, max(self.m, 1)), (64, spec.schedule.rows)
        return [TensorMap(self.x.data_ptr(), 2, sizes, (stride,), box, 128)]


def qkv(
    heads: int,
    kv_heads: int,
    dim: int,
    k: int,
    turn: RoPE | None = None,
    norm: bool = False,
    cell: torch.dtype = BF16,
) -> Composition:
    """The fused projection of a block, as the models compose it."""
    rope = RoPE(dim) if turn is None else turn
    before = HeadNorm(dim) >> rope if norm else compose(rope)
    place = PlaceKV(dim, cell)
    ranges = Columns(
        q=(heads * dim, before >> Store(BF16)),
        k=(kv_heads * dim, before >> place),
        v=(kv_heads * dim, compose(place)),
    )
    return RowScale(k) >> ranges


def chains(k: int) -> dict[str, tuple[Composition, int, bool]]:
    """Named compositions: with a number of columns they accept, and whether their results are exact."""
    residual = ResidualAdd() >> SumSquares() >> Store(BF16)
    return {
        "store": (compose(Store(FP32)), 72, True),
        "odd": (compose(Store(BF16)), 37, True),
        "bias": (Bias() >> Gain(1.0) >> Store(FP16), 100, True),
        "residual": (Bias() >> residual, 192, True),
        "residual.fp8": (residual >> EmitFP8(), 128, True),
        "swiglu": (RowScale(k) >> SwiGLU() >> Store(BF16), 200, False),
        "swiglu.fp8": (RowScale(k) >> SwiGLU(1.702, 7.0) >> EmitFP8(), 256, False),
        "qkv.128": (qkv(2, 1, 128, k), 512, False),
        "qkv.64.norm": (qkv(3, 1, 64, k, norm=True), 320, False),
        "qkv.128.partial": (qkv(1, 1, 128, k, RoPE(128, 64), norm=True), 384, False),
        "qkv.80": (qkv(2, 1, 80, k), 320, False),
        "qkv.96": (qkv(2, 1, 96, k), 384, False),
        "qkv.256": (qkv(1, 1, 256, k), 768, False),
        "qkv.64.interleaved": (
            qkv(2, 2, 64, k, RoPE(64, style="interleaved"), cell=FP16),
            384,
            False,
        ),
        "qkv.128.fp8": (qkv(2, 1, 128, k, cell=FP8), 512, False),
    }


def dequantized(composition: Composition) -> Composition:
    """The same behind the scales of an fp8 weight."""
    return Dequantize(None, "column") >> composition
