"""The digest of a user's function: what changes it, what does not, what is refused."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from epicute.errors import KeyingError
from epicute.jit import source_digest
from tests.jit.processes import finish, start

Load = Callable[..., ModuleType]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Import texts as modules: ``load("def f(): ...", helpers="...")`` gives the first."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    names: set[str] = set()

    def forget() -> None:
        for name in names:
            sys.modules.pop(name, None)
        importlib.invalidate_caches()

    def write_and_import(text: str, **others: str) -> ModuleType:
        forget()
        for name, content in {**others, "user": text}.items():
            names.add(name)
            (tmp_path / f"{name}.py").write_text(content)
        return importlib.import_module("user")

    yield write_and_import
    forget()


def digest(load: Load, text: str, name: str = "f", **others: str) -> str:
    return source_digest(getattr(load(text, **others), name))


BASE = "def f(x, *, cap=2.0):\n    return x * cap\n"

SAME = {
    "docstring": 'def f(x, *, cap=2.0):\n    """Double."""\n    return x * cap\n',
    "comment": "def f(x, *, cap=2.0):\n    # doubled\n    return x * cap  # so\n",
    "layout": "\n\ndef f(\n    x,\n    *,\n    cap=2.0,\n):\n    return (x\n        * cap)\n",
    "unused neighbours": "import os\nLIMIT = [1]\n" + BASE + "\ndef g():\n    return LIMIT\n",
    "a global of another name": "y = 3\n" + BASE,
}
OTHER = {
    "body": "def f(x, *, cap=2.0):\n    return x + cap\n",
    "constant": "def f(x, *, cap=2.0):\n    return x * cap * 1\n",
    "default": "def f(x, *, cap=3.0):\n    return x * cap\n",
    "type of default": "def f(x, *, cap=2):\n    return x * cap\n",
    "parameter": "def f(x, *, top=2.0):\n    return x * top\n",
    "name": "def f(x, cap=2.0):\n    return x * cap\n",
}


@pytest.mark.parametrize("case", SAME)
def test_what_does_not_matter(case: str, load: Load) -> None:
    assert digest(load, SAME[case]) == digest(load, BASE)


def test_what_matters(load: Load) -> None:
    found = [digest(load, text) for text in (BASE, *OTHER.values())]
    assert len(set(found)) == len(found)


def test_neither_file_nor_module_enters(load: Load, tmp_path: Path) -> None:
    here = digest(load, BASE)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "other.py").write_text(BASE)
    sys.path.insert(0, str(tmp_path / "elsewhere"))
    try:
        assert source_digest(importlib.import_module("other").f) == here
    finally:
        sys.path.remove(str(tmp_path / "elsewhere"))
        sys.modules.pop("other")


REFERS = {
    "a constant": ("LIMIT = 2.0\ndef f(x):\n    return x * LIMIT\n", "2.0", "3.0"),
    "a constant's type": ("LIMIT = 2\ndef f(x):\n    return x * LIMIT\n", "= 2", "= 2.0"),
    "a tuple": ("T = (1, 2)\ndef f(x):\n    return x * T[0]\n", "(1, 2)", "(1, 3)"),
    "a helper": ("def h(x):\n    return x + 1\ndef f(x):\n    return h(x)\n", "+ 1", "+ 2"),
    "a helper's helper": (
        "def g(x):\n    return x + 1\ndef h(x):\n    return g(x)\ndef f(x):\n    return h(x)\n",
        "+ 1",
        "+ 2",
    ),
    "a helper's constant": (
        "C = 1\ndef h(x):\n    return x + C\ndef f(x):\n    return h(x)\n",
        "C = 1",
        "C = 2",
    ),
    "recursion": (
        "def g(x):\n    return f(x - 1) if x else 0\ndef f(x):\n    return g(x) + 1\n",
        "else 0",
        "else 1",
    ),
    "within a comprehension": (
        "C = 1\ndef f(x):\n    return [x + C for _ in (1,)]\n",
        "C = 1",
        "C = 2",
    ),
    "within an inner function": (
        "C = 1\ndef f(x):\n    def inner(y):\n        return y + C\n    return inner(x)\n",
        "C = 1",
        "C = 2",
    ),
    "a decorated helper": (
        "import functools\n@functools.cache\ndef h(x):\n    return x + 1\n"
        "def f(x):\n    return h(x)\n",
        "+ 1",
        "+ 2",
    ),
    "a class's method": (
        "class C:\n    def go(self, x):\n        return x + 1\ndef f(x):\n    return C().go(x)\n",
        "+ 1",
        "+ 2",
    ),
    "a class's attribute": ("class C:\n    n = 1\ndef f(x):\n    return C.n\n", "n = 1", "n = 2"),
    "a global of a method": (
        "K = 1\nclass C:\n    def go(self):\n        return K\ndef f(x):\n    return C().go()\n",
        "K = 1",
        "K = 2",
    ),
    "a base class": (
        "class B:\n    n = 1\nclass C(B):\n    pass\ndef f(x):\n    return C.n\n",
        "n = 1",
        "n = 2",
    ),
    "a dataclass": (
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass C:\n    n: int = 1\n"
        "def f(x):\n    return C().n\n",
        "= 1",
        "= 2",
    ),
    "a dataclass value": (
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass C:\n    n: int\n"
        "V = C(1)\ndef f(x):\n    return V.n\n",
        "V = C(1)",
        "V = C(2)",
    ),
    "an enum": (
        "import enum\nclass E(enum.Enum):\n    A = 1\ndef f(x):\n    return E.A.value\n",
        "A = 1",
        "A = 2",
    ),
}


@pytest.mark.parametrize("case", REFERS)
def test_everything_referred_to_is_covered(case: str, load: Load) -> None:
    text, old, new = REFERS[case]
    assert old in text
    before = digest(load, text)
    assert digest(load, text) == before
    assert digest(load, text.replace(old, new)) != before


def test_a_helper_of_another_file_is_covered(load: Load) -> None:
    text = "from helpers import h\ndef f(x):\n    return h(x)\n"
    before = digest(load, text, helpers="K = 1\ndef h(x):\n    return x + K\n")
    assert digest(load, text, helpers="K = 1\ndef h(x):\n    return x + K\n") == before
    assert digest(load, text, helpers="K = 2\ndef h(x):\n    return x + K\n") != before


def test_two_helpers_that_change_places_are_told_apart(load: Load) -> None:
    text = (
        "def a(x):\n    return x + 1\ndef b(x):\n    return x + 2\ndef f(x):\n    return a(b(x))\n"
    )
    assert digest(load, text) != digest(load, text.replace("a(b(x))", "b(a(x))"))


def test_libraries_count_by_name_and_version(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "import math\nimport numpy as np\nimport torch\nfrom math import tanh\n"
        "from epicute.layouts import row_order\nfrom epicute.layouts.row_order import chunks_of\n"
        "def f(x):\n    import numpy.linalg\n"
        "    return np.exp(x) + math.pi + tanh(x) + torch.tanh(x) + row_order.CHUNKS[0]\n"
        "def g(x):\n    return chunks_of(x)\n"
    )
    assert digest(load, text) == digest(load, text)
    before = [digest(load, text, name) for name in "fg"]
    monkeypatch.setattr("epicute.jit.source.version_of", lambda _: "other")
    assert all(digest(load, text, name) != old for name, old in zip("fg", before, strict=True))


REFUSED = {
    "lambda": ("f = lambda x: x\n", "def"),
    "lambda helper": ("h = lambda x: x\ndef f(x):\n    return h(x)\n", "def"),
    "closure": (
        "def make(n):\n    def f(x):\n        return x + n\n    return f\nf = make(1)\n",
        "n",
    ),
    "closure helper": (
        "def make(n):\n    def h(x):\n        return x + n\n    return h\nh = make(1)\n"
        "def f(x):\n    return h(x)\n",
        "keyword parameter",
    ),
    "list": ("T = [1]\ndef f(x):\n    return T[0]\n", "tuple"),
    "dict": ("T = {}\ndef f(x):\n    return T[x]\n", "frozen dataclass"),
    "array": ("import numpy as np\nT = np.zeros(2)\ndef f(x):\n    return T[0]\n", "tuple"),
    "tensor": ("import torch\nT = torch.zeros(2)\ndef f(x):\n    return T[0]\n", "tuple"),
    "object": ("T = object()\ndef f(x):\n    return T\n", "keyword parameter"),
    "list as default": ("def f(x, t=[1]):\n    return t\n", "tuple"),
    "method": ("class C:\n    def f(self, x):\n        return x\nf = C().f\n", "plain function"),
    "partial": (
        "import functools\ndef g(x, n):\n    return x\nf = functools.partial(g, n=1)\n",
        "def",
    ),
    "builtin": ("f = len\n", "def"),
    "undefined name": ("def f(x):\n    return later(x)\n", "above the use"),
    "a user's module": (
        "import helpers\ndef f(x):\n    return helpers.h(x)\n",
        "from helpers import",
    ),
    "imported inside": ("def f(x):\n    from helpers import h\n    return h(x)\n", "module level"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_followed_is_refused_with_the_fix(case: str, load: Load) -> None:
    text, fix = REFUSED[case]
    with pytest.raises(KeyingError, match="Fix: ") as caught:
        digest(load, text, helpers="def h(x):\n    return x\n")
    assert fix in str(caught.value)


IMPURE = {
    "os": "import os\ndef f(x):\n    return x * len(os.environ)\n",
    "posixpath": "import os.path as p\ndef f(x):\n    return p.exists('a')\n",
    "random": "from random import random\ndef f(x):\n    return x * random()\n",
    "random.uniform": "from random import uniform\ndef f(x):\n    return x * uniform(0, 1)\n",
    "time": "import time\ndef f(x):\n    return x * time.time()\n",
    "time.time": "from time import time\ndef f(x):\n    return x * time()\n",
    "datetime": "from datetime import datetime\ndef f(x):\n    return datetime.now().hour\n",
    "secrets": "import secrets\ndef f(x):\n    return secrets.randbelow(3)\n",
    "uuid": "from uuid import uuid4\ndef f(x):\n    return uuid4().int\n",
    "socket": "import socket\ndef f(x):\n    return socket.gethostname()\n",
    "subprocess": "import subprocess\ndef f(x):\n    return subprocess.run('a')\n",
    "sys": "import sys\ndef f(x):\n    return x * len(sys.argv)\n",
    "pathlib": "from pathlib import Path\ndef f(x):\n    return Path('a').exists()\n",
    "inside": "def f(x):\n    import os\n    return x * len(os.environ)\n",
    "a helper's": "import os\ndef h():\n    return os.environ\ndef f(x):\n    return h()\n",
    "a method's": (
        "import os\nclass C:\n    def go(self):\n        return os.environ\n"
        "def f(x):\n    return C().go()\n"
    ),
    "open": "def f(x):\n    return x * len(open('a').read())\n",
    "open by another name": "read = open\ndef f(x):\n    return read('a')\n",
    "hash": "def f(x):\n    return x * hash('a')\n",
    "hash by another name": "h = hash\ndef f(x):\n    return x * h('a')\n",
    "input": "def f(x):\n    return input()\n",
    "import by call": "def f(x):\n    return __import__('os').environ\n",
}


@pytest.mark.parametrize("case", IMPURE)
def test_what_differs_between_processes_is_refused_by_name(case: str, load: Load) -> None:
    with pytest.raises(KeyingError, match="pass the value as a field of the policy") as caught:
        digest(load, IMPURE[case])
    named = case.partition(" ")[0].partition(".")[0]
    assert {"inside": "os", "a": "os", "import": "__import__"}.get(named, named) in str(
        caught.value
    )


def test_a_method_of_an_object_is_refused(load: Load) -> None:
    """Its name would be in the key, and the object's value would not."""
    for made in ("'abc'.upper", "[1].pop", "np.random.default_rng(0).normal"):
        with pytest.raises(KeyingError, match="Fix: "):
            digest(load, f"import numpy as np\nT = {made}\ndef f(x):\n    return T()\n")


def test_pure_modules_of_the_standard_library_are_allowed(load: Load) -> None:
    text = (
        "import abc, cmath, collections, contextlib, dataclasses, decimal, enum, fractions\n"
        "import functools, itertools, math, numbers, operator, types, typing\n"
        "from collections import OrderedDict, namedtuple\nfrom functools import reduce\n"
        "from itertools import product\nfrom math import sin\nfrom operator import add\n"
        "from decimal import Decimal\nfrom fractions import Fraction\n"
        "size = len\nkind = str.upper\n"
        "class A(abc.ABC, typing.Generic[typing.TypeVar('T')]):\n    n = 1\n"
        "class E(enum.IntEnum):\n    A = 1\n"
        "def f(x):\n    import collections.abc\n"
        "    math, cmath, abc, contextlib, dataclasses, decimal, enum, fractions, functools\n"
        "    itertools, numbers, operator, types, typing, OrderedDict, namedtuple, reduce\n"
        "    return product, sin, add, Decimal, Fraction, size, kind, A, E, collections, sorted\n"
    )
    assert digest(load, text) == digest(load, text)


def test_the_refusal_names_function_and_global(load: Load) -> None:
    with pytest.raises(KeyingError, match=r"f: global h: global TABLE"):
        digest(load, "TABLE = [1]\ndef h(x):\n    return TABLE\ndef f(x):\n    return h(x)\n")


def test_a_file_edited_after_the_import_is_refused(load: Load, tmp_path: Path) -> None:
    # The text would name code that is not running, and the object stored under it would be wrong.
    for text, edited in itertools.product([BASE], [OTHER["body"], OTHER["constant"], ""]):
        module = load(text)
        (tmp_path / "user.py").write_text(edited)
        with pytest.raises(KeyingError, match=r"Fix: (restart Python|put it in a file)"):
            source_digest(module.f)
    module = load(BASE)
    (tmp_path / "user.py").write_text(BASE + "\n# more\ndef g(x):\n    return x\n")
    source_digest(module.f)


def here(x: float) -> float:
    """A function of a test file, whose asserts pytest rewrites."""
    assert x == x
    return x + 1


def test_functions_of_test_files_are_keyable() -> None:
    assert source_digest(here) == source_digest(here)


def test_exec_is_refused() -> None:
    space: dict[str, object] = {"__name__": "somewhere"}
    exec("def f(x):\n    return x\n", space)
    with pytest.raises(KeyingError, match="not on disk"):
        source_digest(space["f"])  # type: ignore[arg-type]


SCRIPT = """
def f(x):
    return x + 1
from epicute.errors import KeyingError
from epicute.jit import source_digest
try:
    print("digest", source_digest(f))
except KeyingError as error:
    print("refused", error)
"""

NOTEBOOK = """
import linecache, runpy
cell = "/nowhere/ipykernel_7/1234.py"
linecache.cache[cell] = (len(SCRIPT), None, SCRIPT.splitlines(True), cell)
for name in ("<stdin>", cell):
    exec(compile(SCRIPT, name, "exec"))
runpy.run_module("script", run_name="__main__", alter_sys=True)
"""


def test_jc_10_code_without_a_file_is_refused_and_a_script_is_not(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    inline = start(f"{SCRIPT}\nSCRIPT = {SCRIPT!r}\n{NOTEBOOK}", folder=tmp_path)
    script = start(tmp_path / "script.py", folder=tmp_path)
    *refused, module = finish(inline).splitlines()
    assert len(refused) == 3  # python -c, standard input, a notebook's cell
    assert all(line.startswith("refused f: ") and "put it in a file" in line for line in refused)
    assert module.startswith("digest")
    assert finish(script).strip() == module
