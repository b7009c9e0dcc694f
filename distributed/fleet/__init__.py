"""Many jobs on many machines: a batch's jobs, its state as files, the queue, the driver and the workers.

May import `nodes` and the runtime. Ray and fsspec, the extra `fleet`, are imported only for `--ray` and for a URL. The
driver of a batch imports neither PyTorch nor JAX.
"""
