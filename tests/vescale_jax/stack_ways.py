"""Ways to run along a stack of layers: small functions of parameters and rows, by name, to be held against plain JAX.

In `WAYS` every stack is read in a loop over its layers; in `WHOLE` something reads one outside of such a loop. Stacks
are called `layers` or `layers_...`. A loss is the sum over many ways, so that one program serves for all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.vescale_jax.stack_models import LAYERS, WIDTH, layer, run, stack


@dataclass(frozen=True)
class Way:
    """One way: its parameters and its function of them and of rows `(n, WIDTH)`; how near it has to be."""

    params: dict[str, Any]
    function: Callable[[Any, jax.Array], jax.Array]
    rtol: float = 2e-5
    atol: float = 2e-6


WAYS: dict[str, Way] = {}
WHOLE: dict[str, Way] = {}


def _numbers(*shape: int) -> jax.Array:
    return 0.5 * jax.random.normal(jax.random.key(sum(shape)), shape)


def _way(into: dict[str, Way], params: dict[str, Any], **how_near: float) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        into[function.__name__] = Way(params, function, **how_near)
        return function

    return add


def _loop(**params: Any) -> Callable[[Any], Any]:
    return _way(WAYS, {"layers": stack(), **params})


def _near(**params: Any) -> Callable[[Any], Any]:
    """What rounds to bfloat16 on the way."""
    return _way(WAYS, {"layers": stack(), **params}, rtol=5e-2, atol=5e-2)


def _whole(**params: Any) -> Callable[[Any], Any]:
    return _way(WHOLE, {"layers": stack(), **params})


@_loop()
def backwards(p: Any, x: jax.Array) -> jax.Array:
    return run(x, p["layers"], reverse=True)


@_loop()
def unrolled(p: Any, x: jax.Array) -> jax.Array:
    return run(x, p["layers"], unroll=3)


@_loop()
def unrolled_throughout(p: Any, x: jax.Array) -> jax.Array:
    return run(x, p["layers"], jax.checkpoint(layer), unroll=True)


@_loop()
def losses_of_layers(p: Any, x: jax.Array) -> jax.Array:
    def one(carry: Any, params: Any) -> Any:
        x, loss = layer(carry[0], params), carry[1]
        return (x, loss + (x**2).mean()), ((x**3).sum(), x)

    (x, loss), (sums, outputs) = lax.scan(one, (x, 0.0), p["layers"])
    return x + loss + (sums * jnp.arange(LAYERS)).sum() + outputs[1] * outputs[2]


@_loop(adapter=_numbers(WIDTH, WIDTH))
def shared_by_all_turns(p: Any, x: jax.Array) -> jax.Array:
    return run(x, p["layers"], lambda x, one: layer(x, one) @ p["adapter"])


@_loop(gates=_numbers(LAYERS, WIDTH))
def slices_that_are_no_stack(p: Any, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, one: (layer(x, one[0]) * one[1][None], None), x, (p["layers"], jnp.sin(p["gates"])))[0]


@_loop()
def a_number_in_the_carry(p: Any, x: jax.Array) -> jax.Array:
    def one(carry: Any, params: Any) -> Any:
        x, i, positive = carry
        x = jnp.where(positive, layer(x, params) * (1.0 + i), x)
        return (x, i + 1, positive & (x < 9)), i

    (x, _, positive), numbers = lax.scan(one, (x, jnp.int32(0), x > -9), p["layers"])
    return x * numbers.sum() + positive


@_loop()
def keys_along(p: Any, x: jax.Array) -> jax.Array:
    def one(x: jax.Array, given: Any) -> Any:
        params, key = given
        return layer(x, params) * jax.random.bernoulli(key, 0.5, (WIDTH,))[None], jax.random.fold_in(key, 1)

    x, keys = lax.scan(one, x, (p["layers"], jax.random.split(jax.random.key(3), LAYERS)))
    return x * jax.random.uniform(keys[2])


@_loop()
def a_key_in_the_carry(p: Any, x: jax.Array) -> jax.Array:
    def one(carry: Any, params: Any) -> Any:
        key, mine = jax.random.split(carry[1])
        return (layer(carry[0], params) * jax.random.bernoulli(mine, 0.5, (WIDTH,))[None], key), None

    return lax.scan(one, (x, jax.random.key(3)), p["layers"])[0][0]


@_loop()
def no_carry(p: Any, x: jax.Array) -> jax.Array:
    return lax.map(lambda one: layer(x, one), p["layers"]).sum(0)


@_loop()
def twice(p: Any, x: jax.Array) -> jax.Array:
    return run(run(x, p["layers"]), p["layers"], reverse=True)


@_way(WAYS, {"layers_a": stack(seed=1), "layers_c": stack(seed=2)})
def two_stacks_in_one_loop(p: Any, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, one: (layer(layer(x, one[0]), one[1]), None), x, (p["layers_a"], p["layers_c"]))[0]


@_way(WAYS, {"layers_a": stack(3, seed=1), "layers_c": stack(2, seed=2)})
def encoder_and_decoder(p: Any, x: jax.Array) -> jax.Array:
    encoded = run(x, p["layers_a"])
    return run(2 * x, p["layers_c"], lambda x, one: layer(x, one) + jnp.tanh(encoded @ one["w"]))


@_way(WAYS, {"layers": stack(experts={"w": _numbers(LAYERS, 3, WIDTH, WIDTH), "b": _numbers(LAYERS, 3, WIDTH)})})
def a_stack_in_a_stack(p: Any, x: jax.Array) -> jax.Array:
    return run(x, p["layers"], lambda x, one: run(layer(x, one), one["experts"]))


@_near()
def cast_before(p: Any, x: jax.Array) -> jax.Array:
    return run(x.astype(jnp.bfloat16), jax.tree.map(lambda a: a.astype(jnp.bfloat16), p["layers"]))


@_near()
def cast_in_a_jitted_function(p: Any, x: jax.Array) -> jax.Array:
    cast = jax.jit(lambda p: (jax.tree.map(lambda a: a.astype(jnp.bfloat16), p), p))
    narrow, same = cast(p["layers"])
    return run(run(x.astype(jnp.bfloat16), narrow).astype(jnp.float32), same)


@_near()
def cast_in_a_checkpoint(p: Any, x: jax.Array) -> jax.Array:
    cast = jax.checkpoint(lambda p: (x**2, jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)))
    squares, narrow = cast(p["layers"])
    return run(squares.astype(jnp.bfloat16), narrow)


@_near()
def one_parameter_twice(p: Any, x: jax.Array) -> jax.Array:
    w = p["layers"]["w"]

    def one(x: jax.Array, given: Any) -> Any:
        first, second, narrow = given
        return x @ first + jnp.tanh(x @ second) + (x.astype(jnp.bfloat16) @ narrow).astype(jnp.float32), None

    return lax.scan(one, x, (w, w, w.astype(jnp.bfloat16)))[0]


@_loop()
def transposed_before(p: Any, x: jax.Array) -> jax.Array:
    return run(x, {"w": p["layers"]["w"].mT, "b": p["layers"]["b"]})


@_loop()
def in_a_jitted_function(p: Any, x: jax.Array) -> jax.Array:
    return jax.jit(lambda p, x: run(x, p["layers"], jax.jit(layer)))(p, x)


@_loop()
def in_a_checkpoint(p: Any, x: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda p, x: run(x, p["layers"]), policy=jax.checkpoint_policies.dots_saveable)(p, x)


@_loop()
def checkpoints_inside(p: Any, x: jax.Array) -> jax.Array:
    return run(x, p["layers"], jax.checkpoint(layer))


@_loop()
def checkpoints_with_a_policy(p: Any, x: jax.Array) -> jax.Array:
    policy = jax.checkpoint_policies.save_only_these_names("kept")
    return run(x, p["layers"], jax.checkpoint(lambda x, one: 2 * checkpoint_name(layer(x, one), "kept"), policy=policy))


@_loop()
def one_row_at_a_time(p: Any, x: jax.Array) -> jax.Array:
    return jax.vmap(lambda row: run(row[None], p["layers"])[0])(x)


@jax.custom_vjp
def _bent(x: jax.Array) -> jax.Array:
    return x


_bent.defvjp(lambda x: (x, x), lambda x, ct: (ct * jnp.cos(x),))


@jax.custom_jvp
def _odd(x: jax.Array, y: jax.Array) -> jax.Array:
    return x * y


_odd.defjvp(lambda xs, ts: (xs[0] * xs[1], 3 * ts[0] * xs[1] + ts[1] * xs[0]))  # type: ignore[no-untyped-call]


@_loop()
def derivatives_of_ones_own(p: Any, x: jax.Array) -> jax.Array:
    return run(x, p["layers"], lambda x, one: _odd(_bent(layer(x, one)), one["b"][None]))


@_loop()
def loops_and_branches_inside(p: Any, x: jax.Array) -> jax.Array:
    def one(x: jax.Array, given: Any) -> Any:
        params, i = given
        x = lax.cond(i % 2 == 0, layer, lambda x, one: x * one["b"][None], x, params)
        return lax.fori_loop(0, 2, lambda _, x: layer(x, params), x), None

    return lax.scan(one, x, (p["layers"], jnp.arange(LAYERS)))[0]


@_loop()
def gradients_inside(p: Any, x: jax.Array) -> jax.Array:
    return run(x, p["layers"], lambda x, one: x - jax.grad(lambda x: layer(x, one).sum())(x))


@_loop(phases=_numbers(LAYERS, WIDTH), turn=_numbers(WIDTH))
def complex_numbers(p: Any, x: jax.Array) -> jax.Array:
    turn = jnp.exp(1j * p["turn"])

    def one(carry: jax.Array, given: Any) -> Any:
        params, phase = given
        carry = carry * (phase * turn)[None] * 0.5 + layer(carry.real, params)
        return carry, carry.sum(0)

    carry, sums = lax.scan(one, x.astype(jnp.complex64), (p["layers"], jnp.exp(1j * p["phases"])))
    return jnp.abs(carry) + 0.1 * sums.imag.sum()


@_loop()
def no_batch(p: Any, x: jax.Array) -> jax.Array:
    norm, _ = lax.scan(
        lambda so_far, one: (so_far + (one["w"] ** 2).sum() * jnp.sqrt(1 + so_far), None), 0.0, p["layers"]
    )
    return run(x, p["layers"]) * jnp.sqrt(norm)


@_loop()
def handed_on_by_the_loop(p: Any, x: jax.Array) -> jax.Array:
    x, same = lax.scan(lambda x, one: (layer(x, one), one), x, p["layers"])
    return run(x, same)


@_way(WAYS, {"layers": stack(unused=_numbers(LAYERS, 3), empty=jnp.zeros((LAYERS, 0, 3)), scale=_numbers(LAYERS))})
def some_parameters_only(p: Any, x: jax.Array) -> jax.Array:
    return run(x, p["layers"], lambda x, one: layer(x, one) * one["scale"])


@_loop(other=_numbers(WIDTH))
def no_layer_at_all(p: Any, x: jax.Array) -> jax.Array:
    return x * p["other"][None]


@_way(WAYS, {"layers": stack(half=_numbers(LAYERS, WIDTH).astype(jnp.float16), number=jnp.arange(LAYERS))}, atol=5e-4)
def dtypes_mixed(p: Any, x: jax.Array) -> jax.Array:
    return run(
        x, p["layers"], lambda x, one: layer(x, one) * one["half"].astype(jnp.float32)[None] + 0.1 * one["number"]
    )


@_way(WAYS, {"layers": stack(lora_a=_numbers(LAYERS, WIDTH, 2), lora_b=_numbers(LAYERS, 2, WIDTH))})
def low_rank(p: Any, x: jax.Array) -> jax.Array:
    return run(x, p["layers"], lambda x, one: layer(x, {**one, "w": one["w"] + one["lora_a"] @ one["lora_b"]}))


@_whole()
def an_operation(p: Any, x: jax.Array) -> jax.Array:
    return run(x, p["layers"]) + (p["layers"]["w"] ** 2).sum()


@_whole()
def all_turns(p: Any, x: jax.Array) -> jax.Array:
    return run(x, p["layers"], lambda x, one: layer(x, one) + p["layers"]["w"].mean())


@_whole()
def layers_by_number(p: Any, x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, LAYERS, lambda i, x: layer(x, jax.tree.map(lambda a: a[i], p["layers"])), x)


@_whole()
def a_branch(p: Any, x: jax.Array) -> jax.Array:
    return lax.cond(x.sum() > 0, lambda: run(x, p["layers"]), lambda: run(x, p["layers"], reverse=True))


@_whole()
def a_loop_around(p: Any, x: jax.Array) -> jax.Array:
    return lax.map(lambda row: run(row[None], p["layers"])[0], x)


FROZEN = "low_rank/layers/[wb]"
ROWS = {"x": np.asarray(jax.random.normal(jax.random.key(9), (6, WIDTH)))}


def params_of(ways: dict[str, Way]) -> dict[str, Any]:
    """All parameters, by way."""
    return {name: way.params for name, way in ways.items()}


def values_of(ways: dict[str, Way], params: Any, rows: Any) -> dict[str, jax.Array]:
    """What every way makes of the rows, as one number."""
    return {name: (0.1 * way.function(params[name], rows["x"]).astype(jnp.float32)).sum() for name, way in ways.items()}
