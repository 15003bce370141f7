"""Compiled kernels on disk: an object file and a sidecar per key.

    <folder>/objects/<digest>.o       machine code, loadable without recompiling
    <folder>/objects/<digest>.json    canonical key, report, SHA-256 of the object
    <folder>/locks/<digest>           held while the key is being compiled
    <folder>/quarantine/              entries whose object and sidecar did not agree

Files appear whole, by rename, the object before its sidecar, and a sidecar counts only for the
object whose checksum it holds; a reader therefore needs no lock. Where the folder cannot be used
the cache says so once and stands aside.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epicute.errors import CacheError
from epicute.jit.folder import default_folder, make_private, why_untrusted
from epicute.jit.key import CompileKey
from epicute.jit.lock import hold, try_hold
from epicute.jit.report import Report

__all__ = ["Entry", "ObjectCache"]

log = logging.getLogger("epicute.jit")

SIDECAR_VERSION = 1
LIMIT_BYTES = 4 << 30
LOCK_SECONDS = 600.0
"""Longest wait for another process at the same key; then this one compiles for itself."""

STALE_SECONDS = 24 * 3600.0
"""Age at which temporary files of dead processes and quarantined entries are removed."""

PRUNE_TO = 0.9
"""Share of the limit that is left after a prune, so that not every write prunes."""


@dataclass(frozen=True)
class Entry:
    """One compiled kernel on disk.

    Attributes:
        digest: of its key.
        canonical: the key's text.
        report: what the compiler said.
        object: path of the object file.
        size: bytes of object and sidecar.
        used: when last written or loaded, seconds since the epoch.
    """

    digest: str
    canonical: str
    report: Report
    object: Path
    size: int
    used: float

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return str(json.loads(self.canonical)["kernel"])


class ObjectCache:
    """The objects of one folder.

    Args:
        folder: where they lie; by default ``default_folder()``.
        limit_bytes: size above which a write removes the least recently used entries.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self.folder = default_folder() if folder is None else Path(folder).absolute()
        self.limit_bytes = limit_bytes
        self._told = False

    def unusable(self) -> str | None:
        """Why the folder is not read, with the fix; None where it is, or does not exist yet."""
        if self.folder is None:
            return "there is no home folder. Fix: set EPICUTE_CACHE_DIR"
        return why_untrusted(self.folder)

    def unwritable(self) -> str | None:
        """Why nothing can be stored, with the fix; None where a file could be written. Tries one,
        beside the folder where that does not exist, and leaves nothing behind."""
        if (reason := self.unusable()) is not None:
            return reason
        assert self.folder is not None
        tried = self.folder / "objects"
        try:
            while not tried.exists():
                tried = tried.parent
            with tempfile.TemporaryFile(dir=tried):
                return None
        except OSError as error:
            return (
                f"{self.folder} cannot be written to ({error.strerror}). "
                "Fix: set EPICUTE_CACHE_DIR to a folder of yours"
            )

    def read(self, digest: str) -> Entry | None:
        """The entry of a key, if it is there whole; marks it as used.

        None, with one warning, where the folder is unusable.
        """
        if (reason := self.unusable()) is not None:
            self._warn(reason)
            return None
        entry = self._entry(digest, verify=True)
        if entry is not None:
            with contextlib.suppress(OSError):
                os.utime(entry.object)
        return entry

    @contextlib.contextmanager
    def lock(self, digest: str) -> Iterator[bool]:
        """Be the only process that compiles this key; gives whether that is possible.

        Where it is not, neither is ``write``. A broken entry is moved to quarantine here, where
        nobody is writing it.
        """
        with contextlib.ExitStack() as stack:
            held = False
            if self.unusable() is None:
                try:
                    held = stack.enter_context(hold(self._make("locks") / digest, LOCK_SECONDS))
                    if held and self._entry(digest, verify=True) is None:
                        self._quarantine(digest)
                except OSError as error:
                    held = False
                    self._warn(f"{self.folder} cannot be written to ({error.strerror})")
            yield held

    def write(self, key: CompileKey, report: Report, code: bytes) -> Entry | None:
        """Store an object under its lock; None, with one warning, on a full or read-only disk."""
        sidecar = {
            "version": SIDECAR_VERSION,
            "key": json.loads(key.canonical()),
            "report": report.to_json(),
            "object": {"sha256": hashlib.sha256(code).hexdigest(), "size": len(code)},
        }
        try:
            self._replace(f"{key.digest}.o", code)
            self._replace(
                f"{key.digest}.json", json.dumps(sidecar, indent=1, sort_keys=True).encode()
            )
        except OSError as error:
            self._warn(f"{self.folder} cannot be written to ({error.strerror})")
            return None
        self.prune(keep=key.digest)
        return self._entry(key.digest, verify=False)

    def entries(self) -> list[Entry]:
        """All whole entries, most recently used first. Checksums are left to ``read``."""
        if self.folder is None or self.unusable() is not None:
            return []
        found = [
            self._entry(path.stem, verify=False)
            for path in (self.folder / "objects").glob("*.json")
        ]
        return sorted((e for e in found if e is not None), key=lambda e: e.used, reverse=True)

    def clear(self) -> int:
        """Remove every entry that is not being compiled; gives their number. Raises CacheError in
        an unusable folder."""
        if (reason := self.unusable()) is not None:
            raise CacheError(reason)
        removed = sum(self._remove(entry.digest) for entry in self.entries())
        self._sweep(older_than=0.0)
        return removed

    def prune(self, max_age: float | None = None, keep: str = "") -> int:
        """Remove the least recently used entries beyond ``limit_bytes``, and those unused for
        ``max_age`` seconds.

        Gives the number removed. The entry of digest ``keep`` stays.
        """
        entries = self.entries()
        total = sum(entry.size for entry in entries)
        goal = PRUNE_TO * self.limit_bytes if total > self.limit_bytes else total
        removed = 0
        for entry in reversed(entries):
            old = max_age is not None and time.time() - entry.used > max_age
            if (total > goal or old) and entry.digest != keep and self._remove(entry.digest):
                total -= entry.size
                removed += 1
        self._sweep(older_than=STALE_SECONDS)
        return removed

    def _entry(self, digest: str, *, verify: bool) -> Entry | None:
        assert self.folder is not None
        path = self.folder / "objects" / f"{digest}.json"
        code = path.with_suffix(".o")
        try:
            text = path.read_bytes()
            found: dict[str, Any] = json.loads(text)
            if found["version"] != SIDECAR_VERSION:
                return None
            if (
                verify
                and hashlib.sha256(code.read_bytes()).hexdigest() != found["object"]["sha256"]
            ):
                return None
            canonical = json.dumps(found["key"], sort_keys=True, separators=(",", ":"))
            if hashlib.sha256(canonical.encode()).hexdigest() != digest:
                return None
            seen = code.stat()
            return Entry(
                digest,
                canonical,
                Report.from_json(found["report"]),
                code,
                seen.st_size + len(text),
                seen.st_mtime,
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _quarantine(self, digest: str) -> None:
        """Set aside what is left of a broken entry."""
        assert self.folder is not None
        for suffix in (".json", ".o"):
            path = self.folder / "objects" / f"{digest}{suffix}"
            if path.exists():
                aside = self._make("quarantine") / f"{uuid.uuid4().hex[:8]}-{path.name}"
                os.replace(path, aside)
                log.warning("%s is damaged; moved to %s and compiled anew", path.name, aside)

    def _replace(self, name: str, content: bytes) -> None:
        """Write a file of ``objects`` so that it is there whole or not at all."""
        path = self._make("objects") / name
        temporary = path.with_name(f".{name}.{os.getpid()}-{uuid.uuid4().hex[:8]}")
        try:
            with open(temporary, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def _remove(self, digest: str) -> bool:
        """Remove an entry and its lock, unless somebody holds that."""
        assert self.folder is not None
        lock = self.folder / "locks" / digest
        try:
            with try_hold(lock) as held:
                if not held:
                    return False
                for path in (f"objects/{digest}.json", f"objects/{digest}.o", f"locks/{digest}"):
                    (self.folder / path).unlink(missing_ok=True)
        except OSError:
            return False
        return True

    def _sweep(self, older_than: float) -> None:
        """Remove quarantined entries and temporary files that nobody will finish."""
        assert self.folder is not None
        left = [*(self.folder / "quarantine").glob("*"), *(self.folder / "objects").glob(".*")]
        for path in left:
            with contextlib.suppress(OSError):
                temporary = path.parent.name == "objects"
                if time.time() - path.stat().st_mtime > (
                    STALE_SECONDS if temporary else older_than
                ):
                    path.unlink()

    def _make(self, name: str) -> Path:
        assert self.folder is not None
        make_private(self.folder)
        make_private(self.folder / name)
        return self.folder / name

    def _warn(self, reason: str) -> None:
        """Say once why kernels are kept in memory only."""
        if not self._told:
            self._told = True
            log.warning("compiled kernels are kept in memory only, as %s", reason)
