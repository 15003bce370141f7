"""The typed, total key of a compiled kernel.

Two keys are equal exactly when every value and every type in them is: ``True``, ``1``, ``1.0`` and
``"1"`` are four values. A key is text before it is a hash, so that two keys can be told apart in
words, and that text is the same in every process: no address, no absolute path, no pickle.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from epicute.errors import KeyingError
from epicute.jit.environment import Pairs, environment
from epicute.jit.target import Target

__all__ = ["CompileKey", "encode"]

Fields = tuple[tuple[str, Any], ...]

BASE_OPTIONS = ("--enable-tvm-ffi", "--ptxas-options='-v'", "remarks{ptx}")
"""Compiler options of every kernel: the calling convention, and the report from ptxas."""

LONGEST_SHOWN = 120
"""Characters of a field beyond which a printed key leaves it out; the text of the key has it."""

DIFFERENCES = 3
"""Differing fields that ``CompileKey.difference`` names."""


def encode(value: Any, name: str = "value") -> Any:
    """JSON form of a keyable value, with its type in it.

    Keyable are None, bool, int, float, str, enum members, ``torch.dtype``, tuples of such, and
    frozen dataclasses, defined at module level, whose fields are such. Raises KeyingError, naming
    ``name``, for anything else.
    """
    kind = type(value)
    if isinstance(value, enum.Enum):
        return ["enum", _class_name(kind, name), value.name or encode(value.value, name)]
    if value is None:
        return ["none"]
    if kind in (bool, int, str):
        return [kind.__name__, value if kind is str else str(value)]
    if kind is float:
        return ["float", "nan" if math.isnan(value) else value.hex()]
    if kind is tuple:
        return ["tuple", [encode(item, f"{name}[{i}]") for i, item in enumerate(value)]]
    if (kind.__module__, kind.__name__) == ("torch", "dtype"):
        return ["dtype", str(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _encode_dataclass(value, name)
    raise KeyingError(
        f"{name}: got {value!r:.80} of type {kind.__module__}.{kind.__qualname__}, expected None, "
        "bool, int, float, str, an enum member, torch.dtype, a tuple or a frozen dataclass of "
        f"such. Fix: {_fix(value)}"
    )


def _encode_dataclass(value: Any, name: str) -> Any:
    kind = type(value)
    if not kind.__dataclass_params__.frozen:
        raise KeyingError(
            f"{name}: got the mutable dataclass {kind.__qualname__}, expected a frozen one. "
            "Fix: declare it with @dataclass(frozen=True)"
        )
    fields = dataclasses.fields(value)
    return [
        "data",
        _class_name(kind, name),
        {f.name: encode(getattr(value, f.name), f"{name}.{f.name}") for f in fields},
    ]


def _class_name(kind: type, name: str) -> str:
    if "<locals>" in kind.__qualname__:
        raise KeyingError(
            f"{name}: the class {kind.__qualname__} is defined inside a function, where two "
            "classes can share a name. "
            "Fix: define it at module level"
        )
    return f"{kind.__module__}.{kind.__qualname__}"


def _fix(value: Any) -> str:
    if isinstance(value, (list, set, frozenset, dict)):
        return "pass a tuple or a frozen dataclass"
    if type(value).__module__ == "torch":
        return "key shapes, dtypes and numbers; tensors and what varies at run time belong in run()"
    if hasattr(value, "item"):
        return "pass a Python number, value.item()"
    if callable(value):
        return "put source_digest(function) in the key's sources"
    return "pass the numbers, strings and dtypes it stands for"


@dataclass(frozen=True, eq=False)
class CompileKey:
    """Everything that decides what a kernel compiles to.

    Attributes:
        kernel: name of the kernel, with its room: ``"gemm.sm90"``.
        fields: (name, value) pairs or a mapping; order does not matter, a name twice is refused.
        target: the architecture.
        sources: digests of the source that makes the kernel (``modules_digest``,
            ``source_digest``).
        options: compiler options beyond those of every kernel.
        environment: what is installed (``environment()``), part of every key.

    Raises KeyingError for a value that cannot be keyed, naming the field and the fix.
    """

    kernel: str
    fields: Fields = ()
    target: Target = field(default_factory=Target.detect)
    sources: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    environment: Pairs = field(default_factory=environment)

    def __post_init__(self) -> None:
        given = self.fields
        pairs = tuple(given.items() if isinstance(given, Mapping) else given)
        names = [name for name, _ in pairs]
        twice = sorted({str(name) for name in names if names.count(name) > 1})
        if twice:
            raise KeyingError(f"fields: {', '.join(twice)} given twice. Fix: name each field once")
        object.__setattr__(self, "fields", tuple(sorted(pairs, key=lambda pair: pair[0])))
        object.__setattr__(self, "sources", tuple(self.sources))
        object.__setattr__(self, "options", tuple(self.options))
        self.canonical()

    @property
    def compiler_options(self) -> str:
        """The option string the DSL's compiler gets."""
        return " ".join((*BASE_OPTIONS, f"--gpu-arch {self.target.arch}", *self.options))

    @cached_property
    def _canonical(self) -> str:
        return json.dumps(
            {
                "kernel": self.kernel,
                "target": self.target.arch,
                "fields": {name: encode(value, f"fields.{name}") for name, value in self.fields},
                "options": self.compiler_options,
                "environment": dict(self.environment),
                "sources": list(self.sources),
            },
            sort_keys=True,
            separators=(",", ":"),
        )

    def canonical(self) -> str:
        """The key as JSON text, equal in every process exactly for equal keys."""
        return self._canonical

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical text, in hex."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()

    def differences(self, other: CompileKey | str) -> list[str]:
        """Every entry in which this key differs from ``other`` (a key or a canonical text)."""
        theirs = other.canonical() if isinstance(other, CompileKey) else other
        new, old = (dict(_leaves(json.loads(text))) for text in (self.canonical(), theirs))
        return [
            f"{name}: {new.get(name, 'absent')}, was {old.get(name, 'absent')}"
            for name in {**new, **old}
            if new.get(name) != old.get(name)
        ]

    def difference(self, other: CompileKey | str) -> str:
        """The first few differences, ``fields.n: int 64, was int 32``; empty for equal keys."""
        found = self.differences(other)
        more = len(found) - DIFFERENCES
        return "; ".join(found[:DIFFERENCES] + ([f"and {more} more"] if more > 0 else []))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompileKey):
            return NotImplemented
        return self.canonical() == other.canonical()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        shown = [(name, _show(value)) for name, value in self.fields]
        fields = ", ".join(f"{name}={text}" for name, text in shown if len(text) <= LONGEST_SHOWN)
        return f"{self.kernel}({fields}) for {self.target}"


def _show(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    return str(value).removeprefix("torch.")


def _leaves(tree: Any, path: str = "") -> list[tuple[str, str]]:
    """(dotted path, readable value) of every leaf of a canonical text, environment and sources
    last."""
    if isinstance(tree, dict):
        order = sorted(tree, key=lambda name: (name in ("environment", "sources"), name))
        return [
            leaf for name in order for leaf in _leaves(tree[name], f"{path}.{name}".lstrip("."))
        ]
    if isinstance(tree, list):
        return _tagged_leaves(tree, path)
    return [(path, str(tree))]


def _tagged_leaves(tree: list[Any], path: str) -> list[tuple[str, str]]:
    if path == "sources":
        return [(f"sources[{i}]", digest[:12]) for i, digest in enumerate(tree)]
    tag, *rest = tree
    if tag == "tuple":
        return [
            leaf for i, item in enumerate(rest[0]) for leaf in _leaves(item, f"{path}[{i}]")
        ] or [(path, "empty tuple")]
    if tag == "data":
        return [(path, rest[0]), *_leaves(rest[1], path)]
    if tag == "float" and rest[0] != "nan":
        return [(path, f"float {float.fromhex(rest[0])!r}")]
    return [(path, " ".join(str(part) for part in (tag, *rest)))]
