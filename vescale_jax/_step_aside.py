"""step_aside: optimizers that take buffers alone let those beside them in a chain be checked.

Comes in: `init` and `update` of an optimizer that wants the buffers of a sharded model. Goes out: both, which do
nothing while `check_elementwise` traces a chain. The check needs traces over single parameters, too. An optimizer that
refuses these would end the check, and a mask or a trust ratio next to it would pass unseen.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

# A user context, since `jax.jit` has it in the keys of its caches: nothing traced within it is found outside.
aside: Any = jax.make_user_context(False)
"""`with aside(True):` makes what `steps_aside` returned do nothing."""


def steps_aside(init: Callable[..., Any], update: Callable[..., Any]) -> tuple[Any, Any]:
    """The `init` and `update` of an optimizer, which within `aside(True)` have no state and hand gradients on.

    Arguments:

    - `init`, `update`: as `optax.GradientTransformation` has them; they are given buffers alone.
    """

    def init_or_nothing(params: Any) -> Any:
        return optax.EmptyState() if aside.value else init(params)

    def update_or_nothing(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return (updates, state) if aside.value else update(updates, state, params, **extra)

    return init_or_nothing, update_or_nothing
