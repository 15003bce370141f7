"""Fragment order against the DSL: its own thread-value layouts of both MMAs, and traced integers.

Annotations are evaluated as they stand, since the DSL reads them: no postponed ones here.
"""

import numpy as np
import pytest
import torch

from epicute.errors import ArgumentError
from epicute.layouts import (
    BLOCK,
    Record,
    Records,
    bf16_pair,
    fp16_pair,
    fragment_cell,
    fragment_place,
)

pytestmark = pytest.mark.compile


def layouts_of(kind: str) -> tuple:
    """((shape, stride) of A, of B or None): thread-value layouts as nested tuples of ints."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

    found = []

    @cute.jit
    def look():
        if cutlass.const_expr(kind == "warp"):
            op = warp.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (16, 8, 16))
        else:
            op = warpgroup.MmaF16BF16Op(
                cutlass.BFloat16,
                cutlass.Float32,
                (64, 8, 16),
                warpgroup.OperandSource.RMEM,
                OperandMajorMode.K,
                OperandMajorMode.K,
            )
        mma = cute.make_tiled_mma(cute.make_mma_atom(op))
        found.append((mma.tv_layout_A.shape, mma.tv_layout_A.stride))
        if cutlass.const_expr(kind == "warp"):
            found.append((mma.tv_layout_B.shape, mma.tv_layout_B.stride))

    cute.compile(look, options="--gpu-arch sm_90a")
    return tuple(found)


def flat(value) -> list:
    return [value] if isinstance(value, int) else [x for part in value for x in flat(part)]


def index(layout: tuple, thread: np.ndarray, value: np.ndarray) -> np.ndarray:
    """What a (thread, value) layout maps to: coordinates unroll leftmost first."""
    found = np.zeros(np.broadcast(thread, value).shape, np.int64)
    for at, shape, stride in zip((thread, value), *layout, strict=True):
        for size, step in zip(flat(shape), flat(stride), strict=True):
            found = found + at % size * step
            at = at // size
        assert (at == 0).all()
    return found


@pytest.mark.parametrize(("kind", "tiles"), [("warp", 1), ("warpgroup", 4)])
def test_a_registers_are_those_of_the_atom(kind: str, tiles: int) -> None:
    """The same bytes for `mma.sync` and `wgmma` with A in registers: row tile w is warp w's."""
    layout = layouts_of(kind)[0]
    thread, value = np.meshgrid(np.arange(32 * tiles), np.arange(8), indexing="ij")
    cell = index(layout, thread, value)
    row, position = cell % (16 * tiles), cell // (16 * tiles)
    for step in range(4):
        k = step * 16 + position
        lane, found_step, register, half = fragment_place(row % 16, k)
        assert np.array_equal(row // 16, thread // 32)
        assert np.array_equal(lane, thread % 32)
        assert (found_step == step).all()
        assert np.array_equal(register * 2 + half, value)


def test_b_registers_are_two_pairs_of_adjacent_activations() -> None:
    """As `ldmatrix` of rows of 16 bytes leaves them: word t of two vectors of row g."""
    layout = layouts_of("warp")[1]
    thread, value = np.meshgrid(np.arange(32), np.arange(4), indexing="ij")
    cell = index(layout, thread, value)
    assert np.array_equal(cell % 8, thread // 4)
    assert np.array_equal(cell // 8, value // 2 * 8 + thread % 4 * 2 + value % 2)


@pytest.mark.parametrize("high", [0, 1])
def test_the_same_words_are_b_registers_of_two_narrow_tiles(high: int) -> None:
    """The paper's form, weights as B: registers 0, 2 are the tile of rows 0 to 7, registers 1, 3 the other."""
    layout = layouts_of("warp")[1]
    thread, value = np.meshgrid(np.arange(32), np.arange(4), indexing="ij")
    cell = index(layout, thread, value)
    row, position = cell % 8 + 8 * high, cell // 8
    for step in range(4):
        k = step * 16 + position
        lane, found_step, register, half = fragment_place(row, k)
        assert np.array_equal(lane, thread)
        assert (found_step == step).all()
        assert np.array_equal(register, high + value // 2 * 2)
        assert np.array_equal(half, value % 2)


def test_fragment_functions_on_dsl_integers() -> None:
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    found = torch.full((16 * BLOCK, 6), -1, dtype=torch.int32)

    @cute.jit
    def fill(out: cute.Tensor, rows: cutlass.Int32, width: cutlass.Int32):
        for row in range(rows):
            for k in range(width):
                lane, step, register, half = fragment_place(row, k)
                again = fragment_cell(lane, step, register, half)
                place = row * width + k
                out[place, 0] = lane
                out[place, 1] = step
                out[place, 2] = register
                out[place, 3] = half
                out[place, 4] = again[0]
                out[place, 5] = again[1]

    fill(from_dlpack(found), cutlass.Int32(16), cutlass.Int32(BLOCK))
    row, k = np.meshgrid(np.arange(16), np.arange(BLOCK), indexing="ij")
    expected = np.stack([*fragment_place(row, k), row, k], axis=-1)
    assert np.array_equal(found.numpy(), expected.reshape(-1, 6))


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_record_offsets_on_dsl_integers(bits: int) -> None:
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    record = Record(bits, 128, tiles=2, group=32 if bits == 4 else 0, zeros=bits == 4)
    found = torch.full((record.rows * record.depth, 3), -1, dtype=torch.int32)

    @cute.jit
    def fill(out: cute.Tensor, rows: cutlass.Int32, depth: cutlass.Int32):
        for row in range(rows):
            for k in range(depth):
                place = row * depth + k
                out[place, 0] = record.code_bit(row, k)
                out[place, 1] = record.scale_offset(row, k // 32)
                out[place, 2] = record.zero_offset(row, k // 32)

    fill(from_dlpack(found), cutlass.Int32(record.rows), cutlass.Int32(record.depth))
    row, k = np.meshgrid(np.arange(record.rows), np.arange(record.depth), indexing="ij")
    offsets = record.scale_offset(row, k // 32), record.zero_offset(row, k // 32)
    expected = np.stack([record.code_bit(row, k), *offsets], axis=-1)
    assert np.array_equal(found.numpy(), expected.reshape(-1, 3))


def test_pairs_on_dsl_integers() -> None:
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (64,), generator=generator).to(torch.int32)
    found = torch.full((64, 8), -1, dtype=torch.int32)

    @cute.jit
    def fill(words: cute.Tensor, out: cute.Tensor, count: cutlass.Int32):
        for i in range(count):
            for j in cutlass.range_constexpr(4):
                out[i, j] = bf16_pair(words[i], j)
                out[i, 4 + j] = fp16_pair(words[i], j)

    fill(from_dlpack(words), from_dlpack(found), cutlass.Int32(64))
    host = words.numpy()
    pairs = [f(host, j) for f in (bf16_pair, fp16_pair) for j in range(4)]
    assert np.array_equal(found.numpy(), np.stack(pairs, axis=1))


def test_record_starts_need_64_bits() -> None:
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    records = Records.of(106496, 16384, 16)
    found = torch.full((2,), -1, dtype=torch.int64)

    @cute.jit
    def fill(out: cute.Tensor, down: cutlass.Int64):
        out[0] = records.record_offset(down, cutlass.Int32(records.along - 1))

    @cute.jit
    def narrow(down: cutlass.Int32):
        records.record_offset(down, 0)

    fill(from_dlpack(found), cutlass.Int64(records.down - 1))
    assert found[0].item() == records.nbytes - records.record.size
    with pytest.raises(ArgumentError, match="down: got 32 bits"):
        narrow(cutlass.Int32(3))
