"""``epicute cache``: listing and clearing."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from epicute.cli import main
from epicute.jit import CompileKey, ObjectCache, Report, Target

LONG = "RowScale >> Columns(q: RoPE >> Store, k: RoPE >> PlaceKV, v: PlaceKV) and more"


@dataclass(frozen=True)
class Deep:
    inner: tuple[int, ...] = (1,)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EPICUTE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def put(name: str, days: float = 0.0, **fields: object) -> None:
    cache = ObjectCache()
    key = CompileKey(name, fields, Target("sm_90a"))
    with cache.lock(key.digest) as held:
        assert held
        entry = cache.write(key, Report(168, 4, 8, 1024, (), 1.0, ""), bytes(20_000))
    assert entry is not None
    used = time.time() - days * 86400
    os.utime(entry.object, (used, used))


def test_list_shows_a_row_per_kernel(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(
        "gemm",
        n=4096,
        dtype=torch.bfloat16,
        tile=(128, 256),
        scale=0.5,
        composition=Deep(),
        epilogue=LONG,
    )
    put("other", days=3, flag=True)
    assert main(["cache", "list"]) == 0
    header, first, second, blank, total = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "epilogue",
        "kernel",
        "arch",
        "fields",
        "size",
        "used",
        "registers",
        "spills",
    ]
    assert first.startswith(f"{LONG}  gemm ")
    assert second.startswith("-  ")
    assert "dtype=bfloat16 n=4096 scale=0.5 tile=128x256 …" in first
    assert "sm_90a" in first
    assert first.split()[-6:] == ["0", "s", "ago", "168", "12", "B"]
    assert "flag=True" in second
    assert "3 d ago" in second
    assert blank == ""
    assert total.startswith("2 kernels, 4")
    assert total.endswith(f"in {folder}")


@pytest.mark.parametrize("columns", [80, 100, 120, 200, 400])
def test_a_terminal_gets_what_fits(
    columns: int,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put("gemm", epilogue=LONG, text="x" * 200)
    put("attention.prefill", days=3, epilogue="Store", n=4096)
    assert main(["cache", "list"]) == 0
    assert "x" * 200 in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["cache", "list"]) == 0
    *lines, _, _ = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[1].startswith(LONG[:15])
    assert ("fields" in lines[0]) == (columns > 100)
    assert (LONG in lines[1]) == (columns == 400)
    assert ("x" * 200 in lines[1]) == (columns == 400)


def test_json_has_everything(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"n": 4096, "tile": (128, 256), "on": True, "off": False, "scale": 0.5, "no": None}
    put("gemm", epilogue=LONG, dtype=torch.float16, deep=Deep(), **fields)
    put("other", days=3)
    assert main(["cache", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["folder"] == str(folder)
    first, second = found["kernels"]
    assert first["epilogue"] == LONG
    deep = first["fields"].pop("deep")
    assert first["fields"] == {
        **fields,
        "tile": [128, 256],
        "epilogue": LONG,
        "dtype": "float16",
    }
    assert "inner" in str(deep)
    assert Report.from_json(first["report"]).registers == 168
    assert Path(first["object"]).is_file()
    assert first["size"] > 20_000
    assert second["epilogue"] is None
    folder.chmod(0o777)
    assert main(["cache", "list", "--json"]) == 1
    assert "chmod go-w" in capsys.readouterr().err


def test_an_empty_or_missing_folder_lists_nothing_and_is_not_made(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "list"]) == 0
    assert capsys.readouterr().out == f"0 kernels, 0 kB in {folder}\n"
    assert main(["cache", "clear"]) == 0
    assert not folder.exists()


def test_clear_removes_all_or_the_unused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put("new")
    put("old", days=40)
    assert main(["cache", "clear", "--unused-for", "30"]) == 0
    assert capsys.readouterr().out.startswith("1 kernel removed")
    assert [entry.kernel for entry in ObjectCache().entries()] == ["new"]
    assert main(["cache", "clear"]) == 0
    assert ObjectCache().entries() == []
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_a_folder_that_is_not_trusted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put("gemm")
    folder.chmod(0o777)
    assert main(["cache", "list"]) == 1
    assert "chmod go-w" in capsys.readouterr().out
    assert main(["cache", "clear"]) == 1
    assert "chmod go-w" in capsys.readouterr().err


def test_an_action_is_needed(folder: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["cache"])
    assert caught.value.code == 2
