"""Several processes and one cache: racing, killed, one after the other, precompiling."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from epicute.errors import ArgumentError, CacheError, CompileError
from epicute.jit import Kernel, ObjectCache, Report, compile, precompile
from tests.jit.processes import finish, start
from tests.jit.tiny import Tiny

pytestmark = pytest.mark.compile

Forget = Callable[[], None]

WORK = """
import json, os, sys, time
from epicute.jit import ObjectCache, compile
from tests.jit.tiny import Tiny
import cutlass.cute

print("ready", flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.001)
found = {}
for scale in json.loads(sys.argv[3]):
    found[scale] = compile(Tiny(scale), cache=ObjectCache(sys.argv[1])).origin
print(json.dumps(found))
"""


def work(cache: ObjectCache, folder: Path, scales: list[float], gate: Path | None = None) -> Any:
    """A process that compiles kernels of these scales once ``gate`` exists."""
    opened = str(folder if gate is None else gate)
    return start(WORK, str(cache.folder), opened, json.dumps(scales), folder=folder)


def origins(process: Any) -> dict[str, str]:
    found: dict[str, str] = json.loads(finish(process).splitlines()[-1])
    return found


def test_jc_05_processes_that_race_an_empty_cache_compile_each_kernel_once(
    cache: ObjectCache, tmp_path: Path
) -> None:
    scales = [1.0, 2.0]
    gate = tmp_path / "gate"
    racing = [work(cache, tmp_path, scales, gate) for _ in range(4)]
    assert [process.stdout.readline() for process in racing] == ["ready\n"] * 4
    gate.touch()
    found = [origins(process) for process in racing]
    for scale in map(str, scales):
        assert sorted(f[scale] for f in found) == ["compiled", "disk", "disk", "disk"], scale
    assert len(cache.entries()) == len(scales)
    assert list(cache.folder.glob("objects/.*")) == []
    assert not (cache.folder / "quarantine").exists()


def test_jc_01_another_process_and_another_order_find_the_same_kernels(
    cache: ObjectCache, tmp_path: Path, forgetful: Forget
) -> None:
    scales = [1.0, 2.0, 3.0]
    assert {compile(Tiny(scale), cache=cache).origin for scale in scales} == {"compiled"}
    before = {e.digest: e.object.read_bytes() for e in cache.entries()}
    assert set(origins(work(cache, tmp_path, [3.0, 1.0, 2.0])).values()) == {"disk"}
    assert {e.digest: e.object.read_bytes() for e in cache.entries()} == before


@dataclass(frozen=True)
class Slow(Tiny):
    """A kernel during whose compilation its process waits to be killed."""

    name: str = "tests.slow"
    flag: str = ""

    def trace(self) -> Any:
        if os.environ.get("SLOW"):
            print("tracing", flush=True)
            time.sleep(600)
        return super().trace()


SLOW = """
import sys
from epicute.jit import ObjectCache, compile
from tests.jit.test_processes import Slow
compile(Slow(), cache=ObjectCache(sys.argv[1]))
"""


def test_jc_05_a_writer_killed_while_compiling_blocks_nobody(
    cache: ObjectCache, tmp_path: Path, forgetful: Forget
) -> None:
    victim = start(SLOW, str(cache.folder), folder=tmp_path, SLOW="1")
    assert victim.stdout is not None
    assert victim.stdout.readline() == "tracing\n"
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    begun = time.monotonic()
    assert compile(Slow(), cache=cache).origin == "compiled"
    assert time.monotonic() - begun < 60
    forgetful()
    assert compile(Slow(), cache=cache).origin == "disk"


def test_precompile_fills_the_cache_in_other_processes(
    cache: ObjectCache, forgetful: Forget
) -> None:
    compile(Tiny(1.0), cache=cache)
    kernels = [Tiny(1.0), Tiny(4.0), Tiny(5.0), Tiny(4.0)]
    told: list[tuple[int, int, float, int | None]] = []

    def progress(done: int, total: int, kernel: Kernel, report: Report) -> None:
        told.append((done, total, kernel.scale, report.registers))  # type: ignore[attr-defined]

    reports = precompile(kernels, workers=2, progress=progress, cache=cache)
    assert reports[1] == reports[3]
    assert [(done, total) for done, total, _, _ in told] == [(1, 3), (2, 3), (3, 3)]
    assert {scale for _, _, scale, _ in told} == {1.0, 4.0, 5.0}
    assert all(registers == reports[0].registers for *_, registers in told)
    for kernel in kernels:
        forgetful()
        assert compile(kernel, cache=cache).origin == "disk"


@dataclass(frozen=True)
class Failing(Tiny):
    """A kernel that does not trace, with an error that cannot be pickled."""

    name: str = "tests.failing"

    def trace(self) -> Any:
        class Local(Exception):
            pass

        raise Local("this very thing")


def test_precompile_names_the_kernel_that_fails_after_compiling_the_others(
    cache: ObjectCache,
) -> None:
    with pytest.raises(CompileError, match=r"tests\.failing(.|\n)*this very thing"):
        precompile([Failing(), Tiny(6.0)], workers=1, cache=cache)
    assert cache.read(Tiny(6.0).key.digest) is not None


def test_precompile_compiles_the_others_when_a_stored_one_must_not_run(cache: ObjectCache) -> None:
    spilling, other = Tiny(9.0), Tiny(10.0)
    precompile([spilling], workers=1, cache=cache)
    sidecar = cache.read(spilling.key.digest).object.with_suffix(".json")
    stored = json.loads(sidecar.read_text())
    stored["report"]["spill_stores"] = 4
    sidecar.write_text(json.dumps(stored))
    with pytest.raises(CompileError, match="4 B of spill stores"):
        precompile([spilling, other], workers=1, cache=cache)
    assert cache.read(other.key.digest) is not None


def test_precompile_refuses_what_cannot_travel_and_a_cache_that_keeps_nothing(
    cache: ObjectCache, tmp_path: Path
) -> None:
    odd = Tiny(8.0)
    vars(odd)["extra"] = lambda: None
    with pytest.raises(ArgumentError, match=r"tests\.tiny.*module level"):
        precompile([odd], cache=cache)
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="precompile"):
        precompile([Tiny(8.0)], cache=ObjectCache(tmp_path / "file"))
    assert precompile([], cache=cache) == []


PROMPT = """
import logging, sys
from epicute.errors import EpicuteError
from epicute.jit import compile
from tests.jit.tiny import Tiny

logging.basicConfig(level="WARNING", stream=sys.stdout)
print(compile(Tiny()).origin)
print(compile(Tiny(1.0)).origin)

class Typed(Tiny):
    def trace(self):
        import cutlass.cute as cute
        @cute.jit
        def typed(x: cute.Tensor):
            pass
        return typed, super().trace()[1][:1]

try:
    compile(Typed(name="tests.typed"))
    print("it works")
except EpicuteError as error:
    print("a normal", type(error).__name__)
"""


def test_jc_07_jc_10_from_python_dash_c_and_without_a_usable_home(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    nowhere = {"EPICUTE_CACHE_DIR": None, "XDG_CACHE_HOME": None, "USER": None}
    out = finish(start(PROMPT, folder=tmp_path, HOME=str(tmp_path / "home"), **nowhere))
    lines = out.splitlines()
    assert lines.count("compiled") == 2
    assert [line for line in lines if "WARNING" in line and "memory only" in line] == lines[:1]
    assert lines[-1] in ("it works", "a normal CompileError")
