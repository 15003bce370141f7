"""Plan once, run many times: ``run`` checks, collects addresses and launches, and nothing else.

What it has checked it remembers, by address, shape, strides, dtype and device, so that tensors that come again are only
looked up. It allocates nothing on the device, does not wait for it, launches on the current stream of x's device, and
may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch

from epicute.epilogues.arithmetic import RowScale
from epicute.epilogues.composition import Columns, Composition, check_operands, compose
from epicute.epilogues.policy import Policy
from epicute.epilogues.resolve import Resolved, resolve
from epicute.errors import ArgumentError, UnsupportedError, require
from epicute.gemm.explain import describe
from epicute.gemm.fitting import compile_fitting
from epicute.gemm.readers import reader, wrong
from epicute.gemm.schedule import Schedule
from epicute.gemm.spec import GemmKernel, kernel_for
from epicute.jit import ObjectCache, Report, Target, compile
from epicute.weights import Packed, Quantized, Weight

__all__ = ["Plan", "align_rows", "plan"]

PLAN, RUN = "plan(composition, packed)", "run(x, packed, **operands)"
"""How errors show the order of the arguments."""

EPILOGUES = (Policy, Composition, Columns)
WEIGHTS = (Packed, Quantized, Weight)

REMEMBERED = 256
"""Sets of tensors, by address and shape, that a plan remembers to have checked."""

UNKNOWN: Any = object()

LARGEST_M = 2**31 - 2**16
"""Rows that 32-bit tile arithmetic can count."""


def plan(
    composition: Composition | Policy,
    packed: Packed,
    *,
    x_dtype: torch.dtype | None = None,
    target: Target | None = None,
    schedule: Schedule | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    alignments: Mapping[str, int] | None = None,
    expected_m: int | None = None,
    accumulate: str | None = None,
    cache: ObjectCache | None = None,
) -> Plan:
    """Choose, compile (or load) and return what runs ``composition`` on ``x @ packed.T``.

    One plan serves every M, including 0. What recompiles: another N, K, dtype, composition, operand dtype or alignment,
    schedule or target; never another M, device of the same kind, or tensor.

    Args:
        composition: policies; see ``epicute.epilogues``.
        packed: weight packed with ``composition.row_order(N)``; any other weight of its shape and dtype may be run.
        x_dtype: dtype of x, which must be the weight's.
        target, schedule, dtypes, alignments, expected_m, accumulate: see ``kernel_for``.
        cache: object cache; by default the user's.

    Raises ArgumentError, CompositionError or UnsupportedError before anything is compiled, CompileError where the
    kernel would spill or serialise.
    """
    check_composition("composition", composition, PLAN)
    check_packed(packed, "composition", PLAN)
    composition = compose(composition)
    x_dtype = x_dtype or packed.dtype
    require(
        x_dtype == packed.dtype,
        "x_dtype",
        x_dtype,
        f"{packed.dtype}, as the weight's",
        "quantise the weight to that format",
    )
    n, k = packed.shape
    check_pair("composition", resolve(composition, n), packed)
    kernel = kernel_for(
        composition,
        n=n,
        k=k,
        dtype=x_dtype,
        target=target or _target_of(packed.device),
        schedule=schedule,
        dtypes=dtypes,
        alignments=alignments,
        expected_m=expected_m,
        accumulate=accumulate,
    )
    if schedule is None:
        kernel, compiled = compile_fitting(kernel, cache=cache)
    else:
        compiled = compile(kernel, cache=cache)
    found = Plan(kernel, compiled)
    if packed.device.type == "cuda":
        found.load(packed)
    return found


def check_x(x: Any, call: str) -> None:
    """Refuse an x that is no tensor; ``call`` shows the order of the arguments."""
    if not isinstance(x, torch.Tensor):
        elsewhere = isinstance(x, (*WEIGHTS, *EPILOGUES))
        raise wrong("x", x, "a tensor", f"call {call}" if elsewhere else "make a tensor of it")


def x_fix(x: torch.Tensor, dtype: torch.dtype, k: int) -> str:
    """What to do with an x of another dtype, or of another K, than the weight's."""
    if x.dim() == 0 or x.shape[-1] != k:
        return f"the weight reads {k} features: give x that many, or take the weight of this projection"
    if x.dtype != dtype:
        return "quantise x to the weight's format, or the weight to x's"
    return f"flatten it: x.reshape(-1, {k})"


def check_packed(packed: Any, epilogue: str, call: str) -> None:
    """Refuse a weight that is not packed, and say how to pack it for the argument ``epilogue``."""
    if isinstance(packed, Packed):
        return
    fix = "read it with Packed.load(path), or make it with Weight(w).quantize(…).pack(…)"
    if isinstance(packed, Weight):
        fix = f"add .quantize(…).{_pack(packed.values, epilogue)}"
    elif isinstance(packed, Quantized):
        fix = f"add .{_pack(packed.codes, epilogue)}"
    elif isinstance(packed, torch.Tensor):
        fix = f"Weight(w).quantize(…).{_pack(packed, epilogue)}"
    elif isinstance(packed, EPILOGUES):
        fix = f"call {call}"
    raise wrong("packed", packed, "a Packed weight", fix)


def _pack(matrix: torch.Tensor, epilogue: str) -> str:
    return f"pack({epilogue}.row_order({matrix.shape[0] if matrix.dim() == 2 else 'n'}))"


def check_composition(name: str, given: Any, call: str) -> None:
    """Refuse what is neither policy nor composition, as the argument ``name``."""
    if isinstance(given, EPILOGUES):
        return
    fix = "pass a policy, or several as a >> b"
    if isinstance(given, (torch.Tensor, *WEIGHTS)):
        fix = f"call {call}"
    elif callable(given) and hasattr(given, "__name__"):
        fix = f"call it: {given.__name__}(…)"
    raise wrong(name, given, "a policy or a composition", fix)


def check_pair(name: str, resolved: Resolved, packed: Packed) -> None:
    """Refuse a weight in another order or of another K than the composition's, and one whose scales it would drop."""
    k = packed.shape[1]
    for _, _, policies in resolved.composition.branches():
        for policy in policies:
            require(
                not isinstance(policy, RowScale) or policy.width == k,
                f"{policy.title}.width",
                getattr(policy, "width", None),
                f"{k}, the K of {packed.name} {packed.shape}, as the row's sums are of what is multiplied",
                f"write RowScale(width={k}, …)",
            )
    packed.require_order(resolved.order, f"the {name}")
    require(
        packed.scale is None or "weight_scale" in resolved.kinds,
        name,
        f"no weight_scale for {packed.name}, whose codes have scales",
        "Dequantize() first",
        "write Dequantize(…) >> …",
    )


def check_scaled(packed: Packed, operands: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Say of a weight without scales what ``Dequantize`` misses, instead of naming an operand that nobody has."""
    require(
        packed.scale is not None or "weight_scale" in operands or "weight_scale" not in kinds,
        "weight_scale",
        f"nothing, and {packed.name} has no scales, as its format is {packed.format}",
        "a scale for each column of the weight",
        "drop Dequantize, or say weight=None in it where x has scales; else quantise the weight to fp8",
    )


def _target_of(device: torch.device) -> Target:
    return Target.detect(device.index) if device.type == "cuda" else Target.detect()


class Plan:
    """A compiled projection with its epilogue. Make one with ``plan``."""

    def __init__(self, kernel: GemmKernel, compiled: Any) -> None:
        self.kernel = kernel
        spec = kernel.spec
        self.report: Report = compiled.report
        self.origin: str = compiled.origin
        self._function = compiled.function
        self._composition = spec.resolved.composition
        self._problem = spec.problem
        self._tile = spec.schedule.tile_m * spec.schedule.cluster_m
        self._n_tiles = -(-spec.problem.rows // spec.schedule.tile_n) // spec.schedule.cluster_n
        self._itemsize = spec.problem.dtype.itemsize
        self._row_bytes = spec.problem.depth * self._itemsize
        self._readers = [(s.name, reader(s)) for s in spec.layout.operands]
        matrices = [s for s in spec.layout.operands if s.fields == ("address", "row_stride")]
        widths = {s.name: int(s.shape[1]) * s.dtype.itemsize for s in matrices}
        written = [s for s in spec.layout.operands if s.kind.written]
        self._scattered = [(s.name, s.first) for s in written if s not in matrices]
        self._outputs = [(s.name, s.first, widths[s.name]) for s in matrices if s.kind.written]
        # An output may be the very matrix that is read: every tile reads its part before it writes it.
        self._pairs = [
            (s, t.name, s.first, widths[s.name], t.first, widths[t.name])
            for t in matrices
            if t.kind.written
            for s in matrices
            if not s.kind.written or s.first < t.first
        ]
        self._takes_scale = "weight_scale" in spec.resolved.kinds
        self._clusters: dict[int, int] = {}
        self._seen: WeakSet[Packed] = WeakSet()
        self._bound: dict[Any, tuple[int, ...] | None] = {}

    @property
    def schedule(self) -> Schedule:
        """The tile, cluster and stages it was compiled with."""
        return self.kernel.spec.schedule

    def run(self, x: torch.Tensor, packed: Packed, **operands: torch.Tensor) -> None:
        """Launch ``composition(x @ packed.T)`` on the current stream of x's device.

        Args:
            x: (M, K), rows of adjacent elements that start at multiples of 16 bytes; any row stride. Nothing is
                copied here; where they do not, ``align_rows`` does it.
            packed: a weight with the plan's shape, dtype and order, on the same device.
            **operands: every operand of the composition by name, read and written ones alike, on the same device;
                ``weight_scale`` may be left out where the packed weight has scales.

        Raises ArgumentError, naming the operand, before the launch.
        """
        arguments = self.bind(x, packed, operands)
        if arguments is None:
            return
        device = x.get_device()
        if device == torch.cuda.current_device():
            self._function(packed.raw, arguments)
        else:
            with torch.cuda.device(device):
                self._function(packed.raw, arguments)

    def load(self, packed: Packed) -> None:
        """Load the code onto the weight's device, so that the first ``run`` may be captured in a CUDA graph.

        Launches the kernel once for no rows; no address but the weight's own is read.
        """
        arguments = [packed.raw.data_ptr()] * self.kernel.spec.layout.count
        arguments[1:4] = (-(-self._row_bytes // 16) * 16, 0, 1)
        with torch.cuda.device(packed.device):
            self._function(packed.raw, tuple(arguments))

    def bind(
        self, x: torch.Tensor, packed: Packed, operands: dict[str, Any]
    ) -> tuple[int, ...] | None:
        """Check everything and return the kernel's arguments; None where M is 0."""
        if self._takes_scale and "weight_scale" not in operands:
            scale = getattr(packed, "scale", None)  # what is no weight is refused below
            if scale is not None:
                operands["weight_scale"] = scale
        # The checks are functions of these alone: tensors like those of a call before need no other.
        try:
            given = (x, *operands.values())
            seen = (
                packed.codes.get_device(),
                *operands,
                *[(t.data_ptr(), t.shape, t.stride(), t.dtype, t.get_device()) for t in given],
            )
            found = self._bound.get(seen, UNKNOWN)
        except (AttributeError, RuntimeError, TypeError):
            return self._bind(x, packed, operands)
        if found is UNKNOWN or packed not in self._seen:
            found = self._bind(x, packed, operands)
            if len(self._bound) >= REMEMBERED:
                self._bound.clear()
            self._bound[seen] = found
        return found

    def _bind(
        self, x: torch.Tensor, packed: Packed, operands: dict[str, Any]
    ) -> tuple[int, ...] | None:
        try:
            device = x.get_device()
        except AttributeError:
            check_x(x, RUN)
            raise
        clusters = self._clusters.get(device) or self._admit(x)
        if not isinstance(packed, Packed) or packed not in self._seen:
            self._check_packed(packed)
        if packed.codes.get_device() != device:
            raise wrong(
                "packed.codes", packed.codes, f"x's device, {x.device}", "packed.to(x.device)"
            )
        if len(operands) != len(self._readers):
            check_scaled(packed, operands, self.kernel.spec.resolved.kinds)
            self._check_names(operands)
        rows, stride = self._check_x(x)
        tiles = -(-rows // self._tile) * self._n_tiles
        first = x.data_ptr()
        found = [first, stride, rows, min(clusters, tiles)]
        try:
            for name, read in self._readers:
                given = operands[name]
                if given.get_device() != device:
                    raise wrong(name, given, f"x's device, {x.device}", f"{name}.to(x.device)")
                read(given, rows, found)
        except (AttributeError, KeyError):
            self._check_names(operands)
            self._check_tensors(x, operands)
            raise
        last = first + (rows - 1) * stride + self._row_bytes
        for name, index in self._scattered:
            if first <= found[index] < last:
                raise _overlapping(name, operands[name])
        mine = (first, stride, self._row_bytes)
        for name, index, width in self._outputs:
            if _share((found[index], found[index + 1], width), mine, rows):
                raise _overlapping(name, operands[name])
        for other, name, i, i_width, j, j_width in self._pairs:
            one, two = (found[i], found[i + 1], i_width), (found[j], found[j + 1], j_width)
            if _share(one, two, rows) and (other.kind.written or one != two):
                raise _overlapping(name, operands[name], other.name)
        return tuple(found) if rows else None

    def _admit(self, x: torch.Tensor) -> int:
        """Clusters that run at once on x's device; refuses a device that the code is not for."""
        device = x.device
        require(
            device.type == "cuda",
            "x",
            f"a tensor on {device}",
            "a CUDA tensor",
            "move x and the weight to a GPU; without one, epicute.linear does the same on the CPU",
        )
        properties = torch.cuda.get_device_properties(device)
        capability = (properties.major, properties.minor)
        target = self.kernel.target
        require(
            capability == target.capability,
            "x.device",
            f"{properties.name}, compute capability {capability[0]}.{capability[1]}",
            f"a GPU for {target.arch}",
            "plan with target=Target.detect(device)",
            UnsupportedError,
        )
        clusters = properties.multi_processor_count // self.schedule.cluster
        self._clusters[device.index] = clusters
        return clusters

    def _check_packed(self, packed: Packed) -> None:
        check_packed(packed, "composition", RUN)
        problem = self._problem
        wanted = (problem.columns, problem.depth)
        require(
            packed.shape == wanted and packed.dtype == problem.dtype,
            "packed",
            f"{packed.name} {packed.shape} {packed.dtype}",
            f"{wanted} {problem.dtype}",
            "plan again for that weight",
        )
        packed.require_order(self.kernel.spec.resolved.order, "the plan's composition")
        self._seen.add(packed)

    def _check_names(self, operands: Mapping[str, Any]) -> None:
        check_operands(self._composition, operands)
        missing = [name for name, _ in self._readers if name not in operands]
        require(
            not missing,
            "operands",
            f"missing {', '.join(missing)}",
            "every output as a tensor to write to",
            "allocate them; epicute.linear does",
        )

    def _check_tensors(self, x: torch.Tensor, operands: Mapping[str, Any]) -> None:
        for name, _ in self._readers:
            if not isinstance(operands[name], torch.Tensor):
                raise wrong(
                    name, operands[name], f"a tensor on {x.device}", "make a tensor of it once"
                )

    def _check_x(self, x: torch.Tensor) -> tuple[int, int]:
        """(M, row stride in bytes)."""
        problem = self._problem
        shape = x.shape
        if x.dtype is not problem.dtype or len(shape) != 2 or shape[1] != problem.depth:
            raise wrong(
                "x",
                x,
                f"(M, {problem.depth}) {problem.dtype}",
                x_fix(x, problem.dtype, problem.depth),
            )
        rows = shape[0]
        if rows > LARGEST_M:
            raise wrong("x", x, f"at most {LARGEST_M} rows", "split the batch")
        pitch, step = x.stride()
        stride = pitch * self._itemsize
        if rows <= 1:
            stride = -(-self._row_bytes // 16) * 16
        adjacent = step == 1 or problem.depth == 1 or rows == 0
        if not adjacent or stride % 16 or x.data_ptr() % 16 or (rows > 1 and pitch < problem.depth):
            raise wrong(
                "x",
                x,
                "rows of adjacent elements that start at multiples of 16 bytes",
                "x = epicute.align_rows(x)",
            )
        return rows, stride

    def __str__(self) -> str:
        return describe(self.kernel, self.report)


def _share(one: tuple[int, int, int], two: tuple[int, int, int], rows: int) -> bool:
    """Whether matrices of (address, row stride, row width), in bytes, share any; columns of one buffer need not."""
    (a, a_step, a_width), (b, b_step, b_width) = one, two
    if a >= b + (rows - 1) * b_step + b_width or b >= a + (rows - 1) * a_step + a_width:
        return False
    return a_step != b_step or not b_width <= (a - b) % b_step <= b_step - a_width


def _overlapping(name: str, given: torch.Tensor, other: str = "x") -> ArgumentError:
    return wrong(name, given, f"memory apart from {other}", f"allocate it apart from {other}")


def align_rows(x: torch.Tensor) -> torch.Tensor:
    """A copy of ``x`` (M, K) whose rows start at multiples of 16 bytes."""
    require(x.dim() == 2, "x", f"{tuple(x.shape)}", "(M, K)", "flatten the leading dimensions")
    per_vector = 16 // x.element_size()
    rows, depth = x.shape
    pitch = -(-depth // per_vector) * per_vector
    found = torch.zeros((rows, pitch), dtype=x.dtype, device=x.device)
    found[:, :depth] = x
    return found[:, :depth]
