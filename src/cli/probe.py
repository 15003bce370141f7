"""The smallest honest kernel: what ``epicute doctor`` compiles and, with a GPU, runs."""

# No postponed annotations here: the DSL evaluates those of a kernel where its own names are local.

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from epicute.jit import Compiled, CompileKey, Target, modules_digest

__all__ = ["Probe", "proves"]

THREADS = 128
COUNT = 1000
"""Values the probe runs on; no multiple of the block, so that its guard is used."""


@dataclass(frozen=True)
class Probe:
    """y = 2 x + 1 in float32."""

    target: Target

    @cached_property
    def key(self) -> CompileKey:
        """The kernel's identity."""
        return CompileKey("cli.probe", (), self.target, (modules_digest(__name__),))

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        """The DSL function and its fake arguments."""
        import cuda.bindings.driver as cuda
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

        @cute.kernel
        def body(x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32) -> None:
            thread, _, _ = cute.arch.thread_idx()
            block, _, _ = cute.arch.block_idx()
            i = block * THREADS + thread
            if i < n:
                y[i] = x[i] * 2.0 + 1.0

        @cute.jit
        def launch(x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream) -> None:
            n = cute.size(x)
            body(x, y, n).launch(
                grid=[(n + THREADS - 1) // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream
            )

        n = cute.sym_int()
        tensors = tuple(make_fake_compact_tensor(cutlass.Float32, (n,)) for _ in range(2))
        return launch, (*tensors, make_fake_stream(use_tvm_ffi_env_stream=True))


def proves(compiled: Compiled) -> bool:
    """Whether the compiled probe computes what it should on the current GPU."""
    import torch

    x = torch.arange(COUNT, device="cuda", dtype=torch.float32)
    y = torch.full_like(x, torch.nan)
    compiled(x, y)
    return torch.equal(y, 2 * x + 1)
