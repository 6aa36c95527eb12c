"""Inverse roots and eigenvectors: right for good and for hopeless matrices, whatever else is in the batch."""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from vescale_jax.optimizers import inverse_root
from vescale_jax.optimizers._givens import orthogonal_factor
from vescale_jax.optimizers._jacobi import eigenvectors
from vescale_jax.optimizers._matrices import norm, product
from vescale_jax.optimizers._soap_basis import first_basis, refreshed

N, K = 5, 12


@functools.cache
def jitted(root: int, epsilon: float, method: Any) -> Any:
    return jax.jit(functools.partial(inverse_root, root=root, epsilon=epsilon, method=method))


def matrices(seed: int, spectra: np.ndarray, rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Matrices (n, K, K) with these eigenvalues, of which so many rows exist; and which those are."""
    rng = np.random.default_rng(seed)
    out = np.zeros((len(rows), K, K))
    for x, values, count in zip(out, spectra, rows, strict=True):
        q = np.linalg.qr(rng.normal(size=(count, count)))[0] if count else np.zeros((0, 0))
        x[:count, :count] = (q * values[:count]) @ q.T
    return out.astype(np.float32), np.arange(K) < np.array(rows)[:, None]


def reference(x: np.ndarray, real: np.ndarray, root: int, epsilon: float) -> np.ndarray:
    out = np.zeros(x.shape)
    for i, count in enumerate(real.sum(1)):
        values, vectors = np.linalg.eigh(x[i, :count, :count].astype(np.float64))
        if count and values[-1] > 0:
            powers = (np.maximum(values, 0) + epsilon * values[-1]) ** (-1 / root)
            out[i, :count, :count] = (vectors * powers) @ vectors.T
    return out


@pytest.mark.parametrize("method", ["newton", "jacobi"])
@pytest.mark.parametrize(("root", "epsilon"), [(1, 1e-2), (2, 1e-3), (4, 1e-6), (8, 1e-4)])
@hypothesis.settings(max_examples=25)
@hypothesis.given(
    seed=st.integers(0, 99),
    decades=st.lists(st.floats(0, 12), min_size=N, max_size=N),
    rows=st.lists(st.integers(0, K), min_size=N, max_size=N),
    zeros=st.integers(0, K),
)
def test_roots_are_those_of_float64(
    method: Any, root: int, epsilon: float, seed: int, decades: list[float], rows: list[int], zeros: int
) -> None:
    # The worst matrices are singular: what counts then is epsilon, down to which float32 has to be right.
    spectra = np.stack([np.geomspace(1, 10.0**-d, K) for d in decades])
    spectra[0, max(zeros, 1) :] = 0
    x, real = matrices(seed, spectra, rows)
    found = np.asarray(jitted(root, epsilon, method)(x, real))
    wanted = reference(x, real, root, epsilon)
    size = np.maximum(np.abs(wanted).max((1, 2), keepdims=True), 1e-30)
    # The rounding of the largest eigenvalue, as the smallest one feels it; Newton's knows the largest only so well.
    known = 3e-3 / root if method == "newton" else 0
    assert np.max(np.abs(found - wanted) / size) < 1e-6 / epsilon / root + 1e-5 + known
    both = real[:, :, None] & real[:, None, :]
    assert np.all(found[~both] == 0)


@pytest.mark.parametrize("method", ["newton", "jacobi"])
def test_a_matrix_has_the_same_root_in_any_company(method: Any) -> None:
    x, real = matrices(0, np.stack([np.geomspace(1, 10.0**-d, K) for d in range(N)]), [K, K - 5, 0, K, 1])
    root = jitted(4, 1e-6, method)
    whole = np.asarray(root(x, real))
    for some in ([0], [2, 3, 0]):
        np.testing.assert_array_equal(root(x[some], real[some]), whole[some])


# Eigenvectors by plane rotations.


@functools.cache
def spectra_of(k: int) -> tuple[np.ndarray, np.ndarray]:
    """Matrices (n, k, k) of all kinds in float64, and their scales."""
    rng = np.random.default_rng(k)
    half = np.arange(k) < (k + 1) // 2
    ones = np.ones(k)
    values = [
        *(np.geomspace(1, 10.0**-decades, k) for decades in (1, 8, 30)),
        # All equal, two clusters, half of them 0, one of them large, none at all.
        *(ones, np.where(half, 1, 0.1), np.where(half, rng.uniform(1, 2, k), 0), np.r_[1, 1e-6 * ones[1:]], 0 * ones),
    ]
    q = np.linalg.qr(rng.normal(size=(len(values), k, k)))[0]
    kinds = (q * np.array(values)[:, None, :]) @ q.swapaxes(1, 2)
    # Two that are sums of squares, as statistics are, and one that is diagonal already, the smallest first.
    few, many = rng.normal(size=(k, max(k // 3, 1))), rng.normal(size=(k, 3 * k))
    more = few @ few.T / k, many @ many.T / (3 * k), np.diag(np.geomspace(1e-3, 1, k))
    kinds = np.concatenate([kinds, more])
    return (kinds + kinds.swapaxes(1, 2)) / 2, np.resize([1.0, 1e-30, 1e30], len(kinds))


@pytest.mark.parametrize("k", [1, 2, 3, 5, 16, 32, 128])
def test_eigenvectors_are_those_of_float64(k: int) -> None:
    kinds, scales = spectra_of(k)
    x = (kinds * scales[:, None, None]).astype(np.float32)
    given = x.astype(np.float64) / scales[:, None, None]
    values, vectors = map(np.asarray, jax.jit(eigenvectors)(x, np.ones(x.shape[:2], bool)))
    assert values.dtype == vectors.dtype == np.float32
    wanted = np.linalg.eigvalsh(given)[:, ::-1]
    # Float32 rounds the largest eigenvalue by 6e-8 of it, and a product of k numbers several times.
    size = wanted[:, :1] + 1e-30
    assert np.max(np.abs(values / scales[:, None] - wanted) / size) < 2e-6
    assert np.all(np.diff(values) <= 0)
    vectors = vectors.astype(np.float64)
    np.testing.assert_allclose(vectors.swapaxes(1, 2) @ vectors, np.broadcast_to(np.eye(k), x.shape), atol=2e-6)
    left = vectors.swapaxes(1, 2) @ given @ vectors
    left[:, np.arange(k), np.arange(k)] = 0
    assert np.max(np.abs(left) / size[:, :, None]) < 2e-6


@pytest.mark.parametrize("k", [1, 2, 5, 32, 128])
def test_orthogonal_factors(k: int) -> None:
    x = np.random.default_rng(k).normal(size=(7, k, k))
    # Nothing, rows and columns that do not exist, badly scaled columns, equal columns, and extreme scales.
    x[1], x[2, k // 2 :], x[2, :, k // 2 :] = 0, 0, 0
    x[3], x[4] = x[3] * 1e-6 ** (np.arange(k) / k)[None], x[4, :, :1]
    x[5], x[6] = 1e30 * x[5], 1e-30 * x[6]
    x = x.astype(np.float32)
    factor = jax.jit(orthogonal_factor)
    found = np.asarray(factor(x))
    q = found.astype(np.float64)
    np.testing.assert_allclose(q.swapaxes(1, 2) @ q, np.broadcast_to(np.eye(k), x.shape), atol=1e-6)
    left = np.abs(np.tril(q.swapaxes(1, 2) @ x, -1)).max((1, 2))
    assert np.all(left <= 1e-6 * np.linalg.norm(x.astype(np.float64), axis=(1, 2)))
    np.testing.assert_array_equal(q[1], np.eye(k))
    np.testing.assert_array_equal(q[2, k // 2 :], np.eye(k)[k // 2 :])
    np.testing.assert_array_equal(factor(x[2:3]), found[2:3])


def test_what_does_not_exist_is_not_mixed_with_rows_that_have_no_gradient_yet() -> None:
    x, real = matrices(0, np.ones((1, K)), [9])
    x[0, 5:, :] = x[0, :, 5:] = 0
    values, vectors = map(np.asarray, jax.jit(eigenvectors)(x, real))
    assert np.all(np.diff(values) <= 0)
    np.testing.assert_array_equal(values[0, 9:], 0)
    np.testing.assert_array_equal(vectors[0, 9:, :], np.eye(K)[9:])
    np.testing.assert_array_equal(vectors[0, :, 9:], np.eye(K)[:, 9:])
    np.testing.assert_allclose(vectors[0].T @ vectors[0], np.eye(K), atol=1e-6)


def test_no_program_calls_lapack() -> None:
    # It can hang where several CPU devices of one process are in it.
    x, real = matrices(0, np.ones((1, K)), [K])
    programs = (jitted(4, 1e-6, "newton"), jitted(4, 1e-6, "jacobi"), jax.jit(first_basis))
    texts = [jax.jit(refreshed).lower(x, x).as_text(), *(program.lower(x, real).as_text() for program in programs)]
    assert not any("custom_call" in text for text in texts)
    assert "custom_call" in jax.jit(jax.numpy.linalg.qr).lower(x).as_text()


@pytest.mark.parametrize(("method", "most"), [("newton", 0.01), ("jacobi", 0.005)])
def test_roots_of_large_and_bad_matrices(method: Any, most: float) -> None:
    # The worst that the default of 1e-6 allows: float32 rounds by 6e-8 of the largest, a twentieth of epsilon.
    rng, k = np.random.default_rng(0), 128
    q = np.linalg.qr(rng.normal(size=(3, k, k)))[0]
    spectra = np.stack([np.geomspace(1, 10.0**-decades, k) for decades in (2, 6, 8)])
    x = ((q * spectra[:, None, :]) @ q.swapaxes(1, 2)).astype(np.float32)
    real = np.ones((3, k), bool)
    found, wanted = np.asarray(jitted(4, 1e-6, method)(x, real)), reference(x, real, 4, 1e-6)
    apart = np.abs(found - wanted).max((1, 2)) / np.abs(wanted).max((1, 2))
    assert apart[0] < 1e-5
    assert np.all(apart < most)


@pytest.mark.parametrize("scale", [1e-35, 1e-30, 1.0, 1e30, 1e34])
def test_norms_do_not_overflow_or_depend_on_the_batch(scale: float) -> None:
    x = np.random.default_rng(0).normal(size=(20, 16, 24)).astype(np.float32) * np.float32(scale)
    x[3], x[4] = 0, 0
    x[4, 2, 2] = scale
    found = np.asarray(jax.jit(norm)(x))
    np.testing.assert_allclose(found, np.linalg.norm(x.astype(np.float64), axis=(1, 2)), rtol=1e-6)
    for n in (1, 2, 7, 15):
        np.testing.assert_array_equal(jax.jit(norm)(x[:n]), found[:n])


def test_products_do_not_depend_on_the_batch() -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 20, 32, 32)).astype(np.float32)
    for over, wanted in (((2, 1), x @ y), ((2, 2), x @ y.swapaxes(1, 2)), ((1, 1), x.swapaxes(1, 2) @ y)):
        step = jax.jit(functools.partial(product, over=over))
        whole = np.asarray(step(x, y))
        np.testing.assert_allclose(whole, wanted, rtol=1e-4, atol=1e-4)
        for n in (1, 2, 5, 13):
            np.testing.assert_array_equal(step(x[:n], y[:n]), whole[:n])
