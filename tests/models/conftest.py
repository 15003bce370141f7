"""What GPU tests of models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def finished(request: pytest.FixtureRequest) -> Iterator[None]:
    """A GPU test ends when its kernels do; one that faulted takes the process's context with it."""
    yield
    if not request.node.get_closest_marker("gpu"):
        return
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.exit(f"{request.node.nodeid}: {error}", returncode=3)
