"""Pack once, load ever after: a packed weight as a safetensors file.

    python examples/save_load.py [folder]

The file holds codes and scales, and as metadata the row order, the shape and the version of the layout. A file of
another version, or one packed for another row order than a composition needs, is refused by name.
"""

import sys
import tempfile
from pathlib import Path

import torch

from epicute import Dequantize, EpicuteError, Packed, Store, SwiGLU, Weight, linear
from epicute.quant import quantize_rows
from epicute.testing import assert_equal_bits

N, K = 1024, 512


def main(folder: Path) -> None:
    torch.manual_seed(0)
    fused = Dequantize(activation="row") >> SwiGLU() >> Store(torch.bfloat16)
    gate, up = (Weight(torch.randn(N // 2, K) / K**0.5, name) for name in ("gate", "up"))
    packed = Weight.concat([gate, up]).quantize("fp8").pack(fused.row_order(N))

    path = folder / "gate_up.safetensors"
    packed.save(path)
    loaded = Packed.load(path)
    print(f"{path.name}: {path.stat().st_size:,} bytes, {loaded.format}, {loaded.order}")

    assert loaded.order == packed.order
    assert_equal_bits(loaded.codes, packed.codes)
    x, scale = quantize_rows(torch.randn(4, K))
    before, after = (linear(x, weight, fused, scale=scale) for weight in (packed, loaded))
    assert_equal_bits(after, before)
    print("the loaded weight gives the same bits")

    # A composition without pairs needs another order. It can be packed anew, without the checkpoint.
    plain = Dequantize(activation="row") >> Store(torch.bfloat16)
    try:
        loaded.require_order(plain.row_order(N), "the plain projection")
    except EpicuteError as error:
        print(f"refused: {error}")
    again = loaded.unpack().pack(plain.row_order(N))
    print(f"packed again: {again.order}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
