"""Memory, disk, compiler: what a kernel goes through, with real compiles of a tiny one."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from epicute.errors import CompileError, CompositionError, KeyingError, UnsupportedError
from epicute.jit import CompileKey, ObjectCache, Target, compile
from tests.jit.tiny import Tiny

pytestmark = pytest.mark.compile

Forget = Callable[[], None]
SM90 = Target("sm_90a")


@pytest.fixture
def shared(compiled_objects: Path) -> ObjectCache:
    """The test run's cache, so that a kernel several tests need is compiled once."""
    return ObjectCache(compiled_objects)


def test_compiled_then_in_memory_then_on_disk(cache: ObjectCache, forgetful: Forget) -> None:
    first = compile(Tiny(), cache=cache)
    assert first.origin == "compiled"
    assert first.key == Tiny().key
    assert 0 < first.report.registers <= 32
    assert first.report.spill_stores == first.report.spill_loads == 0
    assert first.report.shared_memory == 0
    assert first.report.seconds > 0
    assert "nvidia-cutlass-dsl 4.8" in first.report.ptxas
    again = compile(Tiny(), cache=cache)
    assert again.origin == "memory"
    assert again.function is first.function

    forgetful()
    loaded = compile(Tiny(), cache=cache)
    assert loaded.origin == "disk"
    assert loaded.report == first.report
    times = []
    for _ in range(5):
        forgetful()
        begun = time.perf_counter()
        assert compile(Tiny(), cache=cache).origin == "disk"
        times.append(time.perf_counter() - begun)
    assert min(times) < 0.030

    with pytest.raises(ValueError, match="device_type=cuda"):  # it checks its arguments itself
        import torch

        loaded(torch.zeros(1), torch.zeros(1), torch.zeros(1))


def test_a_second_kernel_says_why_it_compiles(
    shared: ObjectCache, forgetful: Forget, caplog: pytest.LogCaptureFixture
) -> None:
    compile(Tiny(name="tests.why"), cache=shared)
    forgetful()
    with caplog.at_level(logging.INFO, "epicute.jit"):
        compile(Tiny(name="tests.why", scale=3.0, shared=4096), cache=shared)
        compile(Tiny(name="tests.why"), cache=shared)
    said = "\n".join(caplog.messages)
    assert "fields.scale: float 3.0, was float 2.0; fields.shared: int 4096, was int 0" in said
    assert "loaded from disk" in said


def test_the_launch_tells_its_shared_memory(shared: ObjectCache) -> None:
    assert compile(Tiny(shared=4096), cache=shared).report.shared_memory == 4096
    too_much = Tiny(shared=SM90.smem_per_block + 1024)
    with pytest.raises(CompileError, match="shared memory"):
        compile(too_much, cache=shared)


def test_jc_03_the_baked_in_constant_makes_another_object(
    cache: ObjectCache, forgetful: Forget
) -> None:
    for scale in (2.0, 3.0, 2.0):
        forgetful()
        compile(Tiny(scale=scale), cache=cache)
    two, three = (cache.read(Tiny(scale=scale).key.digest) for scale in (2.0, 3.0))
    assert two is not None
    assert three is not None
    assert two.object.read_bytes() != three.object.read_bytes()
    assert len(cache.entries()) == 2


@pytest.mark.filterwarnings("ignore:This static loop has")
def test_spills_are_refused_from_compiler_disk_and_memory(
    cache: ObjectCache, forgetful: Forget
) -> None:
    heavy = Tiny(body="heavy")
    for _ in range(2):
        with pytest.raises(CompileError, match="spill stores"):
            compile(heavy, cache=cache)
    forgetful()
    with pytest.raises(CompileError, match="spill stores"):
        compile(heavy, cache=cache)
    found = compile(heavy, cache=cache, strict=False)
    assert found.origin == "memory"
    assert found.report.spill_stores > 0
    assert found.report.registers == 32 == 64 * 1024 // 2 // 1024


def test_ptxas_saying_that_it_ignored_something_is_refused(shared: ObjectCache) -> None:
    with pytest.raises(CompileError, match="C7508: .*'setmaxnreg' ignored"):
        compile(Tiny(body="balance"), cache=shared)
    found = compile(Tiny(body="balance"), cache=shared, strict=False)
    assert [said.partition(":")[0] for said in found.report.warnings] == ["C7508"]


@dataclass(frozen=True)
class Broken:
    """A kernel whose trace raises."""

    error: Any
    name: str = "tests.broken"

    @cached_property
    def key(self) -> CompileKey:
        return CompileKey(self.name, {"error": repr(self.error)}, SM90)

    def trace(self) -> Any:
        raise self.error


def test_errors_name_the_kernel_and_leave_no_trace(cache: ObjectCache, forgetful: Forget) -> None:
    before = sys.stderr
    for error in (RuntimeError("what happened"), SystemExit("what happened")):
        with pytest.raises(CompileError, match=r"tests\.broken.*what happened"):
            compile(Broken(error), cache=cache)
    with pytest.raises(CompositionError, match="^as it is$"):
        compile(Broken(CompositionError("as it is")), cache=cache)
    with pytest.raises(KeyboardInterrupt):
        compile(Broken(KeyboardInterrupt()), cache=cache)
    assert sys.stderr is before
    assert cache.entries() == []
    with cache.lock(Broken(None).key.digest) as held:
        assert held


def test_jc_05_a_planted_truncated_object_is_rebuilt(
    cache: ObjectCache, forgetful: Forget, caplog: pytest.LogCaptureFixture
) -> None:
    compile(Tiny(), cache=cache)
    entry = cache.read(Tiny().key.digest)
    assert entry is not None
    entry.object.write_bytes(entry.object.read_bytes()[:5000])
    forgetful()
    assert compile(Tiny(), cache=cache).origin == "compiled"
    assert "damaged" in caplog.text
    forgetful()
    assert compile(Tiny(), cache=cache).origin == "disk"


def test_an_object_that_does_not_load_is_compiled_anew(
    cache: ObjectCache, forgetful: Forget, caplog: pytest.LogCaptureFixture
) -> None:
    good = compile(Tiny(), cache=cache)
    cache.write(Tiny().key, good.report, b"no object file, with a checksum that is right")
    forgetful()
    assert compile(Tiny(), cache=cache).origin == "compiled"
    assert "does not load" in caplog.text


def test_jc_07_kernels_compile_where_nothing_can_be_written(
    tmp_path: Path, forgetful: Forget, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    nowhere = ObjectCache(tmp_path / "file" / "cache")
    assert compile(Tiny(), cache=nowhere).origin == "compiled"
    assert compile(Tiny(), cache=nowhere).origin == "memory"
    assert [r.levelname for r in caplog.records].count("WARNING") == 1


def test_jc_07_nor_anything_exported(
    cache: ObjectCache,
    forgetful: Forget,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryDirectory", full)
    found = compile(Tiny(), cache=cache)
    assert callable(found.function)
    assert "No space left on device" in caplog.text


def test_jc_09_without_the_dsl_the_fix_is_named(
    cache: ObjectCache, forgetful: Forget, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tvm_ffi", "cutlass"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            if module == "cutlass":
                patch.setitem(sys.modules, "cutlass.cute", None)
            with pytest.raises(UnsupportedError, match="pip install"):
                compile(Tiny(), cache=cache)


def test_jc_11_compiling_changes_nothing_of_the_dsl(shared: ObjectCache) -> None:
    import cutlass
    import cutlass.cute as cute

    names = [(m, n) for m in (cutlass, cute, cute.runtime) for n in vars(m)]
    before = {(m, n): getattr(m, n) for m, n in names}
    stderr, level = sys.stderr, logging.getLogger().level
    compile(Tiny(name="tests.other"), cache=shared)
    assert {k: v for k, v in before.items() if getattr(*k) is not v} == {}
    assert sys.stderr is stderr
    assert logging.getLogger().level == level


class FakeCuda:
    """torch.cuda as it is during a capture."""

    def __init__(self, capturing: bool) -> None:
        self.capturing = capturing

    def is_initialized(self) -> bool:
        return True

    def is_current_stream_capturing(self) -> bool:
        return self.capturing


def test_cg_02_neither_compiled_nor_loaded_during_a_capture(
    shared: ObjectCache, forgetful: Forget, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    compile(Tiny(), cache=shared)
    forgetful()
    monkeypatch.setattr(torch, "cuda", FakeCuda(capturing=True))
    for kernel in (Tiny(), Tiny(scale=7.0)):  # on disk, and nowhere
        with pytest.raises(CompileError, match="compile before capture"):
            compile(kernel, cache=shared)
    monkeypatch.setattr(torch, "cuda", FakeCuda(capturing=False))
    assert compile(Tiny(), cache=shared).origin == "disk"
    monkeypatch.setattr(torch, "cuda", FakeCuda(capturing=True))
    assert compile(Tiny(), cache=shared).origin == "memory"


def test_a_key_of_another_environment_is_refused(cache: ObjectCache, forgetful: Forget) -> None:
    foreign = Tiny()
    environment = {**dict(foreign.key.environment), "nvidia-cutlass-dsl": "9.9.9"}
    vars(foreign)["key"] = replace(foreign.key, environment=tuple(environment.items()))
    with pytest.raises(KeyingError, match=r"9\.9\.9"):
        compile(foreign, cache=cache)


def test_threads_compile_one_after_the_other(cache: ObjectCache, forgetful: Forget) -> None:
    found: list[Any] = []
    kernels = [Tiny(scale=float(i % 2)) for i in range(6)]
    threads = [
        threading.Thread(target=lambda k=k: found.append(compile(k, cache=cache))) for k in kernels
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(f.origin for f in found) == ["compiled"] * 2 + ["memory"] * 4
    assert len({id(f.function) for f in found}) == 2


def test_what_others_write_to_stderr_meanwhile_is_kept(
    cache: ObjectCache, forgetful: Forget, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = threading.Event()

    def chatter() -> None:
        while not stop.wait(0.01):
            print("ptxas says another thread", file=sys.stderr)

    thread = threading.Thread(target=chatter)
    thread.start()
    report = compile(Tiny(), cache=cache).report
    stop.set()
    thread.join()
    said = capsys.readouterr().err
    assert "ptxas says another thread" in said
    assert "ptxas info" not in said
    assert report.registers is not None
