"""MixedPrecisionPolicy: the dtypes of a parameter's life.

| step | dtype |
|---|---|
| stored, and updated by the optimizer | `param_dtype` |
| gathered, and used by the model | `gather_dtype` |
| gradients summed over the devices | `reduce_dtype` |
| inputs of the loss | `gather_dtype`, if `cast_inputs` |
| outputs of the loss | `output_dtype` |

The names follow FSDP2's policy of the same name; `gather_dtype` is what it calls `param_dtype`, since here the stored
dtype can be chosen too.
"""

from dataclasses import dataclass, fields

import jax.numpy as jnp
from jax.typing import DTypeLike

from vescale_planner import Faults


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """Which dtype parameters, collectives, inputs and outputs have.

    Only floating-point arrays are ever cast.

    Arguments:

    - `param_dtype`: of the stored shards and so of gradients and optimizer state. None: as the model declares.
    - `gather_dtype`: of the all-gather and of the tensors the model sees. None: `param_dtype`.
    - `reduce_dtype`: of the reduce-scatter. None: float32, or the parameter's dtype if it is wider.
    - `output_dtype`: of what the loss function returns beside the loss, which is always float32. None: left alone.
    - `cast_inputs`: whether floating-point inputs are cast to `gather_dtype`; without a `gather_dtype` they are not.

    Raises: `ValueError` for a dtype that is not floating-point.
    """

    param_dtype: DTypeLike | None = None
    gather_dtype: DTypeLike | None = None
    reduce_dtype: DTypeLike | None = None
    output_dtype: DTypeLike | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        faults = Faults("MixedPrecisionPolicy")
        for field in fields(self):
            value = getattr(self, field.name)
            if not field.name.endswith("_dtype") or value is None:
                continue
            try:
                dtype = jnp.dtype(value)
            except TypeError:
                faults.add(field.name, got=repr(value), want="a dtype", change="pass one such as jnp.bfloat16")
                continue
            if not jnp.issubdtype(dtype, jnp.floating):
                faults.add(
                    field.name, got=str(dtype), want="a floating-point dtype", change="pass jnp.bfloat16 or None"
                )
            object.__setattr__(self, field.name, dtype)
        faults.raise_if_any()
