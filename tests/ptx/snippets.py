"""A few instructions as a whole kernel."""

from __future__ import annotations

from typing import Any

import torch

from tests.ptx import Kernel

__all__ = ["INIT", "LANES", "WAIT", "run", "snippet", "words"]

LANES = torch.arange(32, dtype=torch.int32)

HEAD = """
.extern .shared .align 1024 .b8 smem[];
.visible .entry f(
{params}
)
.reqntid {threads}, 1, 1
.minnctapersm {ctas}
{{
    .reg .pred %p<20>;
    .reg .b16 %rs<40>;
    .reg .b32 %r<300>;
    .reg .b64 %rd<40>;
    mov.u32 %r1, %tid.x;
    mov.u32 %r9, smem;
    mul.wide.u32 %rd3, %r1, {width};
{loads}
    add.s64 %rd4, %rd10, %rd3;
"""
TAIL = """
    {store} [%rd4], {value};
DONE:
    ret;
}}
"""
WAIT = "{{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [{0}], {1}, 10000000; @P bra.uni D; bra.uni W; D: }}"
"""Wait for an mbarrier: its address, and the parity of the phase."""

INIT = """
    setp.eq.u32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared.b64 [%r9+{0}], {1};
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""
"""Initialise an mbarrier in shared memory: its offset, and the arrivals it awaits. %p1 is the first thread's."""

STORES = {
    4: ("st.global.b32", "%r2"),
    8: ("st.global.b64", "%rd2"),
    16: ("st.global.v4.b32", "{%r2, %r3, %r4, %r5}"),
}


def snippet(
    body: str,
    threads: int = 32,
    width: int = 4,
    tensors: int = 1,
    maps: int = 0,
    ctas: int = 1,
) -> Kernel:
    """A kernel of ``body``, which finds its thread's number in %r1, shared memory from %r9 on, the tensors' addresses
    in %rd10, %rd11 …, and tensor maps' in %rd20 …; what it leaves in %r2 (%rd2, or %r2 to %r5, by ``width``) is stored
    to the thread's place in the first tensor. ``ctas``: of an SM.
    """
    params = [f"    .param .align 64 .b8 m{i}[128]" for i in range(maps)]
    params += [f"    .param .u64 f_param_{i}" for i in range(tensors)]
    loads = [
        f"    mov.b64 %rd{20 + i}, m{i};\n    cvta.param.u64 %rd{20 + i}, %rd{20 + i};"
        for i in range(maps)
    ]
    loads += [f"    ld.param.b64 %rd{10 + i}, [f_param_{i}];" for i in range(tensors)]
    store, value = STORES[width]
    head = HEAD.format(
        params=",\n".join(params),
        threads=threads,
        ctas=ctas,
        width=width,
        loads="\n".join(loads),
    )
    return Kernel(head + body + TAIL.format(store=store, value=value))


def run(body: str, out: torch.Tensor, *more: torch.Tensor, **options: Any) -> torch.Tensor:
    """Run ``body`` and return ``out``."""
    made = {k: options.pop(k) for k in ("threads",) if k in options}
    kernel = snippet(
        body,
        width=options.pop("width", 4),
        tensors=1 + len(more),
        maps=len(options.get("maps", ())),
        **made,
    )
    kernel.launch([x.data_ptr() for x in (out, *more)], out, *more, **options)
    return out


def words(count: int = 32) -> torch.Tensor:
    """An output that was not written."""
    return torch.full((count,), -7, dtype=torch.int32)
