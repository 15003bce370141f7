"""Attention in float64 PyTorch: the oracle of every attention kernel, and what a machine without a
GPU runs.

Written from the formula softmax(Q Kᵀ · scale) V (FuTransformer 2.1). For query i of Sq and key j of
Sk, both of one request, with d = i + Sk - Sq the key that stands at the query's own position:

    seen(i, j)  = (j <= d  if causal)  and  (j > d - window  if there is a window)
    s(i, j)     = scale · q_i · k_j,  then  cap · tanh(s / cap)  if there is a softcap
    lse(i)      = log( sum over seen j of exp s(i, j)  +  exp(sink)  if there are sinks )
    out(i)      = sum over seen j of exp(s(i, j) - lse(i)) · v_j

The mask is aligned bottom-right, so that chunks of a prompt see what lies in the cache before them.
A key that a query does not see has no share in its result, whatever it holds, NaN included. A query
that sees no key gets out 0 and lse -inf, with sinks too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from epicute.errors import require

__all__ = ["Options", "Places", "attend", "attend_batch"]


class Rules(Protocol):
    """What ``attend_batch`` reads of a specification: fields of ``AttentionSpec`` by their names."""

    @property
    def causal(self) -> bool: ...
    @property
    def window(self) -> int | None: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def scale(self) -> float | None: ...
    @property
    def page(self) -> int | None: ...
    @property
    def packed(self) -> bool: ...


@dataclass(frozen=True)
class Options:
    """``Rules`` for callers that have no ``AttentionSpec``; fields mean what they mean there."""

    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    page: int | None = None
    packed: bool = True


class Places(TypedDict, total=False):
    """Where requests stand; the operands of that name of ``AttentionPlan.run``."""

    q_starts: Tensor | None
    kv_starts: Tensor | None
    q_lengths: Tensor | None
    kv_lengths: Tensor | None
    page_table: Tensor | None


def _wide(x: Any) -> Tensor:
    """``x`` as a float64 tensor where it is, value for value."""
    return torch.as_tensor(x).detach().to(torch.float64)


def _check(q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None) -> None:
    require(
        q.ndim == k.ndim == v.ndim == 3 and q.shape[2] == k.shape[2] and k.shape == v.shape,
        "q, k, v",
        f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}",
        "(Sq, heads, head_dim) and twice (Sk, kv_heads, head_dim)",
        "pass one request with its heads in the second axis",
    )
    require(
        k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0,
        "kv_heads",
        k.shape[1],
        f"a divisor of heads={q.shape[1]}",
        "pass keys and values of the same model as the queries",
    )
    require(
        window is None or (isinstance(window, int) and window >= 1),
        "window",
        window,
        "None for no window, or a number of keys from 1",
        "pass None where the model has no window",
    )
    require(
        softcap is None or (math.isfinite(softcap) and softcap > 0),
        "softcap",
        softcap,
        "None for no cap, or a positive number",
        "pass None where the model has no cap",
    )


def _seen(
    queries: int, keys: int, causal: bool, window: int | None, device: torch.device
) -> Tensor:
    """(queries, keys) bool: which keys each query sees."""
    own = torch.arange(queries, device=device)[:, None] + (keys - queries)
    key = torch.arange(keys, device=device)[None]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        seen &= key <= own
    if window is not None:
        seen &= key > own - window
    return seen


def _weighted(weights: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """(heads, Sq, D) = weights (heads, Sq, Sk) · v (heads, Sk, D), where unseen keys have no share.

    A plain product would turn the zero weight of an unseen NaN or infinity into NaN.
    """
    finite = torch.where(v.isfinite(), v, 0.0)
    out = weights @ finite
    for j in (~v.isfinite()).any(dim=2).any(dim=0).nonzero()[:, 0].tolist():
        rest = weights[:, :, j, None] * (v - finite)[:, j, None]
        out += torch.where(seen[None, :, j, None], rest, 0.0)
    return out


def attend(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one request.

    Args:
        q: (Sq, heads, head_dim) values; query i stands at position i + Sk - Sq.
        k: (Sk, kv_heads, head_dim); head h reads KV head h // (heads / kv_heads). ``v`` likewise.
        causal: whether a query sees only keys up to its own position.
        window: keys a query sees at most, the one at its own position included; None for all.
        softcap: cap · tanh(s / cap) after scaling; None for none. Sinks are not capped.
        sinks: (heads,) one logit each beside the keys, without a value; None for none.
        scale: factor on q · k; None for head_dim ** -0.5.

    Returns:
        out (Sq, heads, head_dim) and lse (heads, Sq), natural logarithm, sinks counted in; float64.

    Raises:
        ArgumentError: shapes that do not belong together, or a window or cap that is none.
    """
    q, k, v = _wide(q), _wide(k), _wide(v)
    _check(q, k, v, window, softcap)
    queries, heads, dim = q.shape
    group = heads // k.shape[1]
    k = k.transpose(0, 1).repeat_interleave(group, dim=0)
    v = v.transpose(0, 1).repeat_interleave(group, dim=0)
    seen = _seen(queries, k.shape[1], causal, window, q.device)
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * (dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    logits = scores
    if sinks is not None:
        sinks = _wide(sinks)
        require(
            sinks.shape == (heads,),
            "sinks.shape",
            tuple(sinks.shape),
            f"({heads},), one per query head",
            "pass one logit per head",
        )
        logits = torch.cat([scores, sinks[:, None, None].expand(heads, queries, 1)], dim=2)
    nothing = ~seen.any(dim=1)
    lse = logits.logsumexp(dim=2) if logits.shape[2] else scores.new_zeros(heads, queries)
    lse = lse.masked_fill(nothing, -math.inf)
    weights = torch.exp(scores - lse.masked_fill(nothing, 0.0)[:, :, None])
    out = _weighted(weights, v, seen)
    return out.transpose(0, 1).contiguous(), lse


@dataclass(frozen=True)
class _Request:
    """Rows of one request: ``index`` into q and out, into lse, and its keys and values."""

    rows: Any
    lse_rows: Any
    k: Tensor
    v: Tensor


def _need(argument: str, value: Tensor | None, shape: tuple[int, ...] | None, why: str) -> Tensor:
    require(
        isinstance(value, torch.Tensor),
        argument,
        value,
        f"an int32 tensor, {why}",
        f"pass {argument}",
    )
    assert value is not None
    require(
        value.dtype == torch.int32 and (shape is None or value.shape == shape),
        argument,
        f"{tuple(value.shape)} {value.dtype}",
        f"{'' if shape is None else shape} int32, {why}",
        f"pass {argument} as the layout wants it",
    )
    return value.cpu()


def _starts(argument: str, value: Tensor | None, rows: int) -> list[int]:
    """Checked prefix sums of a packed layout; rows beyond the last belong to nobody."""
    found = _need(argument, value, None, "(B + 1,) prefix sums, for a packed layout").tolist()
    rising = all(a <= b for a, b in itertools.pairwise(found))
    require(
        len(found) >= 1 and found[0] == 0 and rising and found[-1] <= rows,
        argument,
        found,
        f"prefix sums that start at 0, never fall and end by {rows}",
        "pass 0 and the running sums of the lengths",
    )
    return found


def _lengths(argument: str, value: Tensor | None, batch: int, most: int) -> list[int]:
    """Checked lengths of a padded layout; None means all rows."""
    if value is None:
        return [most] * batch
    found = _need(argument, value, (batch,), "one length per request").tolist()
    require(
        all(0 <= length <= most for length in found),
        argument,
        found,
        f"lengths from 0 to {most}",
        "pass lengths that the tensors have room for",
    )
    return found


def _paged(pool: Tensor, table: list[int], length: int, page: int) -> Tensor:
    """(length, kv_heads, head_dim) of one request, read through its row of the page table."""
    wanted = table[: -(-length // page)]
    require(
        len(wanted) * page >= length and all(0 <= p < pool.shape[0] for p in wanted),
        "page_table",
        f"pages {wanted} for {length} keys",
        f"a page from 0 to {pool.shape[0] - 1} for each {page} keys",
        "extend the row of the page table",
    )
    return pool[wanted].flatten(0, 1)[:length]


def _keys(rules: Rules, pool: Tensor, places: Places, batch: int) -> list[Tensor]:
    """Keys (or values) of every request, rows beyond its length left out."""
    if rules.page is not None:
        require(
            pool.ndim == 4 and pool.shape[1] == rules.page,
            "k.shape, v.shape",
            tuple(pool.shape),
            f"(pages, {rules.page}, kv_heads, head_dim)",
            "pass the pool of the page size that was planned",
        )
        table = _need("page_table", places.get("page_table"), None, "(B, max_pages)").tolist()
        keys = _need("kv_lengths", places.get("kv_lengths"), (batch,), "one per request").tolist()
        return [_paged(pool, table[b], n, rules.page) for b, n in enumerate(keys)]
    if rules.packed:
        starts = _starts("kv_starts", places.get("kv_starts"), pool.shape[0])
        require(
            len(starts) == batch + 1,
            "kv_starts",
            f"{len(starts) - 1} requests",
            f"{batch}, as in q_starts",
            "pass keys of the same requests as the queries",
        )
        return [pool[a:b] for a, b in itertools.pairwise(starts)]
    lengths = _lengths("kv_lengths", places.get("kv_lengths"), batch, pool.shape[1])
    return [pool[b, :length] for b, length in enumerate(lengths)]


def _requests(rules: Rules, q: Tensor, k: Tensor, v: Tensor, places: Places) -> Iterator[_Request]:
    unknown = set(places) - set(Places.__annotations__)
    require(
        not unknown, "operands", sorted(unknown), f"{sorted(Places.__annotations__)}", "drop them"
    )
    if rules.packed:
        starts = _starts("q_starts", places.get("q_starts"), q.shape[0])
        spans = [slice(a, b) for a, b in itertools.pairwise(starts)]
        rows: list[Any] = [(span, (slice(None), span)) for span in spans]
    else:
        lengths = _lengths("q_lengths", places.get("q_lengths"), q.shape[0], q.shape[1])
        rows = [((b, slice(n)), (b, slice(None), slice(n))) for b, n in enumerate(lengths)]
    keys, values = (_keys(rules, pool, places, len(rows)) for pool in (k, v))
    for (at, lse_at), one_k, one_v in zip(rows, keys, values, strict=True):
        yield _Request(at, lse_at, one_k, one_v)


def _require_scale(pool: Tensor, scale: Tensor | None, argument: str) -> None:
    require(
        (scale is not None) == (pool.dtype == torch.float8_e4m3fn),
        argument,
        None if scale is None else f"a scale for {pool.dtype}",
        "a scale exactly where K and V are float8_e4m3fn",
        "pass (kv_heads,) float32 for an FP8 cache, None otherwise",
    )
    require(
        scale is None or scale.shape == (pool.shape[-2],),
        argument,
        None if scale is None else tuple(scale.shape),
        f"({pool.shape[-2]},), one per KV head",
        "pass the scales the cache was written with",
    )


def _values(part: Tensor, scale: Tensor | None) -> Tensor:
    """Float64 values of (keys, kv_heads, head_dim): codes times the scale of their KV head."""
    return _wide(part) if scale is None else _wide(part) * _wide(scale)[:, None]


def attend_batch(
    rules: Rules,
    q: Any,
    k: Any,
    v: Any,
    *,
    sinks: Any = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **places: Unpack[Places],
) -> tuple[Tensor, Tensor]:
    """Attention of a batch in any layout of ``AttentionPlan.run``, one request after the other.

    Rows beyond a length, rows of no request and cache slots that no request owns are not read: they
    may hold NaN.

    Args:
        rules: an ``AttentionSpec``, or ``Options``. Without ``page``, K and V are laid out as the
            queries are: packed or padded.
        q: packed (T, heads, head_dim) or padded (B, S, heads, head_dim).
        k: packed (Tk, kv_heads, head_dim), padded (B, Sk, kv_heads, head_dim) or paged (pages,
            page, kv_heads, head_dim) with any strides; ``v`` likewise.
        sinks: (heads,) or None.
        k_scale: (kv_heads,) value = code * scale, for float8_e4m3fn K; ``v_scale`` likewise.
        out: what rows hold that are not written, shaped like q; it is not changed. None: NaN.
        lse: the same for the second result, (heads, T) or (B, heads, S).
        places: ``q_starts``, ``kv_starts`` (B + 1,), ``q_lengths``, ``kv_lengths`` (B,),
            ``page_table`` (B, max_pages), int32 each, as the layout wants them.

    Returns:
        float64 copies of out and lse with the rows of all requests written. What a kernel stores in
        FP8 is ``epilogues.reference.emit_fp8`` of the written rows.

    Raises:
        ArgumentError: an operand of the layout is missing or does not fit it.
    """
    q = _wide(q)
    require(
        q.ndim == (3 if rules.packed else 4),
        "q.shape",
        tuple(q.shape),
        "(T, heads, head_dim)" if rules.packed else "(B, S, heads, head_dim)",
        "pass the layout that was planned",
    )
    k, v = torch.as_tensor(k), torch.as_tensor(v)
    _require_scale(k, k_scale, "k_scale")
    _require_scale(v, v_scale, "v_scale")
    heads_first = (q.shape[1], q.shape[0]) if rules.packed else (q.shape[0], q.shape[2], q.shape[1])
    found = torch.full_like(q, math.nan) if out is None else _wide(out).clone()
    found_lse = q.new_full(heads_first, math.nan) if lse is None else _wide(lse).clone()
    for request in _requests(rules, q, k, v, places):
        found[request.rows], found_lse[request.lse_rows] = attend(
            q[request.rows],
            _values(request.k, k_scale),
            _values(request.v, v_scale),
            causal=rules.causal,
            window=rules.window,
            softcap=rules.softcap,
            sinks=sinks,
            scale=rules.scale,
        )
    return found, found_lse
