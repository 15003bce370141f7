"""Token ids as a caller gives them, checked before anything runs, and in which pieces a prefill takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any

import torch

from epicute.errors import require

__all__ = ["batches", "is_id", "prompts_of", "step_of"]


def batches(counts: list[int], limit: int) -> Iterator[list[tuple[int, int, int]]]:
    """(request, first token, behind its last) in order; all batches but the last have ``limit`` tokens."""
    batch: list[tuple[int, int, int]] = []
    room = limit
    for request, count in enumerate(counts):
        done = 0
        while done < count:
            taken = min(room, count - done)
            batch.append((request, done, done + taken))
            done, room = done + taken, room - taken
            if room == 0:
                yield batch
                batch, room = [], limit
    if batch:
        yield batch


def prompts_of(ids: Any, vocabulary: int) -> list[list[int]]:
    """Checked token ids of each request."""
    if isinstance(ids, torch.Tensor):
        require(
            _whole(ids) and ids.ndim in (1, 2),
            "ids",
            f"{tuple(ids.shape)} {ids.dtype}",
            "integers, (tokens,) or (requests, tokens)",
            "pass what the tokenizer gives",
        )
        found = ids.tolist() if ids.ndim == 2 else [ids.tolist()]
    else:
        listed = list(ids)
        nested = bool(listed) and isinstance(listed[0], torch.Tensor | Sequence)
        found = [_prompt(prompt) for prompt in listed] if nested else [listed]
    for place, prompt in enumerate(found):
        require(
            len(prompt) > 0,
            f"ids[{place}]",
            "no token",
            "at least one",
            "leave out requests that have nothing new",
        )
        wrong = [i for i in prompt if not (is_id(i) and 0 <= i < vocabulary)]
        require(
            not wrong,
            f"ids[{place}]",
            wrong[:3],
            f"token ids from 0 to {vocabulary - 1}",
            "use the tokenizer of this checkpoint",
        )
    return found


def step_of(tokens: Any, held: Sequence[int], vocabulary: int) -> list[int]:
    """Checked token ids of a step, -1 for requests that take no part."""
    ids = _prompt(tokens, "tokens")
    require(
        len(ids) == len(held),
        "tokens",
        f"{len(ids)} tokens",
        f"{len(held)}, one for each request of the cache",
        "give -1 for requests that take no part",
    )
    wrong = [i for i in ids if not (is_id(i) and -1 <= i < vocabulary)]
    require(
        not wrong,
        "tokens",
        wrong[:3],
        f"token ids from 0 to {vocabulary - 1}, or -1",
        "use the tokenizer of this checkpoint",
    )
    empty = [row for row, (i, count) in enumerate(zip(ids, held, strict=True)) if i >= 0 == count]
    require(
        not empty,
        "tokens",
        f"tokens for requests {empty}, which hold none",
        "-1 for them",
        "prefill a request before its tokens are decoded",
    )
    return [int(i) for i in ids]


def _prompt(prompt: Any, argument: str = "ids") -> list[int]:
    if not isinstance(prompt, torch.Tensor):
        return list(prompt)
    require(
        prompt.ndim == 1 and _whole(prompt),
        argument,
        f"{tuple(prompt.shape)} {prompt.dtype}",
        "integers, (tokens,) for each request" if argument == "ids" else "integers, (requests,)",
        "pass what the tokenizer gives",
    )
    return list(prompt.tolist())


def _whole(ids: torch.Tensor) -> bool:
    """Whether a tensor's elements are integers; a mask's are not."""
    return not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)


def is_id(token: Any) -> bool:
    """Whether it is an integer, of Python or of NumPy, and no truth value."""
    return isinstance(token, Integral) and not isinstance(token, bool)
