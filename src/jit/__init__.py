"""From a typed key to a loaded kernel: target, key, compile, object cache, report."""

from epicute.jit.cache import Entry, ObjectCache
from epicute.jit.compile import Compiled, Kernel, compile, forget
from epicute.jit.key import CompileKey
from epicute.jit.modules import modules_digest
from epicute.jit.pool import precompile
from epicute.jit.report import Report
from epicute.jit.source import source_digest
from epicute.jit.target import DEFAULT_TARGET, Target

__all__ = [
    "DEFAULT_TARGET",
    "CompileKey",
    "Compiled",
    "Entry",
    "Kernel",
    "ObjectCache",
    "Report",
    "Target",
    "compile",
    "forget",
    "modules_digest",
    "precompile",
    "source_digest",
]
