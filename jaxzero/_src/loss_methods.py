"""The operations of `Zero` on a user's functions: a loss, and any function of the parameters."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax.numpy as jnp

from .fsdp import observe as fsdp_observe
from .gradients import forward as gradients_forward
from .gradients import value_and_grad as gradients_value_and_grad
from .gradients.checks import How
from .sharding.options import Options


class LossMethods(Options):
    """Options, with what is done to functions of parameters."""

    def observe(
        self, loss_fn: Callable[..., Any], params: Any, *batch: Any, whole_argnums: int | Sequence[int] = ()
    ) -> Self:
        """A `Zero` that knows how a loss uses its parameters: which leaves a `scan` stacks.

        Traces only: nothing is computed or sent. A leaf whose every use is as the scanned operand of a
        `scan` is *stacked*: it is split inside each layer, and the scan's body gathers one layer.

        Args:
          loss_fn: The loss, as for `value_and_grad`.
          params: Parameters, whole or split, concrete or abstract.
          *batch: The rest of its arguments, global, concrete or abstract.
          whole_argnums: As for `value_and_grad`.

        Returns:
          The same options with `stacked` set and `observed.order`, `observed.unused` filled in.

        Raises:
          ValueError: If the loss uses no leaf of the parameters.

        Examples:
          >>> import jax, jax.numpy as jnp, jaxzero
          >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)), stage=3)
          >>> def loss(w, x):
          ...     return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])
          >>> zero = zero.observe(loss, jnp.ones((3, 16, 16)), jnp.ones((8, 16)))
          >>> zero.shard(jnp.ones((3, 16, 16))).addressable_shards[0].data.shape
          (3, 2, 16)
        """
        observed, stacked = fsdp_observe.observe(self, loss_fn, params, batch, _positions(whole_argnums))
        return dataclasses.replace(self, stacked=stacked, observed=observed)

    def value_and_grad(
        self,
        loss_fn: Callable[..., Any],
        has_aux: bool = False,
        *,
        accumulate: int = 1,
        accumulate_dtype: Any = jnp.float32,
        sync: str = "each",
        weighted: bool = False,
        whole_argnums: int | Sequence[int] = (),
        fold_keys: bool = True,
    ) -> Callable[..., Any]:
        """The mean loss over the whole global batch and its gradient, reduced as the stage prescribes.

        The loss is differentiated on each device's own examples (the local mean); the mean over devices
        is taken once, here. Mesh axis names are bound in it, so `lax.pmean` and
        `BatchNorm(axis_name=...)` have the whole-batch meaning; otherwise it sees one device's examples.

        Args:
          loss_fn: `loss_fn(params, *batch) -> loss`, the mean over examples, for one device; or
            `(loss, aux)` with `has_aux`.
          has_aux: Whether it returns aux. Floating leaves of aux are averaged over devices and micro-steps;
            other leaves must not depend on the device.
          accumulate: Into how many micro-batches each device's examples are cut; their gradients are added in
            a `scan`, and the replica hop comes once, after it.
          accumulate_dtype: Dtype in which they are added; wider ones keep their own.
          sync: At stage 2: ``"each"`` reduce-scatters every micro-step and adds shares, ``"once"`` adds whole
            local gradients and reduce-scatters once (`1/accumulate` of the bytes, whole gradients in memory).
          weighted: Whether the loss returns `(sum, weight)` instead of a mean. The result is the exact
            `sum/weight` over all devices and micro-steps and its gradient (the weight counts as constant); with
            a total weight of zero, a loss and gradients of zero.
          whole_argnums: Positions of arguments (the parameters are 0) that are given whole to every
            device: batch statistics, schedules. All others are cut on their leading dimension over all
            devices; scalars are whole.
          fold_keys: Whether a scalar typed key is folded with the device's index, so that dropout
            differs between devices. Arrays of keys are data and are cut. Keys named in `whole_argnums`
            are never folded.

        Returns:
          `grad_fn(params, *batch) -> (loss, grads)` or `((loss, aux), grads)`. Gradients are whole at
          stage 1 (all-reduce); from stage 2 on they are split: arrays cut in rows, or `EvenSplit`
          (reduce-scatter). At stage 3 each parameter is gathered where it is used, forward and backward.
          Inside a user's `shard_map` gradients are shares at every stage.

        Raises:
          ValueError: For a batch that does not divide, a loss that is no floating scalar, an aux leaf that
            depends on the device, parameters that are not at rest as this stage says, ordered effects.

        Examples:
          >>> import jax, jax.numpy as jnp, jaxzero
          >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)))
          >>> loss = lambda w, x: jnp.mean((x * w) ** 2)
          >>> value, grad = zero.value_and_grad(loss)(jnp.float32(3.0), jnp.ones(16))
          >>> float(value), float(grad)
          (9.0, 6.0)
        """
        how = How(bool(has_aux), accumulate, jnp.dtype(accumulate_dtype), sync, bool(weighted))
        how.check("value_and_grad", self.stage)
        self.needs_observed("value_and_grad")
        return gradients_value_and_grad.value_and_grad(
            self._options, loss_fn, how, _positions(whole_argnums), bool(fold_keys)
        )

    def forward(
        self,
        fn: Callable[..., Any],
        *,
        whole_argnums: int | Sequence[int] = (),
        fold_keys: bool = True,
    ) -> Callable[..., Any]:
        """A function of the parameters, without gradients: evaluation, generation.

        Each device runs `fn` on its own examples. At stage 3 parameters are gathered where they are used,
        once per use, and dropped again, as in `value_and_grad`: `M(N-1)/N` bytes per device if each is
        used once. Nothing is kept between calls, so results are those of the parameters given.

        Args:
          fn: `fn(params, *batch)`, written for one device and full parameters; returns any tree.
          whole_argnums: As for `value_and_grad`.
          fold_keys: As for `value_and_grad`.

        Returns:
          `f(params, *batch)`. Results whose leading dimension counts a device's examples are joined over
          devices, floating scalars are averaged, results that do not depend on the device are whole.
          Inside a user's `shard_map` examples stay on their device.

        Raises:
          ValueError: For a result that depends on the device and is none of these, and as `value_and_grad`.

        Examples:
          >>> import jax, jax.numpy as jnp, jaxzero
          >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)), stage=3)
          >>> params = zero.shard({"w": jnp.ones((5, 3))})
          >>> logits = zero.forward(lambda p, x: x @ p["w"])(params, jnp.ones((16, 5)))
          >>> logits.shape, float(logits.sum())
          ((16, 3), 240.0)
        """
        return gradients_forward.forward(self._options, fn, _positions(whole_argnums), bool(fold_keys))

    @property
    def _options(self) -> Options:
        """The options alone: equal ones share compiled programs."""
        return Options(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Options)})


def _positions(whole_argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (whole_argnums,) if isinstance(whole_argnums, int) else tuple(whole_argnums)
