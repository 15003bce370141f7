"""``epicute doctor``: what this machine can compile and run, proved, and what it lacks."""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from epicute.cli.probe import Probe, proves
from epicute.cli.text import volume
from epicute.errors import EpicuteError, UnsupportedError
from epicute.jit import DEFAULT_TARGET, Compiled, ObjectCache, Target, compile, forget
from epicute.jit.environment import driver_version, dsl_flavour, version_of

__all__ = ["CHECKS", "Finding", "run"]

DSL = "nvidia-cutlass-dsl"
SUPPORTED = "4.8"
PYTHON = (3, 11)
INSTALL = "pip install 'nvidia-cutlass-dsl>=4.8,<4.9' 'apache-tvm-ffi>=0.1.11,<0.2'"

MARKS = {"good": "ok", "lacking": "--", "wrong": "!!"}


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis.

    Attributes:
        name: what was looked at.
        says: what was found.
        state: ``good``; ``lacking``, without which less works; ``wrong``, which must be mended.
        fix: what to do, where it is not good.
    """

    name: str
    says: str
    state: str = "good"
    fix: str = ""

    def __str__(self) -> str:
        line = f"{MARKS[self.state]}  {self.name:<14} {self.says}"
        return f"{line}\n    {'':<14} fix: {self.fix}" if self.fix else line


def run(args: argparse.Namespace) -> int:
    """Print all findings; 0 if kernels compile here and, where there is a GPU for them, run."""
    for check in CHECKS:
        for finding in check():
            print(finding, flush=True)
    print()
    compiled, finding = _compiles()
    print(finding, flush=True)
    if compiled is None:
        return 1
    finding = _runs(compiled)
    print(finding)
    return 1 if finding.state == "wrong" else 0


def _python() -> Iterator[Finding]:
    says = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < PYTHON:
        yield Finding("Python", says, "wrong", f"use Python {'.'.join(map(str, PYTHON))} or later")
    elif platform.system() != "Linux":
        fix = "kernels need Linux; references and the CPU evaluation work here"
        yield Finding("Python", says, "lacking", fix)
    else:
        yield Finding("Python", says)
    yield Finding("epicute", version_of("epicute").replace("absent", "a checkout, not installed"))


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", str(error), "wrong", "pip install torch")
        return
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    says = f"{torch.__version__}, {build}"
    if driver_version() is not None and not torch.version.cuda:
        fix = "install a CUDA build of torch; this one cannot see the GPU"
        yield Finding("torch", says, "lacking", fix)
    else:
        yield Finding("torch", says)


def _driver() -> Iterator[Finding]:
    found = driver_version()
    if found is None:
        fix = "none needed to compile; to run kernels, install the driver of an NVIDIA GPU"
        yield Finding("driver", "none", "lacking", fix)
    else:
        yield Finding("driver", f"up to CUDA {found[0]}.{found[1]}")


def _gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        fix = "none needed to compile; kernels run on a Hopper GPU (H100, H200, H20)"
        yield Finding("GPU", "none that torch can use", "lacking", fix)
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        says = f"cuda:{index} {facts.name}, capability {facts.major}.{facts.minor}, "
        says += volume(facts.total_memory)
        try:
            yield Finding("GPU", f"{says}: {Target.detect(index)}")
        except UnsupportedError:
            fix = "use a Hopper GPU; no kernel here is compiled for this one"
            yield Finding("GPU", says, "lacking", fix)


def _dsl() -> Iterator[Finding]:
    version, flavour = version_of(DSL), dsl_flavour()
    if version == "absent":
        yield Finding("CuTe DSL", "not installed", "wrong", INSTALL)
    elif flavour == "unsupported":
        fix = f"the driver is older than every installed flavour: {INSTALL} brings cu12"
        yield Finding("CuTe DSL", f"{version}, no flavour for this driver", "wrong", fix)
    elif not f"{version}.".startswith(f"{SUPPORTED}."):
        yield Finding("CuTe DSL", f"{version}, expected {SUPPORTED}", "wrong", INSTALL)
    else:
        yield Finding("CuTe DSL", f"{version}, flavour {flavour}")
    tvm = version_of("apache-tvm-ffi")
    if tvm == "absent":
        yield Finding("tvm-ffi", "not installed", "wrong", INSTALL)
    else:
        yield Finding("tvm-ffi", tvm)


def _bindings() -> Iterator[Finding]:
    version, driver = version_of("cuda-bindings"), driver_version()
    if version == "absent":
        yield Finding("CUDA bindings", "not installed", "wrong", "pip install cuda-python")
    elif driver is not None and int(version.partition(".")[0]) > driver[0]:
        fix = f"pip install 'cuda-bindings<{driver[0] + 1}'"
        says = f"{version}, but the driver knows CUDA {driver[0]}.{driver[1]}"
        yield Finding("CUDA bindings", says, "wrong", fix)
    else:
        yield Finding("CUDA bindings", version)


def _cache() -> Iterator[Finding]:
    cache = ObjectCache()
    if (reason := cache.unusable()) is not None:
        says, _, fix = reason.partition(". Fix: ")
        yield Finding("cache", f"memory only: {says}", "lacking", fix)
        return
    entries = cache.entries()
    if (reason := cache.unwritable()) is not None:
        says, _, fix = reason.partition(". Fix: ")
        kept = f", {len(entries)} kernels are read" if entries else ""
        yield Finding("cache", f"memory only: {says}{kept}", "lacking", fix)
        return
    size = volume(sum(entry.size for entry in entries))
    yield Finding("cache", f"{cache.folder}, {len(entries)} kernels, {size}")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _torch,
    _driver,
    _gpus,
    _dsl,
    _bindings,
    _cache,
)


def _target() -> Target:
    try:
        return Target.detect()
    except UnsupportedError:
        return DEFAULT_TARGET


def _compiles() -> tuple[Compiled | None, Finding]:
    """Compile the probe anew: neither memory nor the user's cache may answer."""
    target = _target()
    forget()
    try:
        with tempfile.TemporaryDirectory(prefix="epicute-doctor-") as folder:
            compiled = compile(Probe(target), cache=ObjectCache(folder))
    except EpicuteError as error:
        says, _, fix = str(error).partition(" Fix: ")
        return None, Finding("compiling", says, "wrong", fix or "mend what is marked !! above")
    report = compiled.report
    says = f"works: a kernel for {target} in {report.seconds:.1f} s, {report.registers} registers"
    return compiled, Finding("compiling", says)


def _runs(compiled: Compiled) -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("running", "not tried: no GPU", "lacking")
    try:
        compiled.key.target.require_device()
    except UnsupportedError as error:
        return Finding("running", f"not tried: {error}", "lacking")
    try:
        right: Any = proves(compiled)
    except Exception as error:
        return Finding(
            "running", f"{type(error).__name__}: {error}", "wrong", "see the driver above"
        )
    if not right:
        return Finding("running", "the kernel gives wrong values", "wrong", "update the driver")
    return Finding("running", "works: the kernel gives the right values")
