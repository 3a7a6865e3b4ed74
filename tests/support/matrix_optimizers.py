"""Optimizers that work on whole matrices, written as for one device, as plain Optax transformations."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

LR = 0.02
#: Coefficients of five steps, each with its own, after which all singular values are near one.
POLAR = [(8.2, -23.1, 17.1), (4.1, -2.9, 0.52), (3.9, -2.8, 0.51), (3.3, -2.4, 0.46), (2.3, -1.6, 0.4)]


def _each(init, step):
    """`step(g, s, p, count) -> (update, state)` on each matrix; other leaves go by plain gradient descent."""

    def start(params):
        return jnp.zeros((), jnp.int32), jax.tree.map(lambda p: init(p) if p.ndim == 2 else (), params)

    def update(grads, state, params=None):
        count, states = state
        flat = jax.tree.leaves(grads)
        tree: Any = jax.tree.structure(grads)
        given = tree.flatten_up_to(states)
        new = [step(g, s, count) if g.ndim == 2 else (g, s) for g, s in zip(flat, given, strict=True)]
        updates = tree.unflatten([-LR * u for u, _ in new])
        return updates, (count + 1, tree.unflatten([s for _, s in new]))

    return optax.GradientTransformation(start, update)


def polar_express():
    """Muon with its own coefficients in each step, written out."""

    def step(g, m, count):
        m = 0.9 * m + g
        x = m.T if m.shape[0] > m.shape[1] else m
        x = x / (jnp.linalg.norm(x) * 1.01 + 1e-7)
        for a, b, c in POLAR:
            s = x @ x.T
            x = a * x + (b * s + c * s @ s) @ x
        x = x.T if m.shape[0] > m.shape[1] else x
        return jnp.sqrt(max(1.0, m.shape[0] / max(m.shape[1], 1))) * x, m

    return _each(jnp.zeros_like, step)


def _root(a):
    """The inverse fourth root of a symmetric matrix."""
    w, q = jnp.linalg.eigh(a)
    return (q * jnp.maximum(w, 1e-6) ** -0.25) @ q.T


def shampoo():
    """Both factors, their inverse fourth roots by eigenvectors, and momentum of what they make."""

    def init(p):
        m, n = p.shape
        return jnp.zeros_like(p), 0.1 * jnp.eye(m, dtype=p.dtype), 0.1 * jnp.eye(n, dtype=p.dtype)

    def step(g, state, count):
        m, left, right = state
        left, right = left + g @ g.T, right + g.T @ g
        m = 0.9 * m + _root(left) @ g @ _root(right)
        return m, (m, left, right)

    return _each(init, step)


def soap(every=2):
    """Adam in the basis of Shampoo's eigenvectors; every few steps the basis is made better by one QR."""

    def init(p):
        m, n = p.shape
        eye = lambda k: jnp.eye(k, dtype=p.dtype)
        return jnp.zeros_like(p), jnp.zeros_like(p), 0.1 * eye(m), 0.1 * eye(n), eye(m), eye(n)

    def step(g, state, count):
        m, v, left, right, ql, qr = state
        left, right = 0.95 * left + 0.05 * g @ g.T, 0.95 * right + 0.05 * g.T @ g
        ql, qr = lax.cond(
            count % every == 0,
            lambda: (jnp.linalg.qr(left @ ql)[0], jnp.linalg.qr(right @ qr)[0]),
            lambda: (ql, qr),
        )
        m = 0.9 * m + 0.1 * g
        turned = ql.T @ g @ qr
        v = 0.95 * v + 0.05 * turned * turned
        u = (ql.T @ m @ qr) / (jnp.sqrt(v) + 1e-3)
        return ql @ u @ qr.T, (m, v, left, right, ql, qr)

    return _each(init, step)


def psgd():
    """PSGD with a Kronecker product of triangular factors, and a random probe that is drawn for each matrix."""

    def init(p):
        m, n = p.shape
        return jnp.eye(m, dtype=p.dtype), jnp.eye(n, dtype=p.dtype)

    def step(g, state, count):
        left, right = state
        probe = jax.random.normal(jax.random.fold_in(jax.random.PRNGKey(0), count), g.shape, g.dtype)
        a = left @ (g + 1e-3 * probe) @ right.T
        b = jax.scipy.linalg.solve_triangular(right, probe.T, trans="T").T
        b = jax.scipy.linalg.solve_triangular(left, b, trans="T")
        t1, t2 = a @ a.T, b @ b.T
        t3, t4 = a.T @ a, b.T @ b
        norm = lambda x: jnp.max(jnp.abs(x)) + 1e-6
        left = left - 0.1 * jnp.triu(t1 - t2) @ left / norm(t1 + t2)
        right = right - 0.1 * jnp.triu(t3 - t4) @ right / norm(t3 + t4)
        return left.T @ left @ g @ right.T @ right, (left, right)

    return _each(init, step)


OPTIMIZERS = {
    "muon": lambda: optax.contrib.muon(LR),
    "polar express": polar_express,
    "shampoo": shampoo,
    "soap": soap,
    "psgd": psgd,
}
