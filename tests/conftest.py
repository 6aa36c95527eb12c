"""Settings for all tests: 8 virtual CPU devices, and JAX's checks as strict as the libraries around us allow."""

from collections.abc import Callable, Generator
from pathlib import Path

import hypothesis
import jax
import jaxtyping
import numpy as np
import pytest
from jax.sharding import Mesh

# Before the first use of a device: the backend reads these two once.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# A silent broadcast of (n,) against (m, n) is an error. Flax and optax pass under this.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Strict dtype promotion cannot be on for all tests. optax raises a float to an int32 step count (adam, adamw, lamb,
# every schedule), and Flax's norms multiply bfloat16 by float32 (LayerNorm, RMSNorm, GroupNorm, BatchNorm with
# dtype=bfloat16): both fail under it. So it is on in the folders that hold only our own code, and a test or a module
# elsewhere asks for it with @pytest.mark.dtype_promotion("strict"), or here for the opposite with "standard".
STRICT_FOLDERS = {"layouts"}

# Examples slow down when other processes share the cores; a time limit on each would fail at random.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

MESH_SIZES = (1, 2, 3, 5, 8)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    marker = item.get_closest_marker("dtype_promotion")
    if marker is not None:
        (mode,) = marker.args
    else:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        mode = "strict" if folder in STRICT_FOLDERS else "standard"

    # beartype would catch a wrong type before our own check does, and makes small functions many times slower.
    jaxtyping.config.update("jaxtyping_disable", item.get_closest_marker("unchecked_annotations") is not None)
    try:
        with jax.numpy_dtype_promotion(mode):
            return (yield)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def mesh() -> Callable[..., Mesh]:
    """`mesh(n)`: one axis, "fsdp" or another name, over the first n of the 8 devices."""

    def over_first(n: int, axis: str = "fsdp") -> Mesh:
        return Mesh(np.array(jax.devices()[:n]), (axis,))

    return over_first


@pytest.fixture(scope="session")
def meshes(mesh: Callable[..., Mesh]) -> dict[int, Mesh]:
    """The meshes that every equality is shown on, by size."""
    return {n: mesh(n) for n in MESH_SIZES}
