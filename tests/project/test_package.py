"""sdist → wheel → installed: exactly the modules of ``src``, as ``epicute``."""

from __future__ import annotations

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
def distributions(
    root: Path, tree: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """(sdist, wheel built from that sdist), made from a copy of the tree."""
    copy = tmp_path_factory.mktemp("tree")
    for path in tree:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, copy / path, follow_symlinks=False)
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


def test_root_link_makes_a_bare_checkout_importable(root: Path) -> None:
    assert (root / "epicute").readlink() == Path("src")


def test_every_folder_of_modules_is_a_package(sources: list[Path]) -> None:
    folders = {path.parent for path in sources}
    assert {folder for folder in folders if folder / "__init__.py" not in sources} == set()
