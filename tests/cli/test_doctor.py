"""``epicute doctor``: a diagnosis for machines that have everything, and for those that lack."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epicute.cli import doctor, main
from epicute.errors import UnsupportedError
from epicute.jit import Compiled, Report, Target
from epicute.jit import target as target_module


@pytest.mark.compile
def test_it_compiles_a_kernel_to_prove_that_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EPICUTE_CACHE_DIR", str(tmp_path / "cache"))
    for _ in range(2):  # neither memory nor disk may answer the second time
        assert main(["doctor"]) == 0
        said = capsys.readouterr().out
        assert "ok  compiling      works: a kernel for sm_90a" in said
        for name in ("Python", "torch", "driver", "GPU", "CuTe DSL", "tvm-ffi", "cache", "running"):
            assert f"  {name} " in said, name
        assert "!!" not in said
    assert not (tmp_path / "cache").exists()


def texts(check: Callable[[], Any]) -> list[str]:
    return [str(finding) for finding in check()]


Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pretend versions, driver and GPUs: ``machine({"nvidia-cutlass-dsl": "4.9.0"})``."""

    def pretend(
        versions: dict[str, str] | None = None,
        driver: tuple[int, int] | None = None,
        flavour: str = "cu12",
        gpus: tuple[tuple[int, int], ...] = (),
    ) -> None:
        given = {
            "nvidia-cutlass-dsl": "4.8.1",
            "apache-tvm-ffi": "0.1.15",
            "cuda-bindings": "12.9.1",
            **(versions or {}),
        }
        target_module._of_device.cache_clear()
        monkeypatch.setattr(doctor, "version_of", lambda name: given.get(name, "absent"))
        monkeypatch.setattr(doctor, "driver_version", lambda: driver)
        monkeypatch.setattr(doctor, "dsl_flavour", lambda: flavour)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: gpus[i])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"card {i}")
        facts = [
            SimpleNamespace(name=f"card {i}", major=a, minor=b, total_memory=80 * 10**9)
            for i, (a, b) in enumerate(gpus)
        ]
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: facts[i])

    yield pretend  # type: ignore[misc]
    target_module._of_device.cache_clear()


@pytest.mark.parametrize(
    ("versions", "flavour", "fix"),
    [
        ({"nvidia-cutlass-dsl": "absent"}, "absent", "pip install 'nvidia-cutlass-dsl>=4.8,<4.9'"),
        ({"nvidia-cutlass-dsl": "4.7.0"}, "cu12", "pip install 'nvidia-cutlass-dsl>=4.8,<4.9'"),
        ({"nvidia-cutlass-dsl": "4.80.0"}, "cu12", "pip install 'nvidia-cutlass-dsl>=4.8,<4.9'"),
        ({}, "unsupported", "brings cu12"),
        ({"apache-tvm-ffi": "absent"}, "cu12", "apache-tvm-ffi"),
    ],
)
def test_jc_09_a_missing_or_wrong_dsl_is_named_with_the_command(
    versions: dict[str, str], flavour: str, fix: str, machine: Machine
) -> None:
    machine(versions, flavour=flavour)
    wrong = [text for text in texts(doctor._dsl) if text.startswith("!!")]
    assert len(wrong) == 1
    assert fix in wrong[0]


def test_a_good_dsl(machine: Machine) -> None:
    machine()
    assert all(text.startswith("ok") for text in texts(doctor._dsl))


@pytest.mark.parametrize(
    ("bindings", "driver", "good"),
    [
        ("13.4.4", (13, 0), True),
        ("12.9.1", (13, 0), True),
        ("12.9.1", (12, 8), True),
        ("13.4.4", None, True),
        ("13.4.4", (12, 8), False),
    ],
)
def test_bindings_newer_than_the_driver(
    bindings: str, driver: tuple[int, int] | None, good: bool, machine: Machine
) -> None:
    machine({"cuda-bindings": bindings}, driver)
    (text,) = texts(doctor._bindings)
    assert text.startswith("ok" if good else "!!")
    assert good or "pip install 'cuda-bindings<13'" in text


def test_every_gpu_is_named_and_an_unserved_one_is_no_failure(machine: Machine) -> None:
    machine(driver=(13, 0), gpus=((9, 0), (8, 0)))
    first, second = texts(doctor._gpus)
    assert first == "ok  GPU            cuda:0 card 0, capability 9.0, 80.0 GB: sm_90a"
    assert second.startswith("--  GPU            cuda:1 card 1, capability 8.0")
    assert "Hopper" in second
    assert doctor._target() == Target("sm_90a")
    machine(driver=(13, 0), gpus=((8, 0),))
    assert doctor._target() == Target("sm_90a")
    assert doctor._runs(compiled()).state == "lacking"


def test_a_cpu_build_of_torch_beside_a_driver(machine: Machine) -> None:
    machine(driver=(13, 0))
    text = "\n".join(texts(doctor._torch))
    assert text.startswith("--" if torch.version.cuda is None else "ok")
    assert "CUDA build of torch" in text or torch.version.cuda is not None


def test_a_cache_that_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("EPICUTE_CACHE_DIR", str(folder))
    (text,) = texts(doctor._cache)
    assert text.startswith("--  cache          memory only")
    assert f"fix: chmod go-w {folder}" in text


@pytest.mark.parametrize("place", ["made", "parent", "objects"])
def test_a_cache_that_cannot_be_written(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "parent" / "cache"
    refusing = {
        "made": folder,
        "parent": tmp_path / "parent",
        "objects": folder / "objects",
    }[place]
    refusing.mkdir(parents=True)
    real = tempfile.TemporaryFile

    def refuse(dir: Path) -> Any:
        if dir == refusing:  # by hand, as root may write anywhere
            raise PermissionError(13, "Permission denied")
        return real(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    monkeypatch.setenv("EPICUTE_CACHE_DIR", str(folder))
    (text,) = texts(doctor._cache)
    assert text.startswith(f"--  cache          memory only: {folder} cannot be written to (Perm")
    assert "fix: set EPICUTE_CACHE_DIR to a folder of yours" in text


def test_a_cache_that_is_a_file_or_beside_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "cache"):
        monkeypatch.setenv("EPICUTE_CACHE_DIR", str(folder))
        (text,) = texts(doctor._cache)
        assert text.startswith("--  cache          memory only")
        assert "fix: " in text


def test_a_cache_that_can_be_written_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPICUTE_CACHE_DIR", str(tmp_path / "a" / "cache"))
    (text,) = texts(doctor._cache)
    assert text.startswith("ok  cache")
    assert list(tmp_path.iterdir()) == []


def compiled() -> Compiled:
    probe = doctor.Probe(Target("sm_90a"))
    return Compiled(probe.key, lambda *_: None, Report(12, 0, 0, 0, (), 1.0, ""), "compiled")


def test_where_compiling_fails_the_status_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> Compiled:
        raise UnsupportedError("kernels: need the DSL. Fix: pip install it")

    monkeypatch.setattr(doctor, "compile", fail)
    assert main(["doctor"]) == 1
    assert "!!  compiling      kernels: need the DSL." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("outcome", "status", "said"),
    [(True, 0, "right values"), (False, 1, "wrong values"), (RuntimeError("no image"), 1, "image")],
)
def test_where_there_is_a_gpu_the_kernel_runs(
    outcome: Any,
    status: int,
    said: str,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def proves(_: Compiled) -> bool:
        if isinstance(outcome, Exception):
            raise outcome
        return bool(outcome)

    machine(driver=(13, 0), gpus=((9, 0),))
    monkeypatch.setattr(doctor, "proves", proves)
    monkeypatch.setattr(doctor, "compile", lambda *_, **__: compiled())
    assert main(["doctor"]) == status
    assert said in capsys.readouterr().out
