"""The twin: the same training on one device without the library, against which sharded runs are held.

It takes models apart in its own few lines, so that a fault of the library's forms cannot hide in both.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax.sharding import Mesh

import vescale_jax as vs
from tests.vescale_jax import models

BATCHES = models.batches(3)
ADAMW = optax.adamw(1e-2)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a few steps left behind: losses, gradient norms, final parameters by path, and the rest of the model."""

    losses: np.ndarray
    norms: np.ndarray
    params: dict[str, np.ndarray]
    rest: list[Any]


def plain(
    model: Any,
    loss_fn: Callable[[Any, Any], Any],
    tx: optax.GradientTransformation,
    batches: Sequence[Any],
    *,
    variables: Any = None,
    trainable: Callable[[str], bool] = lambda path: True,
    max_norm: float | None = None,
) -> Run:
    """Trains on one device; parameters are a flat dict, the optimizer sees the trainable ones only."""
    params, rest, inside, rest_after = _apart(model, variables)
    trained = {path: value for path, value in params.items() if trainable(path)}
    frozen = {path: value for path, value in params.items() if not trainable(path)}

    def mean(trained: Any, rest: Any, batch: Any) -> tuple[jax.Array, Any]:
        built = inside({**trained, **frozen}, rest)
        loss = loss_fn(built, batch)
        if isinstance(loss, vs.Mean):
            loss = loss.total / loss.count
        return loss, rest_after(built, rest)

    @jax.jit
    def step(trained: Any, state: Any, rest: Any, batch: Any) -> Any:
        (loss, rest), grads = jax.value_and_grad(mean, has_aux=True)(trained, rest, batch)
        norm = jnp.sqrt(
            sum(
                (jnp.sum(g.astype(jnp.promote_types(g.dtype, jnp.float32)) ** 2) for g in grads.values()),
                jnp.float32(0),
            )
        )
        if max_norm is not None:
            grads, _ = optax.clip_by_global_norm(max_norm).update(grads, optax.EmptyState())
        updates, state = tx.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state, rest, loss, norm

    state, losses, norms = tx.init(trained), [], []
    for batch in batches:
        trained, state, rest, loss, norm = step(trained, state, rest, jax.tree.map(jnp.asarray, batch))
        losses.append(float(loss))
        norms.append(float(norm))
    final = {path: np.asarray(value) for path, value in {**trained, **frozen}.items()}
    return Run(np.array(losses), np.array(norms), final, jax.tree.leaves(rest))


def sharded(
    model: vs.Sharded,
    loss_fn: Callable[[Any, Any], Any],
    tx: optax.GradientTransformation,
    batches: Sequence[Any],
    **options: Any,
) -> Run:
    """Trains with the library; `options` go to `train_step`."""
    state = vs.train_state(model, tx)
    step = vs.train_step(loss_fn, tx, donate=False, **options)
    losses, norms = [], []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
        norms.append(float(metrics.grad_norm))
    return Run(np.array(losses), np.array(norms), dict(state.model.tensors()), list(state.model.rest))


def assert_same(ours: Run, theirs: Run, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    """Losses, norms and parameters agree: float32 sums in another order, and nothing else, may differ."""
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol, atol, err_msg="losses")
    np.testing.assert_allclose(ours.norms, theirs.norms, rtol, atol, err_msg="gradient norms")
    assert sorted(ours.params) == sorted(theirs.params)
    for path, value in theirs.params.items():
        assert ours.params[path].dtype == value.dtype, path
        np.testing.assert_allclose(
            ours.params[path].astype(np.float32), value.astype(np.float32), rtol, atol, err_msg=path
        )


def _apart(model: Any, variables: Any) -> tuple[dict[str, Any], Any, Callable[..., Any], Callable[..., Any]]:
    """Parameters by path, the rest, and how both become the model and the rest again."""
    if isinstance(model, nnx.Module):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        flat = {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(params)}

        def merge(flat: Mapping[str, Any], rest: Any) -> nnx.Module:
            pairs = [(path, leaf.replace(flat["/".join(map(str, path))])) for path, leaf in nnx.to_flat_state(params)]
            # Variables remember the trace that made them: the rest gets new ones.
            return nnx.merge(graphdef, nnx.from_flat_state(pairs), jax.tree.map(lambda x: x, rest))

        return flat, rest, merge, lambda built, _: nnx.split(built, nnx.Param, ...)[2]

    tree = linen.meta.unbox(variables)["params"] if variables is not None else model
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    flat = dict(zip(paths, [leaf for _, leaf in leaves], strict=True))

    def build(flat: Mapping[str, Any]) -> Any:
        return jax.tree.unflatten(treedef, [flat[path] for path in paths])

    if variables is None:
        return flat, None, lambda flat, _: build(flat), lambda built, rest: rest
    rest = {name: value for name, value in linen.meta.unbox(variables).items() if name != "params"}

    def bind(flat: Mapping[str, Any], rest: Any) -> linen.Module:
        return model.bind({"params": build(flat), **rest}, mutable=list(rest) or False)

    return flat, rest, bind, lambda built, rest: {name: built.variables[name] for name in rest}


@functools.cache
def tree_twin(tx: optax.GradientTransformation, steps: int) -> Run:
    return plain(models.tree(), models.tree_loss, tx, BATCHES[:steps])


def same_tree(mesh: Mesh, tx: optax.GradientTransformation = ADAMW, steps: int = 3, **options: Any) -> Run:
    """Trains the bare pytree with and without the library; `options` go to `fully_shard`."""
    ours = sharded(vs.fully_shard(models.tree(), mesh, **options), models.tree_loss, tx, BATCHES[:steps])
    assert_same(ours, tree_twin(tx, steps))
    return ours


def same_module(
    make: Callable[[], Any], mesh: Mesh, loss_fn: Callable[..., Any] = models.mean_loss, tx: Any = ADAMW, **options: Any
) -> tuple[Run, Run]:
    """Trains an nnx module with and without the library, two steps."""
    theirs = plain(make(), loss_fn, tx, BATCHES[:2])
    ours = sharded(vs.fully_shard(make, mesh, **options), loss_fn, tx, BATCHES[:2])
    assert_same(ours, theirs)
    return ours, theirs
