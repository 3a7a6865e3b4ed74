"""The operations of `Zero` that only look: at an optimizer, at parameters, at a compiled program."""

from typing import Any

import optax

from .analysis import memory as analysis_memory
from .analysis import plan as analysis_plan
from .analysis import verify as analysis_verify
from .analysis.memory import Memory
from .analysis.plan import Plan
from .analysis.verify import Verification
from .loss_methods import LossMethods
from .optimizer import wrapper
from .partition.record import Report


class ReportMethods(LossMethods):
    """Options and the operations on functions, with the reports; none of them computes or sends anything."""

    def explain(self, inner: optax.GradientTransformation, params: Any) -> Report:
        """What the partitioner does with each equation of `inner.update`, and what it costs.

        Traces only: nothing is computed or sent. Gradients are taken as split, as `value_and_grad` gives
        them; the collectives of the stage itself come on top. With `param_specs` the update is compiled too, which
        shows what it moves over the other mesh axes.

        Args:
          inner: The optimizer, not wrapped.
          params: Parameters, concrete or abstract.

        Returns:
          A `Report`; `print` it.

        Examples:
          >>> import jax, jax.numpy as jnp, optax, jaxzero
          >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)))
          >>> report = zero.explain(optax.adam(1e-3), {"w": jnp.ones((16, 4))})
          >>> len(report.crossings)
          0
        """
        return wrapper.Calls(self, inner, False).report(params)

    def plan(
        self,
        params: Any,
        inner: optax.GradientTransformation | None = None,
        *,
        accumulate: int = 1,
        sync: str = "each",
    ) -> Plan:
        """What each device will hold and send: memory at rest at every stage, traffic per step and mesh axis.

        Traces only: nothing is allocated, compiled or sent, and the mesh may be a `jax.sharding.AbstractMesh`. At
        stage 3 traffic follows the loss that `observe` saw; without one each parameter is taken to be used once
        forward and once backward.

        Args:
          params: Parameters, whole or split, concrete or abstract.
          inner: The optimizer, not wrapped; without one its state is missing.
          accumulate: As for `value_and_grad`.
          sync: As for `value_and_grad`.

        Returns:
          A `Plan`: `print` it, or `to_dict()`, or `plot()`.

        Raises:
          ValueError: For parameters without leaves or with leaves that are no arrays, and as `value_and_grad`.

        Examples:
          >>> import jax, jax.numpy as jnp, optax, jaxzero
          >>> zero = jaxzero.Zero(jax.sharding.AbstractMesh((8,), ("data",)), stage=2)
          >>> plan = zero.plan({"w": jax.ShapeDtypeStruct((1024, 512), jnp.float32)}, optax.adamw(1e-3))
          >>> [row.total for row in plan.at_rest]
          [8388612, 4718596, 2883588, 1048580]
        """
        return analysis_plan.make(self._options, params, inner, accumulate, sync)

    def memory(self, compiled: Any) -> Memory:
        """What a compiled program needs of each device's memory, as XLA says; sends nothing.

        Args:
          compiled: What `jax.jit(f).lower(*args).compile()` returned, for devices that are here or not.

        Returns:
          A `Memory`, in bytes per device; `print` it.

        Raises:
          ValueError: If `compiled` is no compiled program.

        Examples:
          >>> import jax, jax.numpy as jnp, jaxzero
          >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)), stage=3)
          >>> params = zero.shard({"w": jnp.ones((64, 64))})
          >>> step = jax.jit(zero.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2)))
          >>> memory = zero.memory(step.lower(params, jnp.ones((8, 64))).compile())
          >>> memory.arguments  # an eighth of the parameters and of the batch
          2304
        """
        return analysis_memory.memory(compiled)

    def verify(
        self,
        compiled: Any,
        params: Any,
        inner: optax.GradientTransformation | None = None,
        *,
        accumulate: int = 1,
        sync: str = "each",
        donated: bool = True,
    ) -> Verification:
        """Proves that a compiled training step does what its plan promises, or raises; sends nothing.

        Reads the program that XLA made: bytes sent per kind and mesh axis; that stage 3 gathers stacked layers in their
        loop; that no state, and at stage 3 no parameter, is whole on every device; that donated memory is reused. The
        step is one of `value_and_grad` and `apply`, or does by hand what they do, in or outside `shard_map`. Stage 3
        is checked against the loss that `observe` saw; without one only what is missing shows, not what is too much.
        Programs for TPUs show gathers and reduce-scatters as all-reduces and send bfloat16 for float32, so there only
        the sum of traffic per axis is checked, up to what all-reduces in their place would send: whole gradients that
        are summed at stage 2 do not show.

        Args:
          compiled: What `jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()` returned, or its `as_text()`.
          params: The parameters that the step takes, whole or split, concrete or abstract.
          inner: The optimizer, not wrapped. Without one its collectives are not expected and the sum of state is
            not checked; each leaf of state is.
          accumulate: As for `value_and_grad`.
          sync: As for `value_and_grad`.
          donated: Whether parameters and state are donated.

        Returns:
          A `Verification`: what was promised and found (`print` it), and all collectives.

        Raises:
          ValueError: With a table of promised and found: a promised collective is missing, one that nobody promised is
            there, a donated buffer was not reused, memory at rest is above the plan. Also for a program without text,
            or for other devices or parameters.

        Examples:
          >>> import jax, jax.numpy as jnp, optax, jaxzero
          >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)))
          >>> tx = zero.optimizer(optax.adam(1e-3))
          >>> params = zero.shard({"w": jnp.ones((64, 64))})
          >>> def step(params, state, x):
          ...     _, grads = zero.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2))(params, x)
          ...     return zero.apply(tx, grads, state, params)
          >>> step = jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), jnp.ones((8, 64))).compile()
          >>> print(zero.verify(step, params, optax.adam(1e-3)))
          per device                            promised      found
          all-gather over data                  14.34 kB   14.34 kB  ok
          reduce-scatter over data              14.34 kB   14.34 kB  ok
          parameters and state at rest          20.48 kB   20.48 kB  ok
          memory of donated arguments, reused   20.48 kB   20.48 kB  ok
        """
        return analysis_verify.verify(self._options, compiled, params, inner, accumulate, sync, donated)
