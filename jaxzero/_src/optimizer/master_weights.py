"""Mixed precision: a wide copy of narrow parameters, kept in the optimizer's state.

A bfloat16 parameter has eight bits: adding an update of a thousandth of it changes nothing. So the update is
added to a float32 copy, and the parameter is that copy, rounded.
"""

from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from .._types import ArrayLike, PyTree
from . import checks
from .trace import accepted
from .wrapper import ShardedOptimizer


class MasterWeightsState(NamedTuple):
    """State of `master_weights`.

    Attributes:
      master: A tree like the parameters: the wide copy of each narrow one, and for every other parameter
        `optax.MaskedNode()`, which holds no array.
      inner_state: The state of the inner optimizer, of the wide parameters.
    """

    master: PyTree
    inner_state: PyTree


jax.export.register_namedtuple_serialization(MasterWeightsState, serialized_name="jaxzero.MasterWeightsState")


def master_weights(
    inner: optax.GradientTransformation, dtype: DTypeLike = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """Keeps a wide copy of low-precision parameters in the state, and lets `inner` see and update that copy.

    `inner` is given gradients and parameters in `dtype`. With the copy `m` and the parameter `p`, the update is
    `u = m' - p` and `m' = p + u`, both in `dtype`. So `optax.apply_updates` and `zero.apply`, which round `p + u`
    to the parameter's dtype, give exactly the new copy rounded, and no small update is lost. Parameters that are
    as wide as `dtype` already have no copy.

    It is plain Optax and sends nothing: inside `zero.optimizer` the copies are split like the rest of the state, and
    `zero.apply` gathers the new parameters in their own dtype, half of float32's bytes for bfloat16. (`tx.update`
    returns, and gathers, updates in `dtype`.)

    Put it around the whole chain, so that clipping and weight decay are computed in `dtype` too:
    `zero.optimizer(jaxzero.master_weights(optax.chain(clip, adamw)))`. The copy decides: a change made to the
    parameters outside the optimizer, such as pretrained weights loaded after `init`, is lost at the next step. After
    such a change set the copy: `state = state._replace(master=tx.init(params).master)`.

    Args:
      inner: Any Optax optimizer.
      dtype: The dtype of the copies, floating, 32 bits or more.

    Returns:
      An `optax.GradientTransformationExtraArgs` with a `MasterWeightsState`. Its updates of narrow parameters have
      dtype `dtype`.

    Raises:
      ValueError: For a dtype that is not a wide floating one, for an optimizer wrapped by jaxzero already, and for an
        update without `params`.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxzero
      >>> tx = jaxzero.master_weights(optax.sgd(1e-3))
      >>> params = jnp.ones(2, jnp.bfloat16)
      >>> state = tx.init(params)
      >>> for _ in range(2):
      ...     updates, state = tx.update(jnp.ones(2, jnp.bfloat16), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> state.master  # sgd on the parameters alone would stay at 1
      Array([0.998, 0.998], dtype=float32)
      >>> params
      Array([0.996094, 0.996094], dtype=bfloat16)

    References:
      Micikevicius et al., "Mixed Precision Training", 2018, section 3.1.
    """
    wide = _wide(dtype)
    checks.inner_optimizer(inner, ShardedOptimizer, "master_weights")

    def init(params: PyTree) -> MasterWeightsState:
        master = jax.tree.map(lambda p: p.astype(wide) if _narrow(p, wide) else optax.MaskedNode(), params)
        return MasterWeightsState(master, inner.init(_seen(params, master)))

    def update(
        grads: PyTree, state: MasterWeightsState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, MasterWeightsState]:
        if params is None:
            raise ValueError(
                "master_weights: update was called without params. Expected the current parameters, to which the "
                "update leads from. Fix: tx.update(grads, state, params)."
            )
        seen = _seen(params, state.master)
        grads = jax.tree.map(lambda g: g.astype(wide) if _narrow(g, wide) else g, grads)
        updates, inner_state = inner.update(grads, state.inner_state, seen, **accepted(inner, extra))
        new = lambda u, m, p: u if _none(m) else optax.apply_updates(m, u) - p.astype(wide)
        updates = jax.tree.map(new, updates, state.master, params)
        # Not `m + u`: what is rounded to the parameter and what is kept must be one and the same number.
        keep = lambda m, u, p: m if _none(m) else p.astype(wide) + u
        master = jax.tree.map(keep, state.master, updates, params, is_leaf=_none)
        return updates, MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _seen(params: PyTree, master: PyTree) -> PyTree:
    """The parameters as the inner optimizer sees them."""
    return jax.tree.map(lambda p, m: p if _none(m) else m, params, master)


def _none(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def _narrow(p: ArrayLike, wide: np.dtype) -> bool:
    dtype = jnp.result_type(p)
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize < wide.itemsize


def _wide(dtype: DTypeLike) -> np.dtype:
    try:
        found = jnp.dtype(dtype)
        fits = dtype is not None and bool(jnp.issubdtype(found, jnp.floating)) and found.itemsize >= 4
    except TypeError:
        fits = False
    if fits and jax.dtypes.canonicalize_dtype(found) != found:
        raise ValueError(
            f"master_weights: dtype={dtype!r}, but JAX makes {jax.dtypes.canonicalize_dtype(found)} of it. Expected "
            'jax_enable_x64. Fix: jax.config.update("jax_enable_x64", True), or dtype=jnp.float32.'
        )
    if not fits:
        raise ValueError(
            f"master_weights: dtype={dtype!r}. Expected a floating dtype of 32 bits or more, wider than the "
            "parameters. Fix: dtype=jnp.float32."
        )
    return found
