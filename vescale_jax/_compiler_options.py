"""compiler_options: what XLA has to be told for weights to be read in place and collectives to run beside compute.

Comes in: a platform. Goes out: options for `train_step(compiler_options=...)` or `jax.jit`, which hold for that one
program. No flag of the process is changed. `docs/preflight.md` has what each of them changes, measured.
"""

_ALONE = 1
"""Bytes up to which XLA may put collectives of one kind together: none."""

_OPTIONS: dict[str, dict[str, bool | int | str]] = {
    "gpu": {
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
        "xla_gpu_all_gather_combine_threshold_bytes": _ALONE,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": _ALONE,
    },
    "tpu": {},
    "cpu": {"xla_cpu_enable_concurrency_optimized_scheduler": False},
}


def compiler_options(platform: str) -> dict[str, bool | int | str]:
    """Compiler options under which weights are read in place and collectives run beside compute.

    Pass them to one step: `train_step(loss_fn, tx, compiler_options=compiler_options("gpu"))`. They are not the
    default, since what is best for a model on a machine can only be measured there.

    For GPUs:

    - `xla_gpu_enable_triton_gemm=False`: products are cuBLAS calls, which read a contiguous part of the gathered buffer
      where it lies. XLA copies the operands of Triton products out of it first.
    - `xla_gpu_enable_latency_hiding_scheduler=True`: collectives are started early and awaited late. Without it none
      runs beside compute.
    - `xla_gpu_experimental_parallel_collective_overlap_limit=2`: the gather of one layer and the reduce-scatter of
      another may be on their way together. The default is one, and the second then waits for the first.
    - `xla_gpu_all_gather_combine_threshold_bytes=1`, `xla_gpu_reduce_scatter_combine_threshold_bytes=1`: a collective
      stays one unit. XLA would merge those of several units, which then are alive together, and start when the last of
      them is ready.

    For CPU devices:

    - `xla_cpu_enable_concurrency_optimized_scheduler=False`: instructions in an order that saves memory. The default
      starts all that can start, so all units are gathered at once.

    For TPUs nothing: their compiler hides collectives by default.

    Arguments:

    - `platform`: `"gpu"` (or `"cuda"`), `"tpu"` or `"cpu"`, such as `jax.default_backend()` returns.

    Returns: a new dictionary from names to values. XLA refuses names that its version does not know.

    Raises: `ValueError` for another platform.
    """
    name = "gpu" if platform == "cuda" else platform
    if name not in _OPTIONS:
        raise ValueError(
            f"compiler_options: platform: got {platform!r}; want one of {', '.join(_OPTIONS)}; pass "
            "jax.default_backend()"
        )
    return dict(_OPTIONS[name])
