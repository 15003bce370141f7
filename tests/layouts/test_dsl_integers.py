"""The index functions of this room, traced on DSL Int32 and run on the host: the same integers.

Annotations are evaluated as they stand, since the DSL reads them: no postponed ones here.
"""

import numpy as np
import pytest
import torch

from epicute.layouts import (
    WGMMA_THREADS,
    Range,
    accumulator_coord,
    accumulator_owner,
    accumulator_registers,
    chunk_feature,
)

pytestmark = pytest.mark.compile


def test_accumulator_coord_and_owner() -> None:
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    columns = 24
    registers = accumulator_registers(columns)
    found = torch.full((WGMMA_THREADS * registers, 4), -1, dtype=torch.int32)

    @cute.jit
    def fill(out: cute.Tensor, threads: cutlass.Int32, registers: cutlass.Int32):
        for thread in range(threads):
            for register in range(registers):
                row, column = accumulator_coord(thread, register)
                owner = accumulator_owner(row, column)
                place = thread * registers + register
                out[place, 0] = row
                out[place, 1] = column
                out[place, 2] = owner[0]
                out[place, 3] = owner[1]

    fill(from_dlpack(found), cutlass.Int32(WGMMA_THREADS), cutlass.Int32(registers))
    thread, register = np.meshgrid(np.arange(WGMMA_THREADS), np.arange(registers), indexing="ij")
    expected = np.stack([*accumulator_coord(thread, register), thread, register], axis=-1)
    assert np.array_equal(found.numpy(), expected.reshape(-1, 4))


def test_unit_column_and_chunk_feature() -> None:
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    r, unit = Range("halves", 320), 64
    units = r.rows(unit) // unit
    found = torch.full((units, unit, 2), -1, dtype=torch.int32)

    @cute.jit
    def fill(out: cute.Tensor, units: cutlass.Int32, slots: cutlass.Int32):
        for index in range(units):
            for slot in range(slots):
                out[index, slot, 0] = r.unit_column(index, slot, unit)
                out[index, slot, 1] = chunk_feature(slot % 32, 32)

    fill(from_dlpack(found), cutlass.Int32(units), cutlass.Int32(unit))
    index, slot = np.arange(units)[:, None], np.arange(unit)[None, :]
    assert np.array_equal(found[..., 0].numpy(), r.unit_column(index, slot, unit))
    assert np.array_equal(found[0, :, 1].numpy(), chunk_feature(slot[0] % 32, 32))
