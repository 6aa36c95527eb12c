"""The settings of `conftest.py` and `pyproject.toml` hold: without these tests they could lapse in silence."""

import warnings

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from jax.sharding import Mesh

import vescale_planner


def test_there_are_eight_devices(meshes: dict[int, Mesh]) -> None:
    assert jax.default_backend() == "cpu"
    assert len(jax.devices()) == 8
    assert {n: mesh.shape for n, mesh in meshes.items()} == {n: {"fsdp": n} for n in (1, 2, 3, 5, 8)}


def test_silent_broadcast_is_an_error() -> None:
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 3)) + jnp.ones(3)


def test_dtype_promotion_is_standard_outside_the_strict_folders() -> None:
    assert (jnp.ones(1, jnp.bfloat16) + jnp.ones(1, jnp.float32)).dtype == jnp.float32


@pytest.mark.dtype_promotion("strict")
def test_strict_dtype_promotion_can_be_asked_for() -> None:
    with pytest.raises(jax.dtypes.TypePromotionError):
        jnp.ones(1, jnp.bfloat16) + jnp.ones(1, jnp.float32)


def test_warnings_are_errors() -> None:
    with pytest.raises(DeprecationWarning):
        warnings.warn("old", DeprecationWarning, stacklevel=1)


def test_annotations_are_checked() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        vescale_planner.plan_group([], num_shards="four")


@pytest.mark.unchecked_annotations
def test_annotation_checks_can_be_off() -> None:
    with pytest.raises(TypeError, match="plan_group") as raised:
        vescale_planner.plan_group([], num_shards="four")
    assert not isinstance(raised.value, jaxtyping.TypeCheckError)
