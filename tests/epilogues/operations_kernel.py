"""A kernel that runs every operation of the DSL's table once, on drawn numbers."""

# No postponed annotations here: the DSL evaluates those of a kernel where its own names are local.

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from epicute.epilogues.values import OPERATIONS
from epicute.jit import DEFAULT_TARGET, CompileKey, Target, modules_digest

NAMES = tuple(sorted(OPERATIONS))
THREADS = 128
TRUTHS = ("logical_and", "logical_or", "logical_not")


@dataclass(frozen=True)
class EveryOperation:
    """out[k, i] = NAMES[k] of x[i], y[i] and z[i]; truth values as 1 and 0, of x < y and y < z."""

    target: Target = DEFAULT_TARGET

    @cached_property
    def key(self) -> CompileKey:
        sources = (modules_digest("epicute.epilogues.dsl"),)
        return CompileKey("tests.operations", {"names": NAMES}, self.target, sources)

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        return trace()


def apply_all(x: Any, y: Any, z: Any) -> list[Any]:
    """One float32 register for each name."""
    from epicute.epilogues.dsl import DSL_OPERATIONS as table
    from epicute.epilogues.dsl import force

    x, y, z = [x], [y], [z]
    first, second = table["lt"](x, y), table["lt"](y, z)
    found = []
    for name in NAMES:
        arguments = (first, second) if name in TRUTHS else (x, y, z)
        if name == "where":
            arguments = (first, y, z)
        out = table[name](*arguments[: OPERATIONS[name]])
        if name in TRUTHS or name in ("lt", "le", "gt", "ge", "eq", "ne", "isnan"):
            out = table["where"](out, 1.0, 0.0)
        found += out
    return [force(lane) for lane in found]


def trace() -> tuple[Any, tuple[Any, ...]]:
    """The jit function and its fake arguments: three inputs and len(NAMES) times as long an output."""
    import cuda.bindings.driver as cuda
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    @cute.kernel
    def every(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor, out: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * THREADS + thread
        found = apply_all(x[i], y[i], z[i])
        for k in cutlass.range_constexpr(len(NAMES)):
            out[k * cute.size(x) + i] = found[k]

    @cute.jit
    def launch(
        x: cute.Tensor, y: cute.Tensor, z: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream
    ) -> None:
        grid = [cute.size(x) // THREADS, 1, 1]
        every(x, y, z, out).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    n, long = cute.sym_int(), cute.sym_int()
    inputs = tuple(make_fake_compact_tensor(cutlass.Float32, (n,)) for _ in range(3))
    out = make_fake_compact_tensor(cutlass.Float32, (long,))
    return launch, (*inputs, out, make_fake_stream(use_tvm_ffi_env_stream=True))
