"""Launches of a program on tensors of the CPU."""

from __future__ import annotations

import random
import struct
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tests.ptx.handlers import Handlers
from tests.ptx.machine import Cluster
from tests.ptx.maps import TensorMap
from tests.ptx.memory import Memory
from tests.ptx.program import Program
from tests.ptx.translate import Translator

__all__ = ["Emulated", "Kernel", "ptx_of"]

SHARED_BYTES = 227 * 1024
MAP_BYTES = 128


def ptx_of(kernel: Any) -> str:
    """What a kernel of ``epicute.jit`` compiles to, before ptxas."""
    import cutlass.cute as cute

    function, arguments = kernel.trace()
    with tempfile.TemporaryDirectory() as folder:
        options = (
            f"--enable-tvm-ffi --gpu-arch {kernel.key.target.arch} --keep-ptx --dump-dir {folder}"
        )
        return str(cute.compile(function, *arguments, options=options).__ptx__)


class Kernel:
    """A PTX entry that runs on tensors of the CPU.

    Attributes:
        program: what was parsed. maps: offsets of the parameters that are tensor maps, in order. scalars: of those that
            are integers of 64 bits.
    """

    def __init__(self, ptx: str) -> None:
        self.program = Program(ptx)
        self.code = Translator(self.program, Handlers(self.program))
        params = list(self.program.params.values())
        self.maps = [p.offset for p in params if p.size == MAP_BYTES]
        self.scalars = [p for p in params if p.size == 8 and not p.array]

    def launch(
        self,
        arguments: Sequence[int],
        *tensors: torch.Tensor,
        grid: int | tuple[int, ...] = 1,
        cluster: int = 1,
        maps: Sequence[TensorMap] = (),
        parameters: Mapping[int, bytes] | None = None,
        shared: int = SHARED_BYTES,
        seed: int | None = None,
        races: bool = False,
        resident: int = 1,
        early: Sequence[torch.Tensor] | None = None,
        late: float = 0.0,
    ) -> None:
        """Run a grid.

        Args:
            arguments: the 64-bit integers, in the order of the parameters that are such.
            tensors: all global memory that may be touched.
            grid: CTAs, along x or along x, y, z. cluster: CTAs of a cluster.
            maps: of the parameters that are tensor maps, in order.
            parameters: bytes of any other parameter, by its number.
            shared: bytes of shared memory of a CTA, the system's 1024 included.
            seed: to run clusters, warps and copies in an order of its own; None: in turn.
            races: look for accesses of shared memory that nothing orders.
            resident: clusters that run at the same time; kernels whose CTAs wait for each other need all of them.
            early: what a kernel with ``griddepcontrol.wait`` may touch before that; None: anything.
            late: share of copies that come only when nothing else can go on.

        Raises AssertionError for all that hardware would not forgive, Deadlock (one of these) where nothing can go on.
        """
        buffer, given = self._parameters(arguments, parameters or {})
        assert len(maps) <= len(self.maps), (
            f"{len(maps)} tensor maps for {len(self.maps)} parameters"
        )
        tables = dict(zip(self.maps, maps, strict=False))
        size = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
        assert size[0] % cluster == 0, f"{size[0]} CTAs in clusters of {cluster}"
        memory = Memory(*tensors, early=early)
        blocks = [(x, y, z) for z in range(size[2]) for y in range(size[1]) for x in range(size[0])]
        groups = [blocks[i : i + cluster] for i in range(0, len(blocks), cluster)]
        if seed is not None:
            random.Random(seed).shuffle(groups)
        assert resident == 1 or not races, "races are looked for in one cluster at a time"
        for first in range(0, len(groups), resident):
            some = [
                Cluster(
                    self.program,
                    self.code,
                    memory,
                    buffer,
                    given,
                    tables,
                    group,
                    size,
                    shared,
                    seed,
                    races,
                    late,
                )
                for group in groups[first : first + resident]
            ]
            Cluster.run_together(some)

    def _parameters(
        self, arguments: Sequence[int], others: Mapping[int, bytes]
    ) -> tuple[np.ndarray, np.ndarray]:
        buffer = np.zeros(self.program.param_bytes, np.uint8)
        given = np.zeros(self.program.param_bytes, bool)
        assert len(arguments) == len(self.scalars), (
            f"{len(arguments)} arguments for {len(self.scalars)} parameters of 64 bits"
        )
        params = list(self.program.params.values())
        pieces = [
            (p.offset, struct.pack("<Q", int(v) % 2**64))
            for p, v in zip(self.scalars, arguments, strict=True)
        ]
        pieces += [(params[i].offset, data) for i, data in others.items()]
        for offset, data in pieces:
            buffer[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
            given[offset : offset + len(data)] = True
        return buffer, given


class Emulated(Kernel):
    """A kernel of ``epicute.jit`` whose grid is one of its arguments, number ``blocks``."""

    def __init__(self, kernel: Any, blocks: int = -1) -> None:
        super().__init__(ptx_of(kernel))
        self.blocks = blocks

    def launch(self, arguments: Sequence[int], *tensors: torch.Tensor, **options: Any) -> None:
        """Run all blocks, one after the other; ``tensors`` are all memory they may touch."""
        given = {"grid": arguments[self.blocks], "early": (), **options}
        super().launch(arguments, *tensors, **given)
