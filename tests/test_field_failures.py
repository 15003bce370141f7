"""Bugs that users of other frameworks met, and what keeps each of them out of this one.

Every id is held by tests that carry it in their names (``test_ge_05_…``, in any file under ``tests``), or
has its reason here why it cannot occur yet. A reason beside a test is one too many.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

FAILURES = {
    "GE-01": "tiny M rejected by the TMA epilogue",
    "GE-02": "silent errors where M is no multiple of 16",
    "GE-03": "a scale vector read past its end on the ragged M tile",
    "GE-04": "the FP8 tensor-core accumulator is not full FP32",
    "GE-05": "one scale for the shards of a fused projection",
    "GE-06": "a bias added twice, or never",
    "GE-07": "a model without bias picks up an uninitialised one",
    "GE-08": "SwiGLU with an FP8 store fails to compile",
    "GE-09": "a per-row scale silently wrong for 64-row tiles",
    "GE-10": "Gemma's gain (1 + w) added in low precision",
    "GE-11": "a norm weight of another dtype gives NaN",
    "GE-12": "two roundings on the way to FP8",
    "GE-13": "results change with where intermediates are rounded",
    "GE-14": "a missing wait under programmatic dependent launch",
    "GE-16": "strided input or output taken for contiguous",
    "GE-17": "fused SwiGLU ignores clamp and alpha",
    "GE-18": "faults just above 2^31 elements",
    "KV-01": "rotary_dim not passed to the fused kernel",
    "KV-02": "only the first head of a warp's chunk is right",
    "KV-03": "the pairing of channels hard-coded",
    "KV-05": "YaRN's magnitude applied twice, or dropped",
    "KV-06": "Llama-3 frequency bands ignored, or wrong at the edges",
    "KV-07": "cosines and sines in half precision",
    "KV-08": "a position outside the table",
    "KV-09": "rotated K stored but not returned, or its tail not copied",
    "KV-10": "slot -1 taken for an index",
    "KV-11": "fewer slots than padded rows",
    "KV-12": "a strided cache view taken for dense",
    "KV-13": "a packed scatter uses the source row's offset",
    "KV-14": "32-bit page offsets",
    "KV-16": "the DSL itself computes offsets in 32 bits",
    "KV-17": "QK-norm lost, or after the rotation",
    "KV-18": "chunked prefill counts the offset twice",
    "DF-01": "a tiny amax makes an infinite scale",
    "DF-02": "an all-zero tensor becomes NaN",
    "DF-03": "NaN swallowed by the amax reduction",
    "DF-04": "history rolled for sites that did not run",
    "DF-06": "a scale frozen on warm-up traffic, or changed under existing data",
    "DF-07": "weights reloaded, amax not",
    "DF-08": "a saved state restores the scale and not its inverse",
    "DF-09": "overflow becomes NaN instead of saturating",
    "DF-10": "scale and inverse scale mixed up",
    "JC-01": "a cached kernel loaded for the wrong call in another process",
    "JC-03": "a constant reduced to a flag in the key",
    "JC-04": "the same kernel compiled again and again",
    "JC-05": "processes see half-written artifacts, or all compile",
    "JC-06": "two DSL versions share one cache",
    "JC-07": "needs a writable home",
    "JC-08": "a shared, world-writable cache of code",
    "JC-09": "Python and platform matrix of the DSL's wheel",
    "JC-10": "fails where the source is not on disk",
    "JC-11": "an import changes another library",
    "JC-12": "launch on the wrong GPU, or the device left changed",
    "JC-13": "compile-time failure on huge strides",
    "PP-01": "zero-length requests where no query is longer than one",
    "PP-02": "no keys at all hang or give NaN",
    "PP-03": "an empty request writes -inf over a neighbour's LSE",
    "PP-05": "the causal mask aligned to the wrong corner",
    "PP-06": "rows that see nothing return a finite LSE",
    "PP-07": "a sliding window off by one",
    "PP-08": "shorter than the window, and causality is lost",
    "PP-09": "a prefix hit reads the paged cache as if dense",
    "PP-10": "a tail of one token",
    "PP-11": "packed rows with another stride than dense",
    "PP-12": "requests shorter than a page",
    "PP-13": "a soft-cap accepted and ignored",
    "IW-01": "a race in shared memory corrupts the product",
    "IW-02": "split-K adds to an output that nobody zeroed",
    "IW-03": "zero points stored as z or as z - 1",
    "IW-04": "zero point 0 wraps to 15",
    "IW-06": "right for groups of 128 alone",
    "IW-07": "K no multiple of the group",
    "IW-08": "the declared group disagrees with the scales",
    "IW-09": "activation order ignored",
    "IW-10": "float16 accumulation overflows",
    "IW-11": "results change with the batch",
    "KD-01": "NaN in unused cache slots reaches the output",
    "KD-02": "padding lanes counted in the softmax",
    "KD-03": "a chosen split count gives sporadic NaN",
    "KD-04": "a context shorter than a split",
    "KD-05": "the combination folds all requests into one",
    "KD-06": "the combination walks with the wrong stride",
    "KD-08": "head ratios other than the usual ones",
    "KD-09": "a flag for packed heads without their layout",
    "KD-10": "a sink counted twice, never, or unscaled",
    "KD-11": "a page size other than the tile",
    "KD-13": "constant vectors break the scale",
    "KD-14": "a Hadamard matrix of the wrong size",
    "KD-15": "the rotation applied to one side alone",
    "KD-16": "an FP8 cache loses accuracy with long contexts",
    "KD-17": "an answer depends on batch mates",
    "KD-18": "cache scales not validated",
    "QK-02": "a channel of zeros in V turns to NaN",
    "QK-03": "a block of zeros writes a NaN scale",
    "QK-04": "blocks above the largest scale clipped",
    "QK-05": "scale rows of another pitch",
    "QK-06": "smoothing not seen in the LSE",
    "QK-07": "means and changing sets of keys",
    "QK-08": "few keys give NaN",
    "QK-09": "noise above 160 K tokens",
    "QK-10": "an unserved head dimension, silently wrong",
    "QK-11": "smoothing edits the caller's K",
    "QK-12": "perplexity fine, tasks collapse",
    "CG-01": "a kernel goes to a remembered stream, and the graph is empty",
    "CG-02": "compiling or loading during capture",
    "CG-04": "captured with a short context, replayed with a long one",
    "CG-05": "a padded grid runs on schedule entries of nobody",
    "CG-06": "padding rows taken for requests",
    "CG-07": "a workspace keyed by stream",
    "CG-08": "buffers freed after capture",
}

REASONS: dict[str, str] = {}

ID = re.compile(r"(?<![a-z])(ge|kv|df|jc|pp|iw|kd|qk|cg)_(\d\d)(?!\d)")


def held_by_id(folder: Path) -> dict[str, list[str]]:
    """Names of the tests that carry each id."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for room, number in ID.findall(node.name):
                    where = f"{path.relative_to(folder).as_posix()}::{node.name}"
                    found.setdefault(f"{room}-{number}".upper(), []).append(where)
    return found


HELD = held_by_id(Path(__file__).parent)


@pytest.mark.parametrize("failure", FAILURES)
def test_every_failure_is_held_or_has_its_reason(failure: str) -> None:
    title, tests, reason = FAILURES[failure], HELD.get(failure), REASONS.get(failure)
    assert tests or reason, f"{failure}, {title}: no test carries the id"
    assert not (tests and reason), f"{failure}: held by {tests}, so that its reason is out of date"


def test_no_test_carries_an_unknown_id() -> None:
    assert set(HELD) <= set(FAILURES)
    assert set(REASONS) <= set(FAILURES)


def test_the_scan_itself(tmp_path: Path) -> None:
    text = "class A:\n    def test_ge_05_x(self): ...\ndef test_jc_07_jc_10_y(): ...\ndef ge_06(): ...\n"
    (tmp_path / "test_x.py").write_text(text)
    (tmp_path / "helper.py").write_text("def test_kv_01(): ...\n")
    assert held_by_id(tmp_path) == {
        "GE-05": ["test_x.py::test_ge_05_x"],
        "JC-07": ["test_x.py::test_jc_07_jc_10_y"],
        "JC-10": ["test_x.py::test_jc_07_jc_10_y"],
    }
