"""Plan once, run many times: few rows of x against a weight that is streamed.

``run`` checks, collects addresses and launches. It allocates nothing on the device, does not wait for it, launches on
the current stream of x's device, and may be captured in a CUDA graph. On the CPU the same composition is evaluated with
NumPy, and nothing is compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary, WeakSet

import torch

from epicute.decode.binding import Operands
from epicute.decode.model import expected_microseconds
from epicute.decode.occupancy import resident_clusters
from epicute.decode.schedule import FewRowSchedule
from epicute.decode.spec import FewRowKernel, WeightForm, buckets_of, kernel_for
from epicute.epilogues.composition import Composition, check_operands, compose
from epicute.epilogues.policy import Policy
from epicute.epilogues.resolve import resolve
from epicute.errors import CompileError, UnsupportedError, require
from epicute.gemm.plan import check_composition, check_pair, check_scaled, check_x
from epicute.gemm.readers import wrong
from epicute.jit import ObjectCache, Report, Target, compile
from epicute.weights import FragmentPacked, QuantizedInt4

__all__ = ["MOST_ROWS", "FewRowsPlan", "plan_few_rows"]

log = logging.getLogger("epicute.decode")

MOST_ROWS = 256
"""Rows of x that ``run`` takes: beyond, the large GEMM on dequantised weights is faster."""

REMEMBERED = 256
"""Calls whose checks are kept."""

CALL = "plan_few_rows(composition, packed)"


def plan_few_rows(
    composition: Composition | Policy,
    packed: FragmentPacked,
    *,
    x_dtype: torch.dtype | None = None,
    max_rows: int = 64,
    batch_invariant: bool = False,
    norm_gain: bool = False,
    schedule: FewRowSchedule | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    alignments: Mapping[str, int] | None = None,
    cache: ObjectCache | None = None,
) -> FewRowsPlan:
    """Choose, compile (or load) and return what runs ``composition`` on ``x @ packed.T`` for few rows of x.

    One plan serves every M from 0 to 256. It has a kernel for up to 8, 16, 32 and 64 rows each, as far as ``max_rows``
    asks for; more rows are served in tiles of the largest, which reads the weight again for each.

    Args:
        composition: policies; see ``epicute.epilogues``. INT4 scales are applied before it; those of fp8 are its
            ``Dequantize``'s.
        packed: weight packed by ``pack_few_rows`` for the composition; any other of its form may be run.
        x_dtype: bfloat16 or float16; by default the weight's, bfloat16 for int4 and fp8.
        max_rows: the largest M that is to be fast.
        batch_invariant: a row's result has the same bits whatever M is and whatever the other rows are. Costs a few
            per cent at M up to 16.
        norm_gain: ``run`` takes ``norm_gain`` (K,) float32, by which x is multiplied on its way in, each product
            rounded to x's dtype: for weights that could not absorb the norm's gain.
        schedule: for ``schedule.rows`` alone, instead of all chosen ones.
        dtypes, alignments: of operands; see ``ArgumentLayout.of``.
        cache: object cache; by default the user's.

    Raises ArgumentError, CompositionError or UnsupportedError before anything is compiled, CompileError where a kernel
    would spill.
    """
    check_composition("composition", composition, CALL)
    if not isinstance(packed, FragmentPacked):
        raise wrong(
            "packed", packed, "a FragmentPacked weight", "pack_few_rows(quantized, epilogue)"
        )
    composition = compose(composition)
    if x_dtype is None:
        x_dtype = torch.float16 if packed.format == "fp16" else torch.bfloat16
    require(
        type(max_rows) is int and 1 <= max_rows <= MOST_ROWS,
        "max_rows",
        max_rows,
        f"1 to {MOST_ROWS}",
        "leave it at 64",
    )
    resolved = resolve(composition, packed.shape[0])
    check_pair("composition", resolved, cast(Any, packed))
    require(
        not norm_gain or "norm_gain" not in resolved.kinds,
        "norm_gain",
        "an operand of the composition by that name",
        "another name for it",
        "rename the policy's operand",
    )
    wanted = buckets_of(packed.format, max_rows, batch_invariant)
    if schedule:
        wanted = (schedule.rows,)
    kernels: dict[int, FewRowKernel] = {}
    for rows in wanted:
        try:
            kernels[rows] = kernel_for(
                composition,
                packed,
                rows,
                x_dtype=x_dtype,
                target=Target.detect(packed.device.index),
                schedule=schedule,
                dtypes=dtypes,
                alignments=alignments,
                gain=norm_gain,
                batch_invariant=batch_invariant,
            )
        except UnsupportedError:
            if not kernels:
                raise
    found = FewRowsPlan(kernels, batch_invariant, cache)
    if packed.device.type == "cuda":
        found.admit(packed)
    return found


class Bound(NamedTuple):
    """What a call's checks found: rows of x; of a launch its function, its arguments and the gain's address."""

    rows: int
    function: Any = None
    arguments: tuple[int, ...] = ()
    gain: int = 0


class FewRowsPlan:
    """Compiled kernels and what their operands must be. Make one with ``plan_few_rows``.

    Attributes:
        kernels: by rows of x that each serves at a time.
        reports: what the compiler said of those that are compiled.
    """

    def __init__(
        self,
        kernels: Mapping[int, FewRowKernel],
        batch_invariant: bool = False,
        cache: ObjectCache | None = None,
    ) -> None:
        self.kernels = dict(sorted(kernels.items()))
        self.batch_invariant = batch_invariant
        self.reports: dict[int, Report] = {}
        self._cache = cache
        self._spec = next(iter(self.kernels.values())).spec
        spec = self._spec
        self._composition = spec.resolved.composition
        problem = spec.problem
        form = (spec.format, spec.resolved.columns, problem.depth, problem.records)
        self._form = WeightForm(*form, spec.scale_dtype)
        self._operands = Operands(spec.layout, problem.dtype, problem.depth, problem.gain)
        self._functions: dict[int, Any] = {}
        self._devices: dict[int, dict[int, int]] = {}
        self._chosen: dict[int, int] = {}
        self._scaled = "weight_scale" in spec.resolved.kinds
        self._bound: dict[Any, Bound] = {}
        self._seen: WeakSet[FragmentPacked] = WeakSet()
        # Whether a weight is known to be in memory: True, or the event behind which it is.
        self._ready: WeakKeyDictionary[FragmentPacked, Any] = WeakKeyDictionary()

    def compile(self) -> FewRowsPlan:
        """Compile or load all kernels; returns the plan. A plan for a weight on a GPU has done so.

        A kernel that would spill is left out where others serve its rows of x, some at a time or with rows to spare.
        """
        for rows in list(self.kernels):
            if rows in self._functions:
                continue
            try:
                compiled = compile(self.kernels[rows], cache=self._cache)
            except CompileError as error:
                if len(self.kernels) == 1:
                    raise
                log.warning("%s; other kernels of the plan serve %d rows", error, rows)
                del self.kernels[rows]
                continue
            self._functions[rows], self.reports[rows] = compiled.function, compiled.report
        return self

    def rows_of(self, m: int) -> int:
        """Rows at a time of the kernel that serves M = ``m``: what the model of the GPU expects to be fastest."""

        def expected(rows: int) -> float:
            spec = self.kernels[rows].spec
            return -(-m // rows) * expected_microseconds(spec.problem, spec.schedule)

        return min(self.kernels, key=expected)

    def admit(self, packed: FragmentPacked) -> None:
        """Load the code onto the weight's device, and wait until the weight is in memory.

        The kernels then read it before the kernel before them is done. Another weight is admitted by ``run``, when all
        that was queued before its first use is done.

        Raises ArgumentError for another form of weight; CompileError in the capture of a CUDA graph.
        """
        self._check_packed(packed)
        self._device(packed.device)
        torch.cuda.synchronize(packed.device)
        self._ready[packed] = True

    def run(self, x: torch.Tensor, packed: FragmentPacked, **operands: torch.Tensor) -> None:
        """Launch ``composition(x @ packed.T)`` on the current stream of x's device.

        The weight must not be written while kernels that were launched before may still run: it is read before they
        are done.

        Args:
            x: (M, K), M up to 256, rows of adjacent elements that start at multiples of 16 bytes; any row stride.
            packed: a weight of the plan's form and order, on the same device.
            **operands: every operand of the composition by name, read and written ones alike, on the same device;
                ``weight_scale`` may be left out where the packed weight has scales. ``norm_gain`` where the plan
                takes one.

        Raises ArgumentError, naming the operand, before the launch.
        """
        scale = getattr(packed, "scale", None)  # what is no weight is refused below
        if self._scaled and scale is not None:
            operands.setdefault("weight_scale", scale)
        # The checks are functions of these alone: tensors like those of a call before need no other.
        try:
            seen = (
                packed.data.get_device(),
                *operands,
                *[
                    (t.data_ptr(), t.shape, t.stride(), t.dtype, t.get_device())
                    for t in (x, *operands.values())
                ],
            )
        except (AttributeError, RuntimeError, TypeError):
            found = self._bind(x, packed, operands)
        else:
            known = self._bound.get(seen) if packed in self._seen else None
            found = self._bind(x, packed, operands) if known is None else known
            if known is None:
                if len(self._bound) >= REMEMBERED:
                    self._bound.clear()
                self._bound[seen] = found
                self._seen.add(packed)
        if found.rows == 0:
            return
        device = x.get_device()
        if device < 0:
            self._evaluate(x, packed, operands.pop("norm_gain", None), operands)
            return
        arguments = (*found.arguments, self._early(packed), found.gain)
        if device == torch.cuda.current_device():
            found.function(packed.data, arguments)
        else:
            with torch.cuda.device(device):
                found.function(packed.data, arguments)

    def _bind(self, x: torch.Tensor, packed: FragmentPacked, operands: dict[str, Any]) -> Bound:
        """Check everything, and collect what a launch takes."""
        check_x(x, "run(x, packed, **operands)")
        if not isinstance(packed, FragmentPacked) or packed not in self._seen:
            self._check_packed(packed)
        given = dict(operands)
        gain = given.pop("norm_gain", None)
        check_scaled(cast(Any, packed), given, self._spec.resolved.kinds)
        check_operands(self._composition, given)
        if packed.device != x.device:
            raise wrong(
                "packed.data", packed.data, f"x's device, {x.device}", "packed.to(x.device)"
            )
        found = self._operands.bind(x, gain, given)
        m = x.shape[0]
        require(m <= MOST_ROWS, "x", f"{m} rows", f"at most {MOST_ROWS}", "use epicute.gemm.plan")
        if m == 0 or x.device.type == "cpu":
            return Bound(m)
        clusters = self._device(x.device)
        rows = self._chosen.get(m) or self._chosen.setdefault(m, self.rows_of(m))
        spec = self.kernels[rows].spec
        found[3] = min(clusters[spec.schedule.cluster], spec.problem.tiles)
        address = 0 if gain is None else gain.data_ptr()
        return Bound(m, self._functions[rows], tuple(found), address)

    def _early(self, packed: FragmentPacked) -> int:
        """1 where the weight is known to be in memory.

        A kernel that starts early reads while those before it still run, the one that wrote the weight perhaps among
        them.
        """
        state = self._ready.get(packed)
        if state is True:
            return 1
        if torch.cuda.is_current_stream_capturing():
            return 0
        if state is None:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(packed.device))
            self._ready[packed] = event
        elif state.query():
            self._ready[packed] = True
        return 0

    def _device(self, device: torch.device) -> dict[int, int]:
        """Clusters that a device which has the code runs at once, by their CTAs; loads it there at first."""
        index = device.index
        found = self._devices.get(index)
        if found is not None:
            return found
        properties = torch.cuda.get_device_properties(device)
        target = next(iter(self.kernels.values())).target
        require(
            (properties.major, properties.minor) == target.capability,
            "x.device",
            f"{properties.name}, compute capability {properties.major}.{properties.minor}",
            f"a GPU for {target.arch}",
            "plan for a weight on that device",
            UnsupportedError,
        )
        require(
            not torch.cuda.is_current_stream_capturing(),
            "plan",
            f"not loaded on {device} yet, while a CUDA graph is captured",
            "a plan that was made, or run once, on that device before",
            "plan before the capture",
            CompileError,
        )
        self.compile()
        records = self._spec.problem.records
        shape = (records.down, records.along, records.record.size)
        # For no row of x: of all addresses, those of scalars alone are read.
        anchor = torch.empty(shape, dtype=torch.uint8, device=device)
        with torch.cuda.device(device):
            for rows, function in self._functions.items():
                idle = [anchor.data_ptr()] * self.kernels[rows].spec.layout.count
                idle[1:4] = (16, 0, 1)
                function(anchor, (*idle, 0, 0))
        sizes = {kernel.spec.schedule.cluster for kernel in self.kernels.values()}
        self._devices[index] = {size: resident_clusters(index, size) for size in sizes}
        return self._devices[index]

    def _check_packed(self, packed: Any) -> None:
        if not isinstance(packed, FragmentPacked):
            raise wrong(
                "packed", packed, "a FragmentPacked weight", "pack_few_rows(quantized, epilogue)"
            )
        form = WeightForm.of(packed)
        require(
            form == self._form,
            "packed",
            f"{packed.name}: {form}",
            f"{self._form}",
            "plan again for that weight",
        )
        packed.require_order(self._spec.resolved.order, "the plan's composition")

    def _evaluate(
        self, x: torch.Tensor, packed: FragmentPacked, gain: Any, operands: dict[str, Any]
    ) -> None:
        """The same on the CPU, in float32."""
        quantized = packed.unpack()
        integer = isinstance(quantized, QuantizedInt4)
        weight = quantized.dequantize() if integer else quantized.codes.float()
        values = x.float() if gain is None else (x.float() * gain).to(x.dtype).float()
        for name, value in self._composition.evaluate(values @ weight.T, **operands).items():
            operands[name].copy_(value)

    def __str__(self) -> str:
        lines = [str(self._composition)]
        for rows, kernel in self.kernels.items():
            lines.append(f"up to {rows} rows: {kernel.spec.schedule}")
        return "\n".join(lines)
