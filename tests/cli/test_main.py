"""The command itself: verbs, errors, exit statuses."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from epicute import cli
from epicute.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[2]


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    for verb in cli.VERBS:
        assert re.search(rf"^ +{verb} +\S", said, re.MULTILINE), verb


def test_without_a_verb_it_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "doctor" in capsys.readouterr().out


def test_an_unknown_verb_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["mend"])
    assert caught.value.code == 2
    assert "mend" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("epicute ")


def test_a_verb_whose_module_is_missing_is_not_offered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = importlib.util.find_spec

    def without_demo(name: str, *package: Any) -> Any:
        return None if name == "epicute.cli.demo" else known(name, *package)

    monkeypatch.setattr(importlib.util, "find_spec", without_demo)
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert not re.search(r"^ +demo", capsys.readouterr().out, re.MULTILINE)


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A verb that takes ``--loud`` and does what its ``run`` is set to."""
    module: Any = ModuleType("epicute.cli.stub")
    module.__spec__ = SimpleNamespace()
    module.add_arguments = lambda parser: parser.add_argument("--loud", action="store_true")
    module.run = lambda args: 3 if args.loud else 0
    monkeypatch.setitem(sys.modules, "epicute.cli.stub", module)
    monkeypatch.setitem(cli.VERBS, "stub", "does as told")
    return module


def test_options_and_status_are_the_verbs_own(verb: Any) -> None:
    assert cli.main(["stub"]) == 0
    assert cli.main(["stub", "--loud"]) == 3
    with pytest.raises(SystemExit):
        cli.main(["stub", "--quiet"])


def test_a_known_error_is_one_line_and_an_unknown_one_is_a_traceback(
    verb: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: Any) -> int:
        raise ArgumentError("n: got 0, expected more. Fix: give more")

    def interrupted(_: Any) -> int:
        raise KeyboardInterrupt

    def bug(_: Any) -> int:
        raise ZeroDivisionError

    verb.run = refuse
    assert cli.main(["stub"]) == 1
    assert capsys.readouterr().err == "epicute stub: n: got 0, expected more. Fix: give more\n"
    verb.run = interrupted
    assert cli.main(["stub"]) == 130
    verb.run = bug
    with pytest.raises(ZeroDivisionError):
        cli.main(["stub"])


def test_only_the_chosen_verbs_module_is_imported() -> None:
    script = (
        "import sys\nfrom epicute import cli\n"
        "try:\n    cli.main(['cache', '--help'])\nexcept SystemExit:\n    pass\n"
        "names = [n for n in sys.modules if n.startswith('epicute.cli.') or n == 'cutlass']\n"
        "print('imported', sorted(names))\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "imported ['epicute.cli.cache', 'epicute.cli.text']" in out


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom epicute import cli\nfrom epicute.cli import cache\n"
        "cache.run = lambda args: print('x' * 1_000_000) or 0\n"
        "sys.exit(cli.main(['cache', 'list']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "EPICUTE_CACHE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait() == 1
