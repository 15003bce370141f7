"""INT4 peers: PyTorch's tinygemm, vLLM's Marlin and Machete, quack. Each gets the same codes and BF16 scales.

vLLM's kernels are looked for in the library that ``VLLM_OPS`` names, quack where Python finds it; a peer that is not
there fails with the reason, and the row says so. Codes are (N, K) uint8, 8 standing for 0; scales (N, K/128) bfloat16.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.data import clones
from benchmarks.timing import Run

__all__ = ["PEERS", "machete", "marlin", "quack", "tinygemm"]

GROUP = 128
UINT4B8 = 1125899907892224
"""vLLM's number of an unsigned nibble with 8 as its zero."""

INNER_TILES = 8
WORKSPACE = 132 * 4
PERMUTED = [i + 8 * j for i in range(8) for j in range(8)]
"""Marlin's order of 64 scales."""

Build = Callable[[list[Tensor], Tensor, Tensor, int], Run]


def outputs(found: list[Tensor | None], copy: int, out: Tensor) -> dict[str, Tensor]:
    """Keep a copy's result alive, as a graph's memory is its own."""
    found[copy] = out
    return {"out": out}


def tinygemm(x: list[Tensor], codes: Tensor, scale: Tensor, copies: int) -> Run:
    """``torch._weight_int4pack_mm``."""
    pairs = (codes[:, 0::2] << 4 | codes[:, 1::2]).contiguous()
    weights = clones(torch._convert_weight_to_int4pack(pairs, INNER_TILES), copies)
    both = torch.stack([scale.T, torch.zeros_like(scale.T)], dim=2).contiguous()
    scales = clones(both, copies)
    kept: list[Tensor | None] = [None] * copies

    def run(copy: int) -> dict[str, Tensor]:
        out = torch._weight_int4pack_mm(x[copy], weights[copy], GROUP, scales[copy])
        return outputs(kept, copy, out)

    return run


@lru_cache(maxsize=1)
def vllm() -> Any:
    """vLLM's operators."""
    path = os.environ.get("VLLM_OPS")
    if not path:
        raise RuntimeError("VLLM_OPS does not name vLLM's library of stable operators")
    torch.ops.load_library(path)
    return torch.ops._C


def along_k(codes: Tensor) -> Tensor:
    """(K/8, N) int32, eight codes of a column in a word, the lowest first."""
    eights = codes.T.reshape(codes.shape[1] // 8, 8, codes.shape[0]).to(torch.int64)
    shifts = torch.arange(0, 32, 4, device=codes.device)[None, :, None]
    words = (eights << shifts).sum(1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()


def marlin(x: list[Tensor], codes: Tensor, scale: Tensor, copies: int) -> Run:
    """``marlin_gemm`` with FP32 reduction."""
    ops, (n, k), m = vllm(), codes.shape, x[0].shape[0]
    nothing = torch.empty(0, dtype=torch.int32, device=codes.device)
    known = {"b_q_weight": along_k(codes), "perm": nothing, "size_k": k, "size_n": n}
    known |= {"num_bits": 4, "is_a_8bit": False}
    repack = ops.gptq_marlin_repack  # whose arguments are not the same in every release
    given = [known[a.name] for a in repack.default._schema.arguments]
    weights = clones(repack(*given), copies)
    order = torch.tensor(PERMUTED, device=codes.device)
    permuted = scale.T.reshape(-1, 64)[:, order].reshape(k // GROUP, n).contiguous()
    scales = clones(permuted, copies)
    workspace = torch.zeros(WORKSPACE, dtype=torch.int32, device=codes.device)
    kept: list[Tensor | None] = [None] * copies

    def run(copy: int) -> dict[str, Tensor]:
        out = ops.marlin_gemm(
            x[copy],
            None,
            weights[copy],
            None,
            scales[copy],
            None,
            None,
            None,
            workspace,
            UINT4B8,
            m,
            n,
            k,
            False,
            True,
            False,
        )
        return outputs(kept, copy, out)

    return run


def machete(x: list[Tensor], codes: Tensor, scale: Tensor, copies: int) -> Run:
    """``machete_mm`` with its own choice of schedule."""
    ops, bf16 = vllm(), torch.bfloat16
    words = along_k(codes).t().contiguous().t()
    first = ops.machete_prepack_B(words, bf16, UINT4B8, bf16)
    # Columns are adjacent in memory: a plain clone would turn them.
    weights = clones(first.t(), copies) if first.t().is_contiguous() else clones(first, copies)
    turned = first.t().is_contiguous()
    scales = clones(scale.T.contiguous(), copies)
    kept: list[Tensor | None] = [None] * copies

    def run(copy: int) -> dict[str, Tensor]:
        weight = weights[copy].t() if turned else weights[copy]
        out = ops.machete_mm(
            x[copy], weight, UINT4B8, None, scales[copy], None, GROUP, None, None, None
        )
        return outputs(kept, copy, out)

    return run


def quack(x: list[Tensor], codes: Tensor, scale: Tensor, copies: int) -> Run:
    """``gemm_w4a16`` with its own choice of tiles, dependent launch on."""
    from quack.gemm_w4 import gemm_w4a16, prepare_w4_weight  # type: ignore[import-not-found]

    pairs = (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous()
    blob, strip = prepare_w4_weight(pairs, scale.contiguous(), "int4")
    blobs, strips = clones(blob, copies), clones(strip, copies)
    n = codes.shape[0]
    out = [
        torch.empty(x[0].shape[0], n, dtype=torch.bfloat16, device=codes.device)
        for _ in range(copies)
    ]

    def run(copy: int) -> dict[str, Tensor]:
        given = None if blob.shape[0] * 64 != n else out[copy]
        found = gemm_w4a16(x[copy], blobs[copy], strips[copy], out=given, n_out=n, wformat="int4")
        out[copy] = found
        return {"out": found}

    return run


PEERS: dict[str, Build] = {
    "tinygemm-int4": tinygemm,
    "marlin": marlin,
    "machete": machete,
    "quack-w4a16": quack,
}
"""By the table's name."""
