"""Runs compiled kernels on the CPU: whole CTAs and clusters, from their PTX, with barriers, copies and matrix products.

How to run a kernel of ``epicute.jit`` (anything with ``trace()`` and ``key``)::

    from tests.ptx import Emulated, Kernel, TensorMap, ptx_of

    kernel = Kernel(ptx_of(thing))          # or Kernel(text) of any PTX with one .entry
    kernel.launch(arguments, q, k, out,     # the Int64 arguments in order; every tensor it may touch (CPU tensors)
                  grid=4, cluster=2,        # CTAs along x (or a tuple), CTAs of a cluster
                  maps=[TensorMap.of(q, (1, 64, 64), swizzle=128)],  # of each tensor map parameter, in order
                  seed=3,                   # warps and copies take turns at random; None: round robin
                  late=0.25,                # share of copies that come when nothing else can go on
                  races=True,               # report unordered accesses of shared memory, and missing proxy fences
                  early=(),                 # what may be touched before griddepcontrol.wait; without it all may
                  resident=1)               # clusters at a time; all of them where CTAs wait for each other

    Emulated(thing).launch(arguments, *tensors)   # a kernel whose last argument is its number of blocks

Whole plans, with their host code and the compiled host functions, run by ``device.py``; ``pytest -p tests.ptx.plugin -m
gpu`` runs GPU tests so, where they are small.

What is checked on the way, each an AssertionError that names the instruction: memory that was not given and unaligned
accesses, warp-wide instructions without their warp, barriers with wrong counts, arrivals and bytes that an mbarrier
does not await, mbarriers that are used with no fence behind their initialisation, registers that warps trade, unknown
instructions (``unknown(kernel.program)`` lists all), shared memory of a CTA that has ended, a kernel none of whose
warps waits for the kernel in front, and Deadlock with the place of every warp. Shared memory and registers start as
bytes 0xff: NaN in every format. Copies come late: when their turn comes, at the latest when somebody waits. Set
``shared=`` to the bytes a launch asks for (plus 1024 of the system's) to have its end checked.

What is not: the order of global memory's accesses, caches, ``wgmma.fence``, and rounding inside matrix products
(float64 here). Approximate functions (ex2, lg2, rcp, tanh, sin, cos) are float64 rounded to float32. A ``mul.f32`` and
the ``add.f32`` behind it are two roundings here; ptxas may make one of them where neither says ``.rn``.

``TensorMap(address, size, shape, strides, box, swizzle)`` takes dimensions with the adjacent one first, as the hardware
does; ``TensorMap.of(tensor, box, swizzle)`` takes a tensor's own order. The DSL leaves out dimensions whose extent it
knows to be 1. A run costs about 1 µs an instruction of a warp: a CTA of 12 warps on a small tile takes 0.1 to 1 s.
"""

from __future__ import annotations

from tests.ptx.launch import Emulated, Kernel, ptx_of
from tests.ptx.listing import unknown
from tests.ptx.machine import Deadlock
from tests.ptx.maps import TensorMap
from tests.ptx.memory import Memory
from tests.ptx.program import Program

__all__ = ["Deadlock", "Emulated", "Kernel", "Memory", "Program", "TensorMap", "ptx_of", "unknown"]
