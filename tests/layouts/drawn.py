"""What hypothesis draws for the layouts: a plan for a mesh of the tests, and tensors to fill it with."""

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from tests.planner import strategies
from vescale_planner import GroupPlan, plan_group

MESH_SIZES = (1, 2, 3, 5, 8)

DTYPES = (
    *(np.dtype(name) for name in ("float32", "float16", "int32", "int8", "uint8", "bool")),
    np.dtype(ml_dtypes.bfloat16),
)
FLOAT32 = np.dtype("float32")


@st.composite
def plans(draw: st.DrawFn, largest: int = 5) -> GroupPlan:
    """A plan of a random group, blocks of all kinds, for one of the mesh sizes."""
    group = draw(strategies.groups(largest))
    return plan_group(group, draw(st.sampled_from(MESH_SIZES)), draw(st.integers(1, 4)))


def tensors(plan: GroupPlan, dtype: np.dtype = FLOAT32, seed: int = 0) -> dict[str, np.ndarray]:
    """Whole numbers that every dtype holds exactly."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(0, 2 if dtype.kind == "b" else 99, slot.shape).astype(dtype)
        for name, slot in plan.slots.items()
    }
