"""What importing the package needs and does: no DSL, and nothing to anyone else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Modules that are read only while tracing, and so may import the DSL at their top.
DSL_ONLY = {
    "epicute.attention.sm90.convert": "converts tiles while tracing",
    "epicute.attention.sm90.decode_append": "quantises and stores a new row while tracing",
    "epicute.attention.sm90.decode_codes": "keys as integers while tracing",
    "epicute.attention.sm90.decode_kernel": "a kernel",
    "epicute.attention.sm90.decode_merge": "the merge of parts while tracing",
    "epicute.attention.sm90.decode_operands": "fragments of keys and values while tracing",
    "epicute.attention.sm90.decode_producer": "the loading warps while tracing",
    "epicute.attention.sm90.decode_ptx": "single instructions while tracing",
    "epicute.attention.sm90.decode_references": "references of columns while tracing",
    "epicute.attention.sm90.decode_scribe": "works ahead and behind while tracing",
    "epicute.attention.sm90.decode_steps": "the steps over keys while tracing",
    "epicute.attention.sm90.kernel": "the attention kernel: a class whose methods are traced",
    "epicute.attention.sm90.mixed": "the QK4PV8 kernel: a class whose methods are traced",
    "epicute.attention.sm90.mixed_buffers": "shared memory while tracing",
    "epicute.attention.sm90.mixed_convert": "dequantises keys while tracing",
    "epicute.attention.sm90.mixed_decode": "the QK4PV8 decode kernel",
    "epicute.attention.sm90.mixed_decode_merge": "the merge of parts while tracing",
    "epicute.attention.sm90.mixed_decode_places": "addresses while tracing",
    "epicute.attention.sm90.mixed_decode_producer": "the loading warps while tracing",
    "epicute.attention.sm90.mixed_decode_scribe": "writes a new row while tracing",
    "epicute.attention.sm90.mixed_decode_steps": "the steps over keys while tracing",
    "epicute.attention.sm90.mixed_loads": "the loading warps while tracing",
    "epicute.attention.sm90.mixed_softmax": "a thread's rows while tracing",
    "epicute.attention.sm90.mixed_steps": "the steps over keys while tracing",
    "epicute.attention.sm90.output": "walks an accumulator while tracing",
    "epicute.attention.sm90.scheduler": "the scheduling warp while tracing",
    "epicute.attention.sm90.softmax": "a thread's rows while tracing",
    "epicute.attention.sm90.steps": "the steps over keys while tracing",
    "epicute.attention.sm90.store": "moves rows from registers to memory",
    "epicute.decode.dequantize_kernel": "a kernel: a class whose methods are traced",
    "epicute.decode.sm90.convert": "weights to operands while tracing",
    "epicute.decode.sm90.integer_warpgroup": "activations to integers while tracing",
    "epicute.decode.sm90.integers": "activations to integers while tracing",
    "epicute.decode.sm90.exchange": "sums between the CTAs of a cluster while tracing",
    "epicute.decode.sm90.finish": "the composition on complete sums while tracing",
    "epicute.decode.sm90.finishers": "the warps that finish tiles while tracing",
    "epicute.decode.sm90.kernel": "the few-row kernel: a class whose methods are traced",
    "epicute.decode.sm90.multiply": "the products while tracing",
    "epicute.decode.sm90.produce": "the warp that brings weights and activations while tracing",
    "epicute.decode.sm90.ptx": "single instructions while tracing",
    "epicute.decode.sm90.stage": "activations to shared memory while tracing",
    "epicute.decode.sm90.warpgroup": "the products of warpgroups while tracing",
    "epicute.epilogues.dsl": "the DSL interpreter of policy bodies: registers exist only there",
    "epicute.gemm.driver": "walks an accumulator while tracing",
    "epicute.gemm.kernel": "the mainloop: a class whose methods are traced",
    "epicute.gemm.lanes": "the DSL interpreter's context: one thread's registers",
    "epicute.gemm.loads": "the loading warps while tracing",
    "epicute.gemm.memory": "loads and stores on DSL addresses",
    "epicute.gemm.ring": "moves panels from registers to TMA",
    "epicute.gemm.staging": "fills shared memory while tracing",
    "epicute.gemm.streams": "loads and reads boxes while tracing",
    "epicute.gemm.work": "puts stores off while tracing",
    "epicute.kv.append_kernel": "a kernel",
    "epicute.kv.append_row": "quantises a row while tracing",
    "epicute.kv.qk4pv8_write_arithmetic": "quantises blocks while tracing",
    "epicute.kv.qk4pv8_write_kernel": "a kernel",
    "epicute.kv.qk4pv8_write_means_kernel": "a kernel",
    "epicute.kv.qk4pv8_write_places": "addresses while tracing",
    "epicute.kv.qk4pv8_write_units": "a unit of a page while tracing",
    "epicute.models.embedding_kernel": "a kernel",
    "epicute.models.final_norm_kernel": "a kernel",
    "epicute.quant.dsl": "casts and loads of the row kernels while tracing",
    "epicute.quant.roll_kernel": "a kernel",
    "epicute.quant.rowwise_kernel": "a kernel",
}

# The DSL, and hosts or readers that come with an extra: whoever needs one imports it when used.
OPTIONAL = [
    "cuda",
    "cutlass",
    "gguf",
    "huggingface_hub",
    "lm_eval",
    "matplotlib",
    "sglang",
    "tokenizers",
    "transformers",
    "tvm_ffi",
    "vllm",
]

BLOCKED = """
import importlib, json, sys

class Absent:
    def __init__(self, names):
        self.names = set(names)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"{name} is blocked by this test", name=name)
        return None

names, optional = json.loads(sys.argv[1])
sys.meta_path.insert(0, Absent(optional))
failed = {}
for name in names:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"
print(json.dumps(failed))
"""

# Names of other libraries are followed by identity, settings by value.
UNCHANGED = """
import importlib, json, logging, os, signal, sys, threading, warnings

import numpy, torch

theirs = ["builtins", "logging", "warnings"]
theirs += ["numpy", "torch", "torch.Tensor", "torch.nn.functional"]
if dsl:
    import cutlass, cutlass.cute, cutlass.cute.runtime, tvm_ffi
    theirs += ["cutlass", "cutlass.cute", "cutlass.cute.runtime", "tvm_ffi"]

def space(name):
    return vars(torch.Tensor) if name == "torch.Tensor" else vars(importlib.import_module(name))

def public():
    return {(m, k): v for m in theirs for k, v in space(m).items() if not k.startswith("_")}

def settings():
    loggers = {name: log for name, log in logging.root.manager.loggerDict.items()
               if isinstance(log, logging.Logger) and not name.startswith("epicute")}
    loggers["root"] = logging.root
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "sys.path": list(sys.path),
        "sys.meta_path": list(map(repr, sys.meta_path)),
        "hooks": [sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook],
        "signals": {s.name: repr(signal.getsignal(s)) for s in signal.valid_signals()
                    if isinstance(s, signal.Signals)},
        "logging": {n: [l.level, l.propagate, l.disabled, list(map(repr, l.handlers))]
                    for n, l in loggers.items()},
        "logging.disable": logging.root.manager.disable,
        "warnings": list(map(repr, warnings.filters)),
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "random": torch.get_rng_state().numpy().tobytes(),
        "numpy errors": numpy.geterr(),
        "numpy print": {k: repr(v) for k, v in numpy.get_printoptions().items()},
        "cuda": torch.cuda.is_initialized(),
    }

names_before, settings_before = public(), settings()
for name in modules:
    importlib.import_module(name)
names_after, settings_after = public(), settings()

replaced = [".".join(k) for k, v in names_before.items() if names_after.get(k, None) is not v]
changed = [k for k, v in settings_before.items()
           if k != "logging" and settings_after[k] != v]
changed += [f"logging {k}" for k, v in settings_before["logging"].items()
            if settings_after["logging"].get(k) != v]
print(json.dumps({"replaced": replaced, "changed": changed}))
"""


def fresh(root: Path, script: str, *arguments: str) -> dict[str, object]:
    """Run ``script`` in a new process at the root; the JSON of its last line."""
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def importable(modules: list[str]) -> list[str]:
    """All modules but ``__main__``, whose import is a run."""
    return [name for name in modules if not name.endswith(".__main__")]


def test_every_module_imports_without_the_dsl(root: Path, modules: list[str]) -> None:
    names = [name for name in importable(modules) if name not in DSL_ONLY]
    failed = fresh(root, BLOCKED, json.dumps([names, OPTIONAL]))
    assert failed == {}


def test_dsl_only_modules_earn_their_exception(root: Path, modules: list[str]) -> None:
    names = [name for name in DSL_ONLY if name in modules]
    failed = fresh(root, BLOCKED, json.dumps([names, OPTIONAL]))
    assert sorted(failed) == sorted(names)


def test_the_block_blocks(root: Path) -> None:
    failed = fresh(root, BLOCKED, json.dumps([["json", *OPTIONAL], OPTIONAL]))
    assert sorted(failed) == sorted(OPTIONAL)


def test_import_epicute_brings_no_test_tool(root: Path) -> None:
    script = (
        "import numpy, torch, json, sys; before = set(sys.modules); import epicute; "
        "print(json.dumps({n: n in sys.modules and n not in before for n in TOOLS}))"
    )
    tools = ["hypothesis", "pytest", *OPTIONAL]
    found = fresh(root, f"TOOLS = {tools!r}\n{script}")
    assert [name for name, there in found.items() if there] == []


@pytest.mark.parametrize("dsl", [False, True], ids=["without the DSL", "with the DSL"])
def test_jc_11_import_changes_nothing_of_others(root: Path, modules: list[str], dsl: bool) -> None:
    if dsl and sys.platform != "linux":
        pytest.skip("the DSL exists for Linux alone")
    names = [name for name in importable(modules) if dsl or name not in DSL_ONLY]
    found = fresh(root, f"dsl = {dsl}\nmodules = {names!r}\n{UNCHANGED}")
    assert found == {"replaced": [], "changed": []}


def test_jc_11_would_be_noticed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "rude.py").write_text(
        "import logging, os, sys, torch\n"
        "torch.compile = print\n"
        "os.environ['RUDE'] = '1'\n"
        "sys.excepthook = print\n"
        "logging.getLogger().setLevel(10)\n"
    )
    prelude = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); dsl = False; modules = ['rude']"
    found = fresh(root, f"{prelude}\n{UNCHANGED}")
    assert found["replaced"] == ["torch.compile"]
    assert found["changed"] == ["environment", "hooks", "logging root"]
