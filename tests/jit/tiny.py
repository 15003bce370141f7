"""A kernel small enough to compile in a second: out = x + scale * y, with its scale baked in."""

# No postponed annotations here: the DSL evaluates those of a kernel where its own names are local.

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from epicute.jit import DEFAULT_TARGET, CompileKey, Target

THREADS = 128


@dataclass(frozen=True)
class Tiny:
    """out = x + scale * y over any length, float32.

    ``shared`` bytes are asked for at launch. Two bodies compile to code that must not run:
    ``heavy`` cannot hold its values in registers, ``balance`` gives registers back and is ignored.
    """

    scale: float = 2.0
    shared: int = 0
    body: str = "add"
    name: str = "tests.tiny"
    target: Target = DEFAULT_TARGET

    @cached_property
    def key(self) -> CompileKey:
        fields = {"scale": self.scale, "shared": self.shared, "body": self.body}
        return CompileKey(self.name, fields, self.target)

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        return trace(self.scale, self.shared, self.body)


def trace(scale: float, shared: int, body: str) -> tuple[Any, tuple[Any, ...]]:
    """The jit function and its fake arguments."""
    import cuda.bindings.driver as cuda
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    threads = 1024 if body == "heavy" else THREADS

    @cute.kernel
    def add(x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, n: cutlass.Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * threads + thread
        if i < n:
            out[i] = x[i] + y[i] * scale

    @cute.kernel
    def heavy(x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, n: cutlass.Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        held = cute.make_rmem_tensor(cute.make_layout(96), cutlass.Float32)
        for i in cutlass.range_constexpr(96):
            held[i] = x[thread + i * threads]
        for _ in cutlass.range(100):
            for i in cutlass.range_constexpr(96):
                held[i] = held[i] * held[(i * 7 + 3) % 96] + scale
        for i in cutlass.range_constexpr(96):
            out[thread + i * threads] = held[i]

    @cute.kernel
    def balance(x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, n: cutlass.Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.setmaxregister_decrease(24)
        out[thread] = x[thread] + y[thread] * scale

    bodies = {"add": add, "heavy": heavy, "balance": balance}
    kernel = bodies[body]

    @cute.jit
    def launch(x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream) -> None:
        n = cute.size(x)
        kernel(x, y, out, n).launch(
            grid=[(n + threads - 1) // threads, 1, 1],
            block=[threads, 1, 1],
            smem=shared,
            stream=stream,
        )

    n = cute.sym_int()
    tensors = tuple(make_fake_compact_tensor(cutlass.Float32, (n,)) for _ in range(3))
    return launch, (*tensors, make_fake_stream(use_tvm_ffi_env_stream=True))
