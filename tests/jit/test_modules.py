"""Digests of modules: followed imports, wheels, zips and bytecode."""

from __future__ import annotations

import compileall
import importlib
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from epicute.errors import KeyingError
from epicute.jit import modules, modules_digest
from tests.jit.processes import finish, start

TREE = {
    "__init__.py": '"""Top."""\n',
    "kernel.py": "from thing.parts import mma\nfrom . import table\nN = 1\n",
    "table.py": "T = 1\n",
    "parts/__init__.py": "",
    "parts/mma.py": "from ..deep import d\n\ndef f(x):\n    return x + d.D\n"
    "\ndef g(x):\n    return x in {'one', 'two', 'three', 'four'}\n",
    "deep/__init__.py": "",
    "deep/d.py": "D = 1\n",
    "deep/reference.py": "R = 1\n",
    "alone.py": "A = 1\n",
}

Tree = Callable[..., str]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    """Digest ``thing.kernel`` of a package made of TREE with some files replaced."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def forget() -> None:
        for name in [n for n in sys.modules if n.partition(".")[0] == "thing"]:
            del sys.modules[name]
        importlib.invalidate_caches()
        modules._module.cache_clear()

    def make(names: tuple[str, ...] = ("thing.kernel",), follow: bool = True, **files: str) -> str:
        replaced = {name.replace("__", "/") + ".py": text for name, text in files.items()}
        write(tmp_path / "thing", {**TREE, **replaced})
        forget()
        return modules_digest(*names, follow=follow)

    yield make
    forget()


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_imports_are_followed_at_any_depth(tree: Tree) -> None:
    base = tree()
    assert tree() == base
    for name in ("kernel", "table", "parts__mma", "deep__d"):
        before = TREE[name.replace("__", "/") + ".py"]
        assert tree(**{name: before + "MORE = 2\n"}) != base, name


def test_what_is_not_imported_and_what_does_not_matter_stay_out(tree: Tree) -> None:
    base = tree()
    assert tree(alone="A = 2\n") == base
    assert tree(deep__reference="R = 2\n") == base
    assert tree(deep__d='"""Doc."""\n# comment\nD   =  1\n') == base


def test_without_following_only_the_named_count(tree: Tree) -> None:
    base = tree(follow=False)
    assert tree(follow=False, deep__d="D = 2\n") == base
    assert tree(follow=False, kernel="N = 2\n") != base


def test_a_package_stands_for_what_is_beneath_it(tree: Tree) -> None:
    base = tree(names=("thing.deep",))
    assert tree(names=("thing.deep",), deep__d="D = 2\n") != base
    assert tree(names=("thing.deep",), table="T = 2\n") == base


def test_an_import_inside_a_function_counts(tree: Tree) -> None:
    lazy = "def f():\n    from thing import alone\n    return alone\n"
    assert tree(kernel=lazy) != tree(kernel=lazy, alone="A = 2\n")


def test_an_import_for_type_checkers_does_not(tree: Tree) -> None:
    head = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
    typed = head + "    from thing import alone\nelse:\n    from thing import table\n"
    base = tree(kernel=typed)
    assert tree(kernel=typed, alone="A = 2\n") == base
    assert tree(kernel=typed, table="T = 2\n") != base


def test_a_kernel_is_digested_without_being_imported(tree: Tree) -> None:
    kernel = "import cutlass\nfrom thing.table import T\nraise SystemExit\n"
    tree(names=("thing.user",), user="from thing.kernel import N\n", kernel=kernel)
    assert not {name for name in sys.modules if name.startswith("thing")}


def test_a_module_edited_since_the_import_is_refused(tree: Tree, tmp_path: Path) -> None:
    tree()
    importlib.import_module("thing.parts.mma")
    path = tmp_path / "thing" / "parts" / "mma.py"
    path.write_text(path.read_text().replace("x + d.D", "x - d.D"))
    modules._module.cache_clear()
    with pytest.raises(KeyingError, match="restart Python"):
        modules_digest("thing.kernel")


def test_no_such_module(tree: Tree) -> None:
    for name in ("thing.missing", "missing", "missing.deeper"):
        with pytest.raises(KeyingError, match=name):
            tree(names=(name,))


def test_the_rooms_of_the_package_itself() -> None:
    assert modules_digest("epicute.layouts") == modules_digest("epicute.layouts")
    assert modules_digest("epicute.layouts") != modules_digest("epicute.layouts.row_order")


DIGEST = """
import sys
from epicute.jit import modules_digest
sys.path.insert(0, sys.argv[1])
print(modules_digest("thing.kernel"))
"""


def test_jc_10_checkout_zip_and_bytecode_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest_at(place: Path) -> str:
        with monkeypatch.context() as patch:
            patch.syspath_prepend(place)
            modules._module.cache_clear()
            return modules_digest("thing.kernel")

    write(tmp_path / "a" / "thing", TREE)
    write(tmp_path / "b" / "elsewhere" / "thing", TREE)
    write(tmp_path / "c" / "thing", TREE)
    with zipfile.ZipFile(tmp_path / "thing.zip", "w") as archive:
        for name, text in TREE.items():
            archive.writestr(f"thing/{name}", text)
    compileall.compile_dir(tmp_path / "c", legacy=True, quiet=1)
    for path in (tmp_path / "c").rglob("*.py"):
        path.unlink()
    (tmp_path / "c").rename(tmp_path / "moved")

    checkout = digest_at(tmp_path / "a")
    assert digest_at(tmp_path / "b" / "elsewhere") == checkout
    assert digest_at(tmp_path / "thing.zip") == checkout
    bytecode = digest_at(tmp_path / "moved")
    assert bytecode != checkout
    again = start(DIGEST, str(tmp_path / "moved"), folder=tmp_path, PYTHONHASHSEED="9")
    assert finish(again).strip() == bytecode
    (tmp_path / "moved" / "thing" / "deep" / "d.pyc").write_bytes(
        (tmp_path / "moved" / "thing" / "alone.pyc").read_bytes()
    )
    assert digest_at(tmp_path / "moved") != bytecode


def test_code_that_the_dsl_has_rewritten_counts_as_it_was() -> None:
    """It replaces a function's code at its first trace and keeps the one from the file."""
    source = "def f():\n    return 1\n"
    module = types.ModuleType("traced")
    exec(compile(source, "traced.py", "exec", dont_inherit=True), vars(module))
    modules.require_unedited(module.f, source)
    original, module.f.__code__ = module.f.__code__, (lambda: 2).__code__
    with pytest.raises(KeyingError, match="has changed since it was imported"):
        modules.require_unedited(module.f, source)
    module.f._original_code = original
    modules.require_unedited(module.f, source)
