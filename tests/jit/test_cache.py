"""The object cache without a compiler: what is trusted, what is rebuilt, what is removed."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import time
from pathlib import Path

import pytest

from epicute.errors import CacheError
from epicute.jit import CompileKey, ObjectCache, Report, Target, lock
from epicute.jit.folder import default_folder
from epicute.jit.lock import hold, try_hold
from tests.jit.processes import finish, start

REPORT = Report(12, 0, 0, 1024, ("C7519: said",), 1.5, "of the DSL")
ROOT_USER = os.geteuid() == 0


def key(n: int = 0) -> CompileKey:
    return CompileKey("tests.cache", {"n": n}, Target("sm_90a"))


def put(cache: ObjectCache, n: int = 0, code: bytes = b"code") -> str:
    with cache.lock(key(n).digest) as held:
        assert held
        assert cache.write(key(n), REPORT, code) is not None
    return key(n).digest


def test_an_entry_comes_back_as_it_went_in(cache: ObjectCache) -> None:
    assert cache.read(key().digest) is None
    digest = put(cache, code=b"\x7fELF" * 100)
    entry = cache.read(digest)
    assert entry is not None
    assert entry.report == REPORT
    assert entry.canonical == key().canonical()
    assert entry.kernel == "tests.cache"
    assert entry.object.read_bytes() == b"\x7fELF" * 100
    assert [e.digest for e in cache.entries()] == [digest]
    assert list(cache.folder.glob("objects/.*")) == []


def test_nothing_is_created_before_the_first_write(cache: ObjectCache) -> None:
    assert cache.read(key().digest) is None
    assert cache.entries() == []
    assert cache.clear() == cache.prune() == 0
    assert not cache.folder.exists()


def test_a_second_write_replaces_the_first(cache: ObjectCache) -> None:
    put(cache, code=b"old")
    entry = cache.read(put(cache, code=b"new!"))
    assert entry is not None
    assert entry.object.read_bytes() == b"new!"


@pytest.mark.parametrize(
    "damage",
    ["truncated", "empty", "flipped", "no object", "no sidecar", "sidecar", "other key", "field"],
)
def test_jc_05_a_damaged_entry_is_set_aside_and_rebuilt(
    damage: str, cache: ObjectCache, caplog: pytest.LogCaptureFixture
) -> None:
    digest = put(cache, code=b"x" * 1000)
    code = cache.folder / "objects" / f"{digest}.o"
    sidecar = code.with_suffix(".json")
    found = json.loads(sidecar.read_text())
    if damage == "truncated":
        code.write_bytes(code.read_bytes()[:500])
    elif damage == "empty":
        code.write_bytes(b"")
    elif damage == "flipped":
        code.write_bytes(b"y" + code.read_bytes()[1:])
    elif damage == "no object":
        code.unlink()
    elif damage == "no sidecar":
        sidecar.unlink()
    elif damage == "sidecar":
        sidecar.write_text(sidecar.read_text()[:-20])
    elif damage == "other key":
        found["key"]["fields"]["n"] = ["int", "1"]
        sidecar.write_text(json.dumps(found))
    else:
        del found["report"]["registers"]
        sidecar.write_text(json.dumps(found))

    assert cache.read(digest) is None
    with caplog.at_level(logging.WARNING, "epicute.jit"):
        put(cache, code=b"rebuilt")
    entry = cache.read(digest)
    assert entry is not None
    assert entry.object.read_bytes() == b"rebuilt"
    assert any(path.name.endswith((".o", ".json")) for path in cache.folder.glob("quarantine/*"))
    assert "damaged" in caplog.text


def test_reading_alone_never_moves_an_entry(cache: ObjectCache) -> None:
    # A writer replaces object and sidecar one after the other; a reader may come between.
    digest = put(cache)
    code = cache.folder / "objects" / f"{digest}.o"
    code.write_bytes(b"half of an update")
    assert cache.read(digest) is None
    assert code.exists()
    assert not (cache.folder / "quarantine").exists()


def test_jc_08_the_folder_is_private_whatever_the_umask(cache: ObjectCache) -> None:
    before = os.umask(0)
    try:
        put(cache)
    finally:
        os.umask(before)
    for folder in [cache.folder, *(p for p in cache.folder.iterdir() if p.is_dir())]:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722, 0o1777])
def test_jc_08_a_folder_others_can_write_to_is_bypassed_with_one_warning(
    mode: int, cache: ObjectCache, caplog: pytest.LogCaptureFixture
) -> None:
    digest = put(cache)
    cache.folder.chmod(mode)
    with caplog.at_level(logging.WARNING, "epicute.jit"):
        for _ in range(3):
            assert cache.read(digest) is None
            with cache.lock(digest) as held:
                assert not held
    assert len(caplog.records) == 1
    assert "chmod go-w" in caplog.text
    assert cache.entries() == []
    with pytest.raises(CacheError, match="chmod go-w"):
        cache.clear()
    cache.folder.chmod(0o755)
    assert cache.read(digest) is not None


@pytest.mark.skipif(not ROOT_USER, reason="only root can give a folder to another user")
def test_jc_08_a_foreign_folder_is_bypassed_and_one_of_root_is_not(cache: ObjectCache) -> None:
    digest = put(cache)
    os.chown(cache.folder, 12345, 12345)
    assert "belongs to user 12345" in (cache.unusable() or "")
    assert cache.read(digest) is None
    os.chown(cache.folder, 0, 0)
    assert cache.read(digest) is not None


def test_jc_08_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "not a folder" in (ObjectCache(tmp_path / "file").unusable() or "")
    cache = ObjectCache(tmp_path / "file" / "cache")
    assert cache.read(key().digest) is None
    with cache.lock(key().digest) as held:
        assert not held


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES])
def test_jc_07_a_full_disk_leaves_memory_and_one_warning(
    code: int,
    cache: ObjectCache,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    put(cache, 1)
    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING, "epicute.jit"):
        for n in (2, 3):
            with cache.lock(key(n).digest) as held:
                assert held
                assert cache.write(key(n), REPORT, b"code") is None
    assert len(caplog.records) == 1
    assert os.strerror(code) in caplog.text
    assert list(cache.folder.glob("objects/.*")) == []
    assert cache.read(key(1).digest) is not None


READ_ONLY = """
import fcntl, logging, os, sys
from tests.jit.test_cache import key
from epicute.jit import ObjectCache
logging.basicConfig(level="WARNING", stream=sys.stdout)
here, absent = key(0).digest, key(1).digest
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
cache = ObjectCache(sys.argv[1])
print("read", cache.read(here) is not None, cache.read(absent) is None)
for _ in range(2):
    with cache.lock(absent) as held:
        print("held", held)
print("entries", len(cache.entries()), "pruned", cache.prune(max_age=0.0))
"""


def test_jc_07_a_read_only_cache_with_the_artefacts_serves_them(tmp_path: Path) -> None:
    # As in a container image: written by root, used by somebody who cannot write.
    cache = ObjectCache(tmp_path / "cache")
    put(cache)
    for path in [*cache.folder.rglob("*"), cache.folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    for folder in [tmp_path, *tmp_path.parents] if ROOT_USER else []:
        if folder.stat().st_uid == 0 and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    out = finish(start(READ_ONLY, str(cache.folder), folder=tmp_path))
    cache.folder.chmod(0o700)
    assert "read True True" in out
    assert out.count("held False") == 2
    assert out.count("WARNING") == 1
    assert "cannot be written to" in out
    assert "entries 1 pruned 0" in out


def test_jc_07_where_the_folder_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EPICUTE_CACHE_DIR", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_folder() == tmp_path / "named"
    monkeypatch.delenv("EPICUTE_CACHE_DIR")
    assert default_folder() == tmp_path / "xdg" / "epicute" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert default_folder() == tmp_path / "home" / ".cache" / "epicute" / "kernels"
    assert not (tmp_path / "home").exists()


def test_jc_07_no_home_at_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("EPICUTE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    cache = ObjectCache()
    assert cache.folder is None
    with caplog.at_level(logging.WARNING, "epicute.jit"):
        assert cache.read(key().digest) is None
        with cache.lock(key().digest) as held:
            assert not held
    assert len(caplog.records) == 1
    assert "EPICUTE_CACHE_DIR" in caplog.text
    assert cache.entries() == []
    with pytest.raises(CacheError):
        cache.clear()


def test_the_least_recently_used_go_first(cache: ObjectCache) -> None:
    for n in range(4):
        put(cache, n, bytes(10_000))
    now = time.time()
    for n, age in enumerate((400, 300, 200, 100)):
        os.utime(cache.folder / "objects" / f"{key(n).digest}.o", (now - age, now - age))
    assert cache.read(key(0).digest) is not None  # used, and thus the youngest
    cache.limit_bytes = 35_000
    assert cache.prune() == 2
    assert {e.digest for e in cache.entries()} == {key(0).digest, key(3).digest}
    assert not (cache.folder / "locks" / key(1).digest).exists()


def test_a_write_prunes_others_but_never_itself(cache: ObjectCache) -> None:
    cache.limit_bytes = 15_000
    put(cache, 0, bytes(10_000))
    put(cache, 1, bytes(10_000))
    assert [e.digest for e in cache.entries()] == [key(1).digest]
    put(cache, 2, bytes(100_000))
    assert [e.digest for e in cache.entries()] == [key(2).digest]


def test_age_and_leftovers(cache: ObjectCache) -> None:
    put(cache, 0)
    put(cache, 1)
    old = time.time() - 10 * 24 * 3600
    os.utime(cache.folder / "objects" / f"{key(0).digest}.o", (old, old))
    left = cache.folder / "objects" / f".{key(5).digest}.o.1-ab"
    fresh = cache.folder / "objects" / f".{key(6).digest}.o.1-ab"
    left.write_bytes(b"half")
    fresh.write_bytes(b"half")
    os.utime(left, (old, old))
    assert cache.prune(max_age=24 * 3600) == 1
    assert [e.digest for e in cache.entries()] == [key(1).digest]
    assert not left.exists()
    assert fresh.exists()  # a writer may be at it


def test_what_is_being_compiled_is_not_removed(cache: ObjectCache) -> None:
    put(cache, 0)
    put(cache, 1)
    with cache.lock(key(0).digest) as held:
        assert held
        assert cache.clear() == 1
        assert [e.digest for e in cache.entries()] == [key(0).digest]
    assert cache.clear() == 1
    assert cache.entries() == []


def test_a_lock_is_held_once_and_falls_in_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with try_hold(path) as first, try_hold(path) as second:
        assert (first, second) == (True, False)
        start_time = time.monotonic()
        with hold(path, 0.2) as third:
            assert not third
        assert 0.2 <= time.monotonic() - start_time < 5
    with hold(path, 0.2) as again:
        assert again


def test_a_lock_whose_file_was_removed_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A pruner may remove the file between its opening and its locking by another.
    path = tmp_path / "lock"
    take = lock._take
    pruned = []

    def prune_first(handle: int) -> bool:
        if not pruned:
            pruned.append(path.unlink())
        return take(handle)

    monkeypatch.setattr(lock, "_take", prune_first)
    with try_hold(path) as first, try_hold(path) as second:
        assert (first, second) == (False, True)


HOLDER = """
import sys, time
from epicute.jit import ObjectCache
with ObjectCache(sys.argv[1]).lock(sys.argv[2]) as held:
    print("held", held, flush=True)
    time.sleep(600)
"""


def test_jc_05_the_lock_of_a_killed_process_falls(cache: ObjectCache, tmp_path: Path) -> None:
    holder = start(HOLDER, str(cache.folder), key().digest, folder=tmp_path)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held True\n"
    with try_hold(cache.folder / "locks" / key().digest) as held:
        assert not held
    holder.kill()
    holder.communicate()
    begun = time.monotonic()
    put(cache)
    assert time.monotonic() - begun < 10
