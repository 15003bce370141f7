"""sdist → wheel → installed: exactly the modules of ``src``, as ``epicute``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def clone(root: Path, tree: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, by the name that ``git clone`` would give it."""
    copy = tmp_path_factory.mktemp("beside") / "epicute"
    for path in tree:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, copy / path, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def distributions(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel built from that sdist), made from a copy of the tree."""
    copy = clone
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), cwd=copy)
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel alone was installed."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--target", str(target), str(distributions[1]), cwd=target)
    return target


@pytest.fixture(scope="module")
def metadata(root: Path) -> str:
    """The name of the wheel's folder of metadata."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return f"epicute-{project['version']}.dist-info"


def python_files(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*.py"))


def test_wheel_holds_exactly_the_modules_of_src(installed: Path, sources: list[Path]) -> None:
    assert python_files(installed / "epicute") == sources


def test_wheel_holds_nothing_beside_the_package(
    distributions: tuple[Path, Path], metadata: str
) -> None:
    with zipfile.ZipFile(distributions[1]) as wheel:
        names = wheel.namelist()
    assert {name.split("/")[0] for name in names} == {"epicute", metadata}
    kinds = {Path(name).suffix for name in names if name.startswith("epicute/")}
    assert kinds == {".py", ".typed"}


def test_wheel_is_typed_and_licensed(installed: Path, metadata: str) -> None:
    assert (installed / "epicute" / "py.typed").is_file()
    assert (installed / metadata / "licenses" / "LICENSE").is_file()


def test_sdist_holds_what_builds_the_wheel(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"setup.py", "pyproject.toml", "LICENSE", "src/errors.py", "src/py.typed"} <= names


def test_installed_package_imports_from_there(installed: Path) -> None:
    script = "import epicute.errors; print(epicute.errors.__file__)"
    isolated = f"import sys; sys.path.insert(0, {str(installed)!r}); {script}"
    found = run(sys.executable, "-P", "-c", isolated, cwd=installed).strip()
    assert Path(found) == installed / "epicute" / "errors.py"


@pytest.fixture(scope="module")
def editable(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds nothing but an editable installation of the clone."""
    out = tmp_path_factory.mktemp("editable")
    build = f"from setuptools import build_meta; build_meta.build_editable({str(out)!r})"
    run(sys.executable, "-c", build, cwd=clone)
    run(sys.executable, "-m", "venv", "--without-pip", str(out / "venv"), cwd=out)
    (packages,) = (out / "venv").glob("lib/python*/site-packages")
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    return out / "venv" / "bin" / "python"


def spec_of(python: Path, script: Path, name: str) -> str:
    """Where a script, started as ``python script``, finds the package ``name``; None for a mere folder."""
    script.write_text(
        f"import importlib.util as u; s = u.find_spec({name!r}); print(s and s.origin)"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    command = [str(python), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_editable_installation_works_beside_a_clone_of_the_default_name(
    clone: Path, editable: Path, tmp_path: Path
) -> None:
    """The clone's folder, which is no package, lies on the path of every script next to it."""
    for folder in (clone.parent, clone / "docs", tmp_path):
        origin = spec_of(editable, folder / "try_it.py", "epicute")
        (folder / "try_it.py").unlink()
        assert Path(origin).resolve() == (clone / "src" / "__init__.py").resolve()


def test_an_editable_installation_brings_nothing_else(editable: Path, tmp_path: Path) -> None:
    for name in ("tests", "benchmarks", "src", "docs", "examples"):
        assert spec_of(editable, tmp_path / "try_it.py", name) == "None"


def test_root_link_makes_a_bare_checkout_importable(root: Path) -> None:
    assert (root / "epicute").readlink() == Path("src")


def test_every_folder_of_modules_is_a_package(sources: list[Path]) -> None:
    folders = {path.parent for path in sources}
    assert {folder for folder in folders if folder / "__init__.py" not in sources} == set()
