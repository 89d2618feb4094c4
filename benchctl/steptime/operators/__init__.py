"""Times of single operators: a few non-negative coefficients on what a kernel reads, computes and launches.

``operator_fit.py`` fits any of them; ``gemm.py``, ``latent_decode.py`` and ``expert_block.py`` say what each kernel
does, ``routing.py`` which tokens an uneven routing sends to an expert. All-reduces are in
``steptime/terms/all_reduce.py``.
"""
