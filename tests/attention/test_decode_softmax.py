"""Decode's softmax against a reference that follows the maximum at a distance, and scales within its exponents.

The compiled kernels on the CPU, on logits and scales that random cases do not have.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from epicute.attention.decode_spec import DecodeSpec
from tests.attention.decode_cases import Decoded, compare
from tests.attention.decode_emulated import emulate

pytestmark = pytest.mark.compile

INT4 = DecodeSpec(2, 1, 128, "int4", page=64)
SPECS = {
    "bf16": DecodeSpec(2, 1, 128, page=64, lse=True),
    "fp8": DecodeSpec(2, 1, 128, "fp8", page=64, lse=True),
    "int4": INT4,
}


def drawn(spec: DecodeSpec, heights: torch.Tensor) -> Decoded:
    """One request, whose logits are about ``heights``, in powers of e, for the first head; the second one's are the
    negatives."""
    torch.manual_seed(0)
    n, d = heights.shape[0], spec.head_dim
    q = torch.zeros(1, 1, 2, d)
    q[..., 0, ::2], q[..., 1, ::2] = 1.0, -1.0
    # Odd channels differ at random: queries have nothing there.
    k = torch.randn(n, 1, d)
    k[:, 0, ::2] = heights[:, None] / (spec.scale * (d // 2))
    v = torch.randn(n, 1, d)
    return Decoded.of(spec, q.bfloat16(), [k.bfloat16()], [v.bfloat16()])


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shape", ["rising", "falling", "jumping", "far below"])
def test_references_follow_from_afar(name: str, shape: str) -> None:
    """Each sixteen of tokens, each some, or none moves the reference; for the other head it is the other way round."""
    n = 300
    steady = torch.linspace(-8.0, 8.0, n)
    heights = {
        "rising": steady,
        "falling": steady.flip(0),
        "jumping": torch.where(torch.arange(n) % 97 == 50, 9.0, -3.0),
        "far below": torch.full((n,), -30.0),
    }[shape]
    batch = drawn(SPECS[name], heights)
    emulate(batch, ctas=1)
    compare(batch, lse_error=2e-3)


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 256, 257, 384, 385, 640])
def test_tiles_come_by_two(tokens: int) -> None:
    """Any number of tiles, whole and not; the last one alone, beside another, and with the new row at its end."""
    batch = Decoded.draw(INT4, [tokens], seed=tokens)
    emulate(batch, ctas=1, races=True)
    compare(batch)


@pytest.mark.parametrize("power", [-80, -20, 20, 80])
def test_scales_of_values_have_any_size(power: int) -> None:
    """Of all tokens; float16 would hold no product with them."""
    batch = drawn(INT4, torch.randn(200))
    q, (k,), v = batch.q, batch.raw[0], batch.raw[1][0] * 2.0**power
    batch = Decoded.of(INT4, q, [k], [v])
    emulate(batch, ctas=2)
    compare(batch)


def test_no_token_has_a_value() -> None:
    """Sums stay finite, and what comes out is 0."""
    batch = drawn(replace(INT4, lse=True), torch.randn(200))
    batch = Decoded.of(batch.spec, batch.q, batch.raw[0], [torch.zeros_like(batch.raw[1][0])])
    emulate(batch, ctas=2)
    compare(batch)


def test_a_token_of_no_value_takes_its_share() -> None:
    """An attention sink: nearly all of the sum, and values of zero. And one whose values are larger than all others."""
    n = 200
    heights = torch.randn(n)
    heights[0] = 9.0
    batch = drawn(replace(INT4, lse=True), heights)
    q, (k,), v = batch.q, batch.raw[0], batch.raw[1][0].clone()
    v[0] = 0.0
    small = Decoded.of(batch.spec, q, [k], [v])
    emulate(small, ctas=2)
    compare(small)
    v[5] *= 2.0**24
    large = Decoded.of(batch.spec, q, [k], [v])
    emulate(large, ctas=2)
    compare(large)
