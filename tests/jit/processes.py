"""Other Python processes, as users have them: of one cache, or of none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def start(
    script: str | Path,
    *arguments: str,
    folder: Path,
    **variables: str | None,
) -> subprocess.Popen[str]:
    """Start Python on a file, or on code given with -c, in ``folder``; a variable None is unset."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    for name, value in variables.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    code = [str(script)] if isinstance(script, Path) else ["-c", script]
    return subprocess.Popen(
        [sys.executable, *code, *arguments],
        cwd=folder,
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[str], seconds: float = 120.0) -> str:
    """Standard output of a process that must end well."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, err
    return out
