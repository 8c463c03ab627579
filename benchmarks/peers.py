"""What others took for the same work on one machine: 2 cores of AMD Zen 5, November 2026, 2 threads, in milliseconds.

vLLM 0.2x (its CPU kernel), OpenVINO (paged attention), zentorch, ONNX Runtime (GroupQueryAttention), FlexAttention
compiled, llama.cpp, and attention written as two torch matmuls. The fastest of them in each case; those that convert
keys and values to fewer bits are left out. torch's own fused kernel is measured, not quoted. Padded rows were given to
kernels for rows of their own lengths, which compute no padded query.
"""

WHERE = "2 cores of AMD EPYC (Zen 5), November 2026"
KIND, THREADS = "zen5", 2

BEST: dict[tuple[str, str], tuple[float, str]] = {
    ("causal, 2,048, d 64", "float32"): (12.2, "vLLM"),
    ("causal, 2,048, d 64", "bfloat16"): (7.9, "OpenVINO"),
    ("dense, 2,048, d 64", "float32"): (23.2, "vLLM"),
    ("dense, 2,048, d 64", "bfloat16"): (13.9, "OpenVINO"),
    ("dense, 4,096, d 128", "float32"): (162, "vLLM"),
    ("dense, 4,096, d 128", "bfloat16"): (101, "zentorch"),
    ("causal, 4,096, d 128", "float32"): (86.7, "vLLM"),
    ("causal, 4,096, d 128", "bfloat16"): (52.6, "OpenVINO"),
    ("causal, 32/8 heads, 2,048, d 128", "float32"): (88, "vLLM"),
    ("causal, 32/8 heads, 2,048, d 128", "bfloat16"): (58.9, "OpenVINO"),
    ("causal, window 512, 4,096, d 64", "float32"): (12.1, "vLLM"),
    ("causal, window 512, 4,096, d 64", "bfloat16"): (28.5, "vLLM"),
    ("causal, window 512, 16,384, d 64", "float32"): (53.9, "vLLM"),
    ("causal, window 512, 16,384, d 64", "bfloat16"): (57.2, "vLLM"),
    ("causal, window 512 + 4 sinks, 4,096, d 64", "float32"): (37, "FlexAttention"),
    ("causal, window 512 + 4 sinks, 4,096, d 64", "bfloat16"): (68, "FlexAttention"),
    ("ALiBi, causal, 2,048, d 64", "float32"): (12.0, "vLLM"),
    ("ALiBi, causal, 2,048, d 64", "bfloat16"): (9.5, "OpenVINO"),
    ("8 packed documents of 512, causal, 4,096, d 64", "float32"): (9.9, "vLLM"),
    ("8 packed documents of 512, causal, 4,096, d 64", "bfloat16"): (7.8, "OpenVINO"),
    ("8 rows padded to 2,048, no padded query, d 64", "float32"): (88, "vLLM"),
    ("8 rows padded to 2,048, no padded query, d 64", "bfloat16"): (55, "zentorch"),
    ("softcap, causal, 16/8 heads, 2,048, d 128", "float32"): (53, "vLLM"),
    ("softcap, causal, 16/8 heads, 2,048, d 128", "bfloat16"): (58, "vLLM"),
    ("decode, 32/8 heads, 8,192 keys, d 128", "float32"): (2.2, "vLLM"),
    ("decode, 32/8 heads, 8,192 keys, d 128", "bfloat16"): (1.65, "torch matmuls"),
    ("decode, 32/32 heads, 8,192 keys, d 128", "float32"): (5.8, "ONNX Runtime"),
    ("decode, 32/32 heads, 8,192 keys, d 128", "bfloat16"): (4.1, "OpenVINO"),
    ("decode, 32/1 heads, 8,192 keys, d 128", "float32"): (1.1, "OpenVINO"),
    ("decode, 32/1 heads, 8,192 keys, d 128", "bfloat16"): (0.94, "OpenVINO"),
    ("decode, 32/8 heads, 8,192 keys, d 128, 8 rows", "float32"): (20.6, "vLLM"),
    ("decode, 32/8 heads, 8,192 keys, d 128, 8 rows", "bfloat16"): (15.1, "torch matmuls"),
    ("8 queries, 32/8 heads, 8,192 keys, d 128", "float32"): (7.4, "vLLM"),
    ("8 queries, 32/8 heads, 8,192 keys, d 128", "bfloat16"): (3.8, "torch matmuls"),
}
"""(case, type) -> (milliseconds, whose)."""
