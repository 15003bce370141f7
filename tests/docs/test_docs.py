"""README and docs are true: their code runs and prints what they say, their links and names exist.

A ``python`` block runs after the blocks before it on its page, from a file, as a reader's would. A ``text`` block right
behind it is what it prints, with … for anything.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import itertools
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import epicute
from epicute import cli

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
TEXT = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
COMPILES = re.compile(r"\b(explain|plan|compile|precompile)\(")
TICKED = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block: language, content, line of its first line, and where it ends in the page."""

    language: str
    content: str
    line: int
    start: int
    end: int


def blocks(text: str) -> list[Block]:
    """All fenced blocks of a page."""
    return [
        Block(f[1], f[2], text.count("\n", 0, f.start(2)) + 1, f.start(), f.end())
        for f in FENCE.finditer(text)
    ]


def programs(text: str) -> Iterator[tuple[Block, str | None]]:
    """Every python block, with what it must print where the page says so."""
    found = blocks(text)
    for block, after in itertools.zip_longest(found, found[1:]):
        if block.language == "python":
            shown = after and after.language == "text" and not text[block.end : after.start].strip()
            yield block, after.content if shown else None


def prints(expected: str, got: str) -> bool:
    """Whether ``got`` is ``expected``, in which … stands for anything."""
    parts = [re.escape(part) for part in expected.strip().split("…")]
    trimmed = "\n".join(line.rstrip() for line in got.strip().splitlines())
    return re.fullmatch(".*".join(parts), trimmed, re.DOTALL) is not None


def run_page(text: str, path: Path) -> None:
    """Run a page's blocks in order; ``path`` becomes their file, with the page's line numbers."""
    lines = [""] * (text.count("\n") + 1)
    for block, _ in programs(text):
        content = block.content.splitlines()
        lines[block.line - 1 : block.line - 1 + len(content)] = content
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    try:
        for block, expected in programs(text):
            source = "\n" * (block.line - 1) + block.content
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                code = compile(source, str(path), "exec", dont_inherit=True)
                exec(code, module.__dict__)
            printed = output.getvalue()
            assert expected is None or prints(expected, printed), (
                f"line {block.line} prints\n{printed}\ninstead of\n{expected}"
            )
    finally:
        del sys.modules[path.stem]


def with_code() -> list[object]:
    """Pages with code, marked where it compiles kernels."""
    found = []
    for page in PAGES:
        if any(True for _ in programs(TEXT[page])):
            compiles = any(COMPILES.search(block.content) for block, _ in programs(TEXT[page]))
            found.append(pytest.param(page, marks=[pytest.mark.compile] if compiles else []))
    return found


@pytest.mark.parametrize("page", with_code())
def test_code_runs_and_prints_what_the_page_shows(page: str, tmp_path: Path) -> None:
    name = "page_" + re.sub(r"\W", "_", page.removesuffix(".md"))
    run_page(TEXT[page], tmp_path / f"{name}.py")


def test_the_readme_example_has_fifteen_lines() -> None:
    example, _ = next(programs(TEXT["README.md"]))
    assert len([line for line in example.content.splitlines() if line]) <= 15


@pytest.mark.parametrize(
    ("text", "fails"),
    [
        ("```python\nprint(1)\n```\n\n```text\n1\n```\n", None),
        ("```python\nprint('a', 7, 'b')\n```\n\n```text\na … b\n```\n", None),
        ("```python\nx = 1\n```\n\nwords\n\n```python\nprint(x)\n```\n```text\n1\n```\n", None),
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", AssertionError),
        ("```python\nprint(1)\nprint(2)\n```\n\n```text\n1\n```\n", AssertionError),
        ("```python\nx\n```\n", NameError),
    ],
)
def test_the_runner_itself(text: str, fails: type[Exception] | None, tmp_path: Path) -> None:
    with pytest.raises(fails) if fails else contextlib.nullcontext():
        run_page(text, tmp_path / "page_of_a_test.py")


# --- links and names ---


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings."""
    prose = FENCE.sub("", text)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in HEADING.findall(prose)}


def broken(page: str) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for link in LINK.findall(FENCE.sub("", TEXT[page])):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        there = target.exists()
        if anchor and there:
            there = anchor in anchors(target.read_text(encoding="utf-8"))
        if not there:
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page: str) -> None:
    assert broken(page) == []


def test_every_page_is_reachable() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = {f"docs/{path}" for path in re.findall(r"[\w/-]+\.md", navigation)}
    assert named == set(PAGES) - {"README.md"}


def test_modules_named_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`(epicute(?:\.\w+)+)`", TEXT[page]):
            parts = name.split(".")
            found: object = epicute
            for i, part in enumerate(parts[1:], 2):
                if not hasattr(found, part):
                    importlib.import_module(".".join(parts[:i]))
                found = getattr(found, part)


def test_status_names_only_what_exists() -> None:
    (table,) = re.findall(
        r"<!-- generated: status -->(.*?)<!-- end -->", TEXT["README.md"], re.DOTALL
    )
    modules = re.findall(r"`(epicute[.\w]*)`", table)
    assert modules
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_environment_variables_named_exist() -> None:
    source = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "src").rglob("*.py"))
    named = {name for page in PAGES for name in re.findall(r"EPICUTE_[A-Z_]+", TEXT[page])}
    assert {name for name in named if name not in source} == set()


def commands(program: str) -> list[list[str]]:
    """Words of every shell line of a page that calls ``program``."""
    lines = [
        line.partition(" #")[0].strip()
        for page in PAGES
        for block in blocks(TEXT[page])
        if block.language == "sh"
        for line in block.content.splitlines()
    ]
    return [shlex.split(line)[len(program.split()) :] for line in lines if line.startswith(program)]


def test_commands_of_epicute_parse() -> None:
    found = commands("epicute ")
    assert {words[0] for words in found} == set(cli.VERBS)
    for words in found:
        cli._parser(words[0]).parse_args(words)


def test_commands_of_benchmarks_parse() -> None:
    from benchmarks import __main__ as measuring

    found = commands("python -m benchmarks ")
    assert found
    for words in found:
        tables = measuring.parse(words).tables
        assert tables == words[: len(tables)]
        assert tables
    for room in ("plots", "gpu_tests", "roofline", "readme"):
        command = f"python -m benchmarks.{room}"
        assert commands(command)
        assert importlib.util.find_spec(command.split()[-1]) is not None


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    inline = {w for page in PAGES for w in re.findall(r"`make ([\w-]+)`", TEXT[page])}
    named = inline | {words[0] for words in commands("make ")}
    assert named
    assert {name for name in named if not re.search(rf"^{name}:", makefile, re.MULTILINE)} == set()


# --- tables that repeat what the code says ---


def rows(page: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading."""
    section = TEXT[page].split(f"## {heading}\n", 1)[1]
    table = re.search(r"^\|.*?\n\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE)
    assert table is not None
    return [[c.strip() for c in line.strip("|").split("|")] for line in table[1].splitlines()]


def test_table_of_policies() -> None:
    import torch

    names = vars(epicute) | {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
    seen = set()
    for expression, _, reads, writes in rows("docs/compose.md", "Policies"):
        policy = eval(expression.strip("`"), dict(names))
        seen.add(policy.title)
        kinds = policy.operands
        assert set(TICKED.findall(reads)) == {n for n, k in kinds.items() if not k.written}
        assert set(TICKED.findall(writes)) == {n for n, k in kinds.items() if k.written}
    concrete = {
        n
        for n in epicute.epilogues.__all__
        if isinstance(found := getattr(epicute, n), type)
        and issubclass(found, epicute.Policy)
        and found.__module__ != "epicute.epilogues.policy"
    }
    assert seen == concrete


def test_table_of_operand_kinds() -> None:
    named = {TICKED.findall(cells[0])[0] for cells in rows("docs/compose.md", "Operands")}
    kinds = {
        n
        for n in epicute.epilogues.__all__
        if isinstance(found := getattr(epicute, n), type) and issubclass(found, epicute.Operand)
    }
    assert named == kinds - {"Operand"}


def test_operations_of_a_body_are_all_named() -> None:
    from epicute.epilogues.values import OPERATIONS

    operators = {"add", "sub", "mul", "div", "neg", "abs", "lt", "le", "gt", "ge", "eq", "ne"}
    operators |= {"logical_and", "logical_or", "logical_not"}
    section = TEXT["docs/write-a-policy.md"].split("## What a body may use", 1)[1]
    section = section.split("\n## ", 1)[0]
    missing = {n for n in OPERATIONS if n not in operators and not re.search(rf"\b{n}\b", section)}
    assert missing == set()


def test_table_of_errors() -> None:
    from epicute import errors

    for name, base, _ in rows("docs/errors.md", "Classes"):
        found = getattr(errors, name.strip("`"))
        assert any(b.__name__ == base.strip("`") for b in found.__mro__)
    named = {cells[0].strip("`") for cells in rows("docs/errors.md", "Classes")}
    assert named == set(errors.__all__) - {"EpicuteError", "require"}


def test_messages_quoted_are_in_the_source() -> None:
    source = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "src").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    for cells in rows("docs/errors.md", "Often met"):
        for part in re.split(r"…|\[|\]|\{|\}", TICKED.findall(cells[0])[0]):
            words = part.strip(" ,:")
            assert len(words) < 12 or words in joined, words


# --- the site ---


def test_site_builds_and_holds_every_public_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        room = f"epicute.{page.stem}"
        html = (tmp_path / "api" / page.stem / "index.html").read_text(encoding="utf-8")
        ids = set(re.findall(r'id="(epicute\.[\w.]+)"', html))
        public = importlib.import_module(room)
        names = [name for name in public.__all__ if callable(getattr(public, name))]
        missing = [
            n for n in names if not any(i.startswith(room) and i.endswith(f".{n}") for i in ids)
        ]
        assert missing == [], room
