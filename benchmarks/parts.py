"""What the package is made of: the lines of the status table, and what is not there yet."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PARTS", "PLANNED", "Part"]


@dataclass(frozen=True)
class Part:
    """One line of the status table.

    Attributes:
        says: what it is.
        modules: where it lives.
        needs: what it needs to do its work: ``CPU``, ``Linux`` (compiles, no GPU) or ``sm_90a``.
        tests: folders or files whose GPU tests cover it; none where no GPU is involved.
    """

    says: str
    modules: tuple[str, ...]
    needs: str
    tests: tuple[str, ...] = ()


POLICY_TESTS = ("tests/gemm/test_gpu_policies.py", "tests/gemm/test_gpu_kv.py", "tests/epilogues")
ROW_TESTS = (
    "tests/quant/test_gpu_roll.py",
    "tests/quant/test_gpu_rowwise.py",
    "tests/models/test_gpu_embedding.py",
    "tests/models/test_gpu_final_norm.py",
)

PARTS = (
    Part("Compose, draw and evaluate epilogues", ("epicute.epilogues",), "CPU"),
    Part("Float64 references, property tests", ("epicute.testing",), "CPU", ("tests/testing",)),
    Part(
        "Weights in BF16, FP16, FP8 E4M3: quantise, pack, save, load", ("epicute.weights",), "CPU"
    ),
    Part(
        "INT4 weights: rounding to nearest, GPTQ, checkpoints of others",
        ("epicute.quant", "epicute.weights"),
        "CPU",
        ("tests/quant/test_int4_cuda.py",),
    ),
    Part("Paged KV caches of a model, BF16, FP16 and FP8", ("epicute.kv",), "CPU"),
    Part(
        "INT4 and QK4PV8 (NVFP4 keys) caches as formats: quantise, place, read",
        ("epicute.kv", "epicute.quant"),
        "CPU",
        ("tests/kv/test_formats_cuda.py",),
    ),
    Part("Compile, report, cache", ("epicute.jit",), "Linux", ("tests/jit",)),
    Part(
        "FP8 casts and delayed scales", ("epicute.quant",), "CPU", ("tests/quant/test_fp8_cuda.py",)
    ),
    Part(
        "Kernels of rows: roll, row-wise FP8, embedding, final norm",
        ("epicute.quant", "epicute.models"),
        "sm_90a",
        ROW_TESTS,
    ),
    Part("GEMM for any M, N, K", ("epicute.gemm",), "sm_90a", ("tests/gemm",)),
    Part(
        "All policies inside the GEMM, yours included",
        ("epicute.epilogues",),
        "sm_90a",
        POLICY_TESTS,
    ),
    Part(
        "Prefill attention: packed or padded, paged or dense, 16-bit or FP8 K and V",
        ("epicute.attention",),
        "sm_90a",
        ("tests/attention",),
    ),
    Part(
        "Few-row projections: INT4, FP8 and 16-bit weights, composed epilogues",
        ("epicute.decode",),
        "sm_90a",
        ("tests/decode",),
    ),
    Part(
        "Attention over INT4 and QK4PV8 caches, decode over all, and what writes these",
        ("epicute.attention", "epicute.kv"),
        "sm_90a",
        (
            "tests/attention/test_decode_gpu.py",
            "tests/attention/test_gpu_mixed_decode.py",
            "tests/attention/test_mixed_gpu.py",
            "tests/kv/test_gpu_qk4pv8_write.py",
        ),
    ),
    Part(
        "Prefill of a layer in five kernels, BF16 or FP8",
        ("epicute.models",),
        "sm_90a",
        ("tests/models/test_gpu_prefill.py",),
    ),
    Part(
        "Decode of a layer in five kernels: BF16, FP8, INT4 weights over BF16, FP8, INT4, QK4PV8 caches",
        ("epicute.models",),
        "sm_90a",
        ("tests/models/test_gpu_decode.py",),
    ),
    Part(
        "Llama, Mistral, Qwen2, Qwen3 from a Hugging Face folder, FP8 and INT4 ones too: by float64 references",
        ("epicute.models",),
        "CPU",
    ),
    Part(
        "The same models on a GPU: prefill, and steps from token to token in one graph",
        ("epicute.models",),
        "sm_90a",
        (
            "tests/models/test_gpu_llama.py",
            "tests/models/test_gpu_decode_model.py",
            "tests/models/test_gpu_decode_mirror.py",
            "tests/models/test_gpu_perplexity.py",
        ),
    ),
    Part(
        "The same on a CPU over INT4 and QK4PV8 caches, smoothed or not",
        ("epicute.models",),
        "CPU",
    ),
    Part("Command line, demo on SmolLM2-135M", ("epicute.cli", "epicute.models"), "Linux"),
)

PLANNED = (
    "sm_100a (Blackwell): a `Target` of that name exists, and GEMM and attention refuse it",
    "SGLang, vLLM and transformers plug-ins",
)
