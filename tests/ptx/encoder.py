"""A tensor map from the DSL's own host code, to see how it is encoded. Imports the DSL."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import cutlass
import torch
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_tensor

from tests.ptx.descriptors import decoded
from tests.ptx.device import claimed
from tests.ptx.maps import TensorMap
from tests.ptx.objects import Host

__all__ = ["encoded"]

MODES = {0: 0, 32: 1, 64: 2, 128: 3}


class Encoder:
    """A launch whose kernel takes one tensor map."""

    def __init__(self, kind: Any, swizzle: int, box: tuple[int, int], rank: int) -> None:
        self.kind, self.mode, self.box, self.rank = kind, MODES[swizzle], box, rank

    @cute.jit
    def __call__(self, anchor: cute.Tensor, address: Int64, extents: Any, strides: Any) -> None:
        """``extents`` and ``strides``, the adjacent dimension first and without a stride."""
        pointer = cute.make_ptr(self.kind, address, cute.AddressSpace.gmem, assumed_align=16)
        shape = (extents[1], extents[0], *extents[2 : self.rank])
        steps = (strides[0], 1, *strides[1 : self.rank - 1])
        tensor = cute.make_tensor(pointer, cute.make_layout(shape, stride=steps))
        tile = (*self.box, *(1,) * (self.rank - 2))
        inner = cute.make_layout(tile, stride=(self.box[1], 1, *(0,) * (self.rank - 2)))
        layout = cute.make_composed_layout(cute.make_swizzle(self.mode, 4, 3), 0, inner)
        atom, _ = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, tile
        )
        self.kernel(atom).launch(grid=[1, 1, 1], block=[32, 1, 1], cluster=[1, 1, 1])

    @cute.kernel
    def kernel(self, atom: cute.CopyAtom) -> None:
        """Touches the map, so that it is a parameter."""
        cpasync.prefetch_descriptor(atom)


def encoded(
    kind: str,
    swizzle: int,
    box: tuple[int, int],
    address: int,
    extents: tuple[int, ...],
    strides: tuple[int, ...],
) -> TensorMap:
    """What the launch of a kernel is given for a tensor of the DSL's type ``kind``; strides in elements."""
    anchor = make_fake_tensor(cutlass.Uint8, (16,), (1,), assumed_align=16)
    made = Encoder(getattr(cutlass, kind), swizzle, box, len(extents))
    arguments = (
        Int64(0),
        tuple(Int32(0) for _ in extents),
        tuple(Int64(0) for _ in strides),
    )
    module = cute.compile(made, anchor, *arguments, options="--enable-tvm-ffi --gpu-arch sm_90a")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "encoder.o"
        module.export_to_c(object_file_path=str(path), function_name="encoder")
        code = path.read_bytes()
    found: list[bytes] = []
    host = Host(code, lambda launch: found.append(launch.parameter(0, 128)))
    host.function("encoder")(claimed(torch.zeros(16, dtype=torch.uint8)), address, extents, strides)
    return decoded(found[0])
