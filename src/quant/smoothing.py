"""Smoothing of queries and keys: means taken out before quantisation, given back as ΔS (MpFA 4.2).

Channels that are large in every token cost the codes of their neighbours. With means q̄ (one a query
head) and k̄ (one a KV head), and x_c = x - x̄,

    q·k = q_c·k_c  +  q̄·k_c  +  q·k̄
                      ΔS[key]    the same for all keys of a row: softmax does not see it

ΔS is computed from the *unquantised* k_c, in FP32, and stored beside the page as one to three BF16
terms, hi + lo + ...; see ``split_terms``.

* ``sequence``: means over the valid tokens of a request at its first prefill, frozen from then on:
  later chunks and decoded tokens are centred by them. All keys of one softmax row must share one
  k̄, so such pages cannot be shared between requests.
* ``static``: means calibrated once per layer and head. ΔS then belongs to the page: prefixes are
  shared and prefill is chunked freely.
* none: no means, no side array.

The third term shifts a row's log-sum-exp: ``lse_shift`` says by how much, for merging rows that
were computed under different means, or for callers that want the true one.

Three places where a kernel may add ΔS are written out in ``scores``. They differ in rounding alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from epicute.errors import require
from epicute.quant.fp8 import as_float32

__all__ = [
    "KINDS",
    "PLACEMENTS",
    "TERMS",
    "Calibration",
    "Means",
    "centre",
    "delta",
    "join_terms",
    "lse_shift",
    "scores",
    "sequence_means",
    "split_terms",
]

KINDS = ("none", "sequence", "static")
"""Where means come from."""

PLACEMENTS = ("acc_init", "mma", "elementwise")
"""Where a kernel adds ΔS: the accumulator's first value, a rank-one MMA, after the product."""

TERMS = (1, 2, 3)
"""BF16 terms of a stored ΔS: 8, 16 or all 24 bits of FP32."""

RANK_ONE_K = 16
"""Depth of the BF16 MMA that adds ΔS; columns beyond the terms are zero."""


@dataclass(frozen=True, eq=False)
class Means:
    """Means of one layer: ``q`` (groups, q_heads, D) and ``k`` (groups, kv_heads, D), float32.

    A group is a request for kind ``sequence``; ``static`` has one group, for all. Frozen: no
    function here changes them.
    """

    kind: str
    q: torch.Tensor
    k: torch.Tensor

    def __post_init__(self) -> None:
        require(
            self.kind in KINDS[1:],
            "kind",
            self.kind,
            f"one of {KINDS[1:]}",
            "pass no means where nothing is smoothed",
        )
        _check_pair(self.q, self.k, "means")
        require(
            self.q.dtype == self.k.dtype == torch.float32 and len(self.q) == len(self.k),
            "means",
            f"{tuple(self.q.shape)} {self.q.dtype}, {tuple(self.k.shape)} {self.k.dtype}",
            "float32, as many groups of queries as of keys",
            "build them with sequence_means or Calibration",
        )
        require(
            self.kind == "sequence" or len(self.q) == 1,
            "means",
            f"{len(self.q)} groups",
            "one group for static means",
            "take the means of one layer",
        )


def _check_pair(q: torch.Tensor, k: torch.Tensor, argument: str) -> None:
    require(
        q.ndim == k.ndim == 3
        and q.shape[2] == k.shape[2]
        and min(q.shape[1], k.shape[1]) > 0
        and q.shape[1] % k.shape[1] == 0,
        argument,
        f"q {tuple(q.shape)}, k {tuple(k.shape)}",
        "(rows, q_heads, D) and (rows, kv_heads, D) with q_heads a multiple of kv_heads",
        "view the projections by heads",
    )


def _group_of(rows: int, starts: torch.Tensor) -> torch.Tensor:
    """(rows,) sequence of each row."""
    require(
        starts.ndim == 1
        and starts.numel() >= 2
        and starts.dtype in (torch.int32, torch.int64)
        and int(starts[0]) == 0
        and int(starts[-1]) == rows
        and bool((starts.diff() >= 0).all()),
        "starts",
        starts.tolist(),
        f"0, ..., {rows}, never falling: the first row of each sequence and the end",
        "pass cumulative lengths",
    )
    index = torch.arange(rows, device=starts.device)
    return torch.bucketize(index, starts.to(torch.int64)[1:-1], right=True)


@torch.no_grad()
def sequence_means(
    q: torch.Tensor,
    k: torch.Tensor,
    starts: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
) -> Means:
    """Means over the valid tokens of every sequence of a packed batch.

    Args:
        q: (T, q_heads, D) float32, bfloat16 or float16, after RoPE.
        k: (T, kv_heads, D), the same tokens.
        starts: (sequences + 1,) int32 or int64 cumulative lengths; by default one sequence.
        valid: (T,) bool; rows that are False (padding, whatever they hold) count nowhere.

    Returns:
        Means of kind ``sequence``, a group per sequence; zeros for one without valid tokens. Summed
        in float64 and rounded once.

    Raises:
        ArgumentError: shapes, dtypes, or ``starts`` that is no list of cumulative lengths.
    """
    _check_pair(q, k, "q")
    rows = q.shape[0]
    require(
        k.shape[0] == rows and (valid is None or valid.shape == (rows,)),
        "k.shape",
        (tuple(k.shape), None if valid is None else tuple(valid.shape)),
        f"{rows} rows of keys, and of valid",
        "pass the keys of the same tokens",
    )
    if starts is None:
        starts = torch.tensor([0, rows])
    group = _group_of(rows, starts).to(q.device)
    kept = torch.ones(rows, dtype=torch.bool, device=q.device) if valid is None else valid
    count = torch.zeros(starts.numel() - 1, dtype=torch.float64, device=q.device)
    count.index_add_(0, group, kept.to(torch.float64))
    found = []
    for x in (q, k):
        x = torch.where(kept[:, None, None], as_float32(x), 0.0).to(torch.float64)
        total = torch.zeros(len(count), *x.shape[1:], dtype=torch.float64, device=x.device)
        total.index_add_(0, group, x)
        found.append((total / count.clamp(min=1)[:, None, None]).to(torch.float32))
    return Means("sequence", found[0], found[1])


class Calibration:
    """Running sums over calibration text, per layer and head, for ``static`` means."""

    def __init__(self, layers: int, q_heads: int, kv_heads: int, head_dim: int) -> None:
        """All sums zero.

        Raises:
            ArgumentError: a count below 1, or query heads that are no multiple of KV heads.
        """
        require(
            min(layers, q_heads, kv_heads, head_dim) >= 1 and q_heads % kv_heads == 0,
            "q_heads",
            (layers, q_heads, kv_heads, head_dim),
            "positive counts, q_heads a multiple of kv_heads",
            "pass the model's shape",
        )
        self.q = torch.zeros(layers, q_heads, head_dim, dtype=torch.float64)
        self.k = torch.zeros(layers, kv_heads, head_dim, dtype=torch.float64)
        self.tokens = torch.zeros(layers, dtype=torch.int64)

    @torch.no_grad()
    def observe(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, valid: torch.Tensor | None = None
    ) -> None:
        """Add the tokens of one forward pass.

        Args:
            layer: index.
            q: (T, q_heads, D), after RoPE.
            k: (T, kv_heads, D).
            valid: (T,) bool; rows that are False count nowhere.

        Raises:
            ArgumentError: another layer, shape or dtype than this calibration's; a value that is
                not finite, which would spoil all later means.
        """
        require(
            0 <= layer < len(self.tokens),
            "layer",
            layer,
            f"0 to {len(self.tokens) - 1}",
            "calibrate the model this was made for",
        )
        for name, x, total in (("q", q, self.q), ("k", k, self.k)):
            require(
                x.ndim == 3 and x.shape[1:] == total.shape[1:] and x.shape[0] == q.shape[0],
                f"{name}.shape",
                tuple(x.shape),
                f"({q.shape[0]}, {total.shape[1]}, {total.shape[2]})",
                "calibrate the model this was made for",
            )
        chosen = [as_float32(x) if valid is None else as_float32(x)[valid] for x in (q, k)]
        require(
            all(bool(x.isfinite().all()) for x in chosen),
            "q",
            "NaN or infinity",
            "finite queries and keys",
            "calibrate on a pass without overflow",
        )
        for x, total in zip(chosen, (self.q, self.k), strict=True):
            total[layer] += x.to(torch.float64).sum(dim=0).cpu()
        self.tokens[layer] += chosen[0].shape[0]

    def means(self, layer: int, device: torch.device | str = "cpu") -> Means:
        """Static means of ``layer``.

        Raises:
            ArgumentError: no token of the layer was observed.
        """
        count = int(self.tokens[layer])
        require(count > 0, "layer", f"{layer}, no tokens", "a calibrated layer", "observe() first")
        q, k = ((x[layer] / count).to(torch.float32)[None].to(device) for x in (self.q, self.k))
        return Means("static", q, k)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of the sums and counts."""
        return {name: getattr(self, name).clone() for name in ("q", "k", "tokens")}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from ``state``.

        Raises:
            ArgumentError: a tensor is missing, unknown, or of another shape or dtype.
        """
        own = self.state_dict()
        require(set(state) == set(own), "state", sorted(state), f"{sorted(own)}", "state_dict()")
        for name, tensor in own.items():
            got = state[name]
            require(
                got.shape == tensor.shape and got.dtype == tensor.dtype,
                f"state[{name!r}]",
                f"{tuple(got.shape)} {got.dtype}",
                f"{tuple(tensor.shape)} {tensor.dtype}",
                "calibrate the model this was made for",
            )
        for name in own:
            getattr(self, name).copy_(state[name])


def _mean_of_rows(
    mean: torch.Tensor, group: torch.Tensor | None, rows: int, argument: str
) -> torch.Tensor:
    """``mean`` (groups, heads, D) as one row a token, or one row for all."""
    if group is None:
        require(
            len(mean) == 1,
            argument,
            f"{len(mean)} groups and no group per row",
            "one group, or the group of each row",
            "pass group=, the request of every row",
        )
        return mean
    require(group.shape == (rows,), "group", tuple(group.shape), f"({rows},)", "one per row")
    return mean[group.to(torch.int64)]


def centre(
    x: torch.Tensor,
    mean: torch.Tensor,
    group: torch.Tensor | None = None,
    bf16: bool = False,
) -> torch.Tensor:
    """``x - mean`` in FP32.

    Args:
        x: (T, heads, D) float32, bfloat16 or float16; left as it is.
        mean: (groups, heads, D) float32, ``Means.q`` or ``Means.k``.
        group: (T,) integers, the group of each row; may be left out where there is one.
        bf16: round the difference to BF16 (what a writer does that stores it so).

    Returns:
        (T, heads, D) float32.

    Raises:
        ArgumentError: shapes or dtypes that do not belong together.
    """
    require(
        x.ndim == 3 and mean.ndim == 3 and x.shape[1:] == mean.shape[1:],
        "mean.shape",
        tuple(mean.shape),
        f"(groups, heads, D) for x {tuple(x.shape)}",
        "pass the means of this layer: q for queries, k for keys",
    )
    found = as_float32(x) - _mean_of_rows(mean, group, x.shape[0], "mean")
    return found.to(torch.bfloat16).to(torch.float32) if bf16 else found


def delta(
    q_mean: torch.Tensor, centred: torch.Tensor, group: torch.Tensor | None = None
) -> torch.Tensor:
    """ΔS: q̄ · k_c for every key and query head (MpFA equation 9).

    Args:
        q_mean: (groups, q_heads, D) float32.
        centred: (T, kv_heads, D) float32, centred keys before quantisation.
        group: (T,) integers, the group of each key.

    Returns:
        (T, q_heads) float32, summed in float64 and rounded once; unscaled, like q·k. A NaN or
        infinite key makes its own row so.

    Raises:
        ArgumentError: shapes that do not belong together.
    """
    _check_pair(q_mean, centred, "q_mean")
    mean = _mean_of_rows(q_mean, group, centred.shape[0], "q_mean").to(torch.float64)
    wide = centred.to(torch.float64).repeat_interleave(q_mean.shape[1] // centred.shape[1], dim=1)
    return (mean * wide).sum(dim=-1).to(torch.float32)


def split_terms(delta_s: torch.Tensor, terms: int = 1) -> torch.Tensor:
    """(..., terms) bfloat16 of float32 ``delta_s``: each term is the rounded rest of those before.

    One term has a relative error of at most 2^-8, two of 2^-16; three are exact where no term is
    subnormal.

    Raises:
        ArgumentError: a number of terms other than 1, 2 and 3, or another dtype.
    """
    require(terms in TERMS, "terms", terms, f"one of {TERMS}", "store 1 (paper) or 2 (hi + lo)")
    require(delta_s.dtype == torch.float32, "delta_s", delta_s.dtype, "float32", "use delta()")
    rest, found = delta_s, []
    for _ in range(terms):
        term = rest.to(torch.bfloat16)
        found.append(term)
        # Past an infinity or NaN there is no rest: inf - inf would turn it into NaN.
        rest = torch.where(term.isfinite(), rest - term.to(torch.float32), 0.0)
    return torch.stack(found, dim=-1)


def join_terms(terms: torch.Tensor) -> torch.Tensor:
    """float32 sum of (..., terms) bfloat16, added left to right."""
    total = terms[..., 0].to(torch.float32)
    for index in range(1, terms.shape[-1]):
        total = total + terms[..., index].to(torch.float32)
    return total


def scores(
    q: torch.Tensor,
    k: torch.Tensor,
    delta_s: torch.Tensor | None = None,
    placement: str = "acc_init",
    terms: int = 2,
) -> torch.Tensor:
    """Unscaled scores q·k + ΔS as a kernel with that placement computes them, FP32 throughout.

    Args:
        q: (M, q_heads, D) float32, centred and dequantised queries.
        k: (N, kv_heads, D) float32, centred and dequantised keys.
        delta_s: (N, q_heads) float32, or None without smoothing.
        placement: ``acc_init`` starts the accumulator at ΔS; ``mma`` starts it with a product of
            depth 16 of ones and the BF16 terms of ΔS (MpFA equation 11); ``elementwise`` adds ΔS to
            the finished product.
        terms: BF16 terms of the ``mma`` placement.

    Returns:
        (q_heads, M, N) float32.

    Raises:
        ArgumentError: shapes or an unknown placement.
    """
    require(placement in PLACEMENTS, "placement", placement, f"one of {PLACEMENTS}", "name one")
    _check_pair(q, k, "q")
    left = q.transpose(0, 1)
    right = k.transpose(0, 1).repeat_interleave(q.shape[1] // k.shape[1], dim=0).transpose(1, 2)
    if delta_s is None:
        return left @ right
    require(
        delta_s.shape == (k.shape[0], q.shape[1]),
        "delta_s.shape",
        tuple(delta_s.shape),
        f"({k.shape[0]}, {q.shape[1]}): one per key and query head",
        "use delta()",
    )
    row = delta_s.transpose(0, 1)[:, None, :]
    if placement == "elementwise":
        return left @ right + row
    if placement == "acc_init":
        return torch.baddbmm(row.expand(-1, q.shape[0], -1), left, right)
    ones = torch.zeros(q.shape[1], q.shape[0], RANK_ONE_K)
    ones[..., :terms] = 1
    filled = torch.zeros(q.shape[1], RANK_ONE_K, k.shape[0])
    filled[:, :terms] = split_terms(delta_s, terms).to(torch.float32).permute(1, 2, 0)
    return torch.baddbmm(ones.to(q.device) @ filled.to(q.device), left, right)


def lse_shift(q: torch.Tensor, k_mean: torch.Tensor, scale: float) -> torch.Tensor:
    """What smoothing of keys takes from a row's log-sum-exp: true LSE = LSE found + this.

    Args:
        q: (M, q_heads, D), queries before centring.
        k_mean: (kv_heads, D) or (1, kv_heads, D) float32, the mean of the keys of these rows.
        scale: of the softmax, D^-1/2 as a rule.

    Returns:
        (M, q_heads) float32, natural logarithm.

    Raises:
        ArgumentError: shapes that do not belong together.
    """
    mean = k_mean if k_mean.ndim == 3 else k_mean[None]
    _check_pair(q, mean, "k_mean")
    wide = mean.to(torch.float64).repeat_interleave(q.shape[1] // mean.shape[1], dim=1)
    return ((as_float32(q).to(torch.float64) * wide).sum(dim=-1) * scale).to(torch.float32)
