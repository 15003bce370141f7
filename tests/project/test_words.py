"""No tracked text names the machine it was written on, or a package registry's host."""

from __future__ import annotations

import re
from pathlib import Path

# In pieces, so that this file does not hold what it looks for.
FOLDERS = ["/wo" + "rk", "/ro" + "ot", "/op" + "t/wheels", "/op" + "t/pypi", "/tmp/" + "venv"]
HOSTS = ["py" + "pi.org", "python" + "hosted.org", "registry.npm" + "js.org", "deb." + "debian.org"]
WORDS = re.compile(
    r"(?<![\w.-])(?:" + "|".join(FOLDERS) + r")(?![\w-])|" + "|".join(map(re.escape, HOSTS))
)


def found(root: Path, tree: list[Path]) -> list[str]:
    hits = []
    for path in tree:
        if (root / path).is_symlink():
            continue
        content = (root / path).read_bytes()
        if b"\0" in content:
            continue
        for number, line in enumerate(content.decode("utf-8").splitlines(), 1):
            hits += [f"{path}:{number}: {word}" for word in WORDS.findall(line)]
    return hits


def test_no_tracked_text_names_a_machine(root: Path, tree: list[Path]) -> None:
    assert found(root, tree) == []


def test_what_is_looked_for_is_found(tmp_path: Path) -> None:
    bad = "\n".join([*(f"cd {folder}/x" for folder in FOLDERS), *HOSTS])
    (tmp_path / "bad.txt").write_text(bad)
    (tmp_path / "good.txt").write_text("home/wo" + "rk/x, co-wo" + "rkers, /wo" + "rkers\n")
    hits = found(tmp_path, [Path("bad.txt"), Path("good.txt")])
    assert len(hits) == len(FOLDERS) + len(HOSTS)
