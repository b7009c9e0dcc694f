"""Many jobs over many machines: what a batch consists of, its state as files, the queue, and those who run it.

May import `nodes` and `pipeline`. Ray and fsspec, the extra `fleet`, are imported where they are asked for:
without `--ray` and without a URL nothing needs them. What drives a batch imports neither PyTorch nor JAX.
"""
