"""The `Zero` object: options, and the operations on training state that they govern."""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

from .comm import placement
from .optimizer import checks, wrapper
from .report_methods import ReportMethods


@dataclasses.dataclass(frozen=True)
class Zero(ReportMethods):
    """Training state split over a mesh, with the numbers of the unsharded run (ZeRO stages 1, 2 and 3).

    The inner optimizer is traced at full, unsharded shapes and the traced program is evaluated on even
    shares, so any Optax optimizer is exact: norms, masks, factored moments and random draws mean what
    they mean without sharding. With `N` shares and `M` bytes of parameters, one step sends per device

    * stage 1: an all-reduce of gradients `2M(N-1)/N` and an all-gather of new parameters `M(N-1)/N`;
    * stage 2: a reduce-scatter of gradients `M(N-1)/N` and the same all-gather;
    * stage 3: two all-gathers, forward and backward, and a reduce-scatter, each `M(N-1)/N`;
    * with `replica_axis` (MiCS): the same inside a group, and one all-reduce of the share, `2(M/N)(R-1)/R`.

    Optimizer state takes `1/N` per device, at stage 2 gradients too, at stage 3 parameters too.

    Args:
      mesh: A `jax.sharding.Mesh`, all Auto or all Explicit, with any further axes. May be left out where every
        call stands inside a `shard_map`.
      stage: 1 (optimizer state split), 2 (gradients too) or 3 (parameters too, gathered on use).
      shard_axis: Mesh axis, or tuple of axes (outer first), over which state is split.
      replica_axis: Mesh axis or axes over which the split state is repeated, or `None`.
      hierarchical: For a tuple of shard axes such as `("node", "local")`: gathers go across nodes first, then
        inside the node, reduce-scatters the other way round. Groups of `p` devices on nodes of `k` then bring
        `M(p-k)/p` bytes into a node, not `M(p-1)/p`, for one more copy of each leaf. `None`: for every tuple;
        `False`: one flat collective over all of them.
      bucket_bytes: Leaves smaller than this travel together, in collectives of about this many bytes;
        `None`: every leaf alone. Numbers and storage do not depend on it.
      reduce_dtype: Dtype in which gradients are summed; `None`: float32, or a leaf's own if wider.
      predivide: What gradients are divided by before they are summed; the rest of the division follows. `None`: the
        whole number of summands where `reduce_dtype` has 16 bits, so that sums cannot overflow, and 1 elsewhere.
        Small float16 gradients vanish when divided by it; about its square root is the usual middle way.
      stacked: A predicate on key paths: leaves whose leading axis counts layers, split inside each.
        `observe` finds them.
      param_specs: How other mesh axes shard the parameters already (tensor parallelism): a tree of
        `PartitionSpec`s like them, such as `jax.tree.map(lambda x: x.sharding.spec, params)` or what
        `flax.linen.get_partition_spec` and `flax.nnx.get_partition_spec` give, or a function of (key path,
        abstract leaf). A leaf is cut along its first dimension that none of these axes shards, padded to a multiple
        of `N`; one that has none is not cut. The axes stay with the compiler, in losses too.
      prefetch: Stage 3: how many large gathers may run ahead of the computation; 0 takes least memory.
      persist_bytes: Stage 3: parameters up to this size, in bytes, stay whole from their first use to the end
        of the backward pass.
      chunk_bytes: Stage 3: smaller parameters, in order of first use, travel together in gathers and
        reduce-scatters of about this many bytes; `None`: every one alone.
      regather: Stage 3 with `shard_axis=("node", "local")`: ``"local"`` keeps of each large parameter the `1/k` that
        a device fetched from other nodes (`k` devices in a node) until the backward pass, which then gathers inside
        the node only (hpZ of ZeRO++). Costs `M/k` bytes per device, saves half of what crosses nodes.
      unused: What becomes of parameters that the observed loss does not use: ``"zero"`` gives them a zero
        gradient, as JAX does (decay and momentum go on); ``"skip"`` leaves them and their state untouched;
        ``"error"`` makes `observe` refuse them by name.
      offload: What rests in the host's memory (`pinned_host`) between uses: ``("state",)``, ``("state", "params")``
        or ``()``. `apply` fetches state bucket by bucket and sends it back; at stage 3 each share of a parameter is
        fetched before its gather. Numbers do not change. Scalars and small whole arrays stay on the device.
      observed: What `observe` found.

    Raises:
      ValueError: For an option or axis that is unknown or out of range, with the nearest known one.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxzero
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> zero = jaxzero.Zero(mesh, stage=2)
      >>> tx = zero.optimizer(optax.adamw(1e-2))
      >>> params = {"w": jnp.ones((5, 3)), "b": jnp.zeros(3)}
      >>> loss = lambda p, x: jnp.mean((x @ p["w"] + p["b"]) ** 2)
      >>> state = tx.init(params)
      >>> value, grads = zero.value_and_grad(loss)(params, jnp.ones((16, 5)))
      >>> params, state = zero.apply(tx, grads, state, params)
      >>> float(params["w"][0, 0]) < 1
      True

    References:
      Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020;
      Zhang et al., "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud", 2022.
    """

    def optimizer(
        self, inner: optax.GradientTransformation, *, grads: str = "local"
    ) -> optax.GradientTransformationExtraArgs:
        """Wraps any Optax optimizer: its state is split, its updates are those of the unsharded run.

        `init` and `update` are as Optax defines them. In the global view `update` takes gradients that
        are the mean over the whole batch, whole or split. Inside a user's `shard_map` each leaf is read
        as what it is: share-shaped is reduced and split, full and varying is this device's own and is
        reduced as the stage prescribes. State keeps the inner optimizer's tree; its arrays are plain,
        `1/N` per device. Put the wrapper outermost: `zero.optimizer(optax.chain(clip, adamw))`.

        Args:
          inner: An `optax.GradientTransformation`, with or without extra arguments.
          grads: ``"reduced"`` says that full gradients inside `shard_map` are the mean over all devices
            already; ``"local"`` that they are this device's own.

        Returns:
          An `optax.GradientTransformationExtraArgs`. Communication: that of the stage, and what
          `explain` prints for the inner optimizer.

        Raises:
          ValueError: By leaf path, for gradients or state that do not fit.

        Examples:
          >>> import jax, jax.numpy as jnp, optax, jaxzero
          >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)))
          >>> tx = zero.optimizer(optax.lamb(1e-2))
          >>> state = tx.init({"w": jnp.ones((16, 4))})
          >>> state[0].mu["w"].addressable_shards[0].data.shape
          (2, 4)
        """
        if grads not in ("local", "reduced"):
            raise ValueError(
                f"optimizer: grads={grads!r}. Expected 'local' or 'reduced'. Fix: grads='reduced' where "
                "full gradients inside shard_map are the mean over devices already."
            )
        return wrapper.wrap(self, inner, grads == "reduced")

    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """Parameters from `init_fn(*args)`, born as they rest: at stage 3 no device ever holds them whole.

        Args:
          init_fn: Returns a tree of parameters.
          *args: Its arguments.

        Returns:
          The tree, replicated over the mesh; at stage 3 split. Sends nothing.

        Examples:
          >>> import jax, jax.numpy as jnp, jaxzero
          >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)))
          >>> params = zero.init(lambda key: {"w": jax.random.normal(key, (3, 2))}, jax.random.key(0))
          >>> params["w"].sharding.is_fully_replicated
          True
        """
        return placement.born(self, init_fn, *args)

    def shard(self, params: Any) -> Any:
        """Parameters as they rest between steps: whole on every device; at stage 3 each leaf split.

        Args:
          params: A tree of arrays in any placement; leaves that are split already are kept.

        Returns:
          The same tree, replicated over the mesh; at stage 3 arrays cut in rows, or `EvenSplit` leaves.

        Examples:
          >>> import jax, jax.numpy as jnp, jaxzero
          >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)), stage=3)
          >>> zero.shard({"b": jnp.ones(3)})
          {'b': EvenSplit(shape=(3,), stored=float32[8])}
        """
        return placement.shard(self, params)

    def gather(self, tree: Any) -> Any:
        """Plain full arrays from a tree in split form (parameters or gradients); one gather per leaf.

        Args:
          tree: Plain arrays and `EvenSplit` leaves.

        Returns:
          The same tree with logical shapes, replicated over the mesh.

        Examples:
          >>> import jax, jax.numpy as jnp, jaxzero
          >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)))
          >>> loss = lambda p, x: jnp.mean(x * p.sum())
          >>> _, grad = zero.value_and_grad(loss)(jnp.ones(3), jnp.ones(8))
          >>> grad
          EvenSplit(shape=(3,), stored=float32[8])
          >>> zero.gather(grad)
          Array([1., 1., 1.], dtype=float32)
        """
        return placement.gather(self, tree)

    def specs(self, tree: Any) -> Any:
        """`PartitionSpec`s of a tree in split form, for a user's own `shard_map`; sends nothing.

        Args:
          tree: Optimizer state of `tx.init`, split gradients or parameters; concrete or abstract. A
            leaf that carries a `NamedSharding` keeps its spec; else the stored shape decides.

        Returns:
          A tree of the same structure with a `PartitionSpec` per array.

        Examples:
          >>> import jax, jax.numpy as jnp, optax, jaxzero
          >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)))
          >>> state = zero.optimizer(optax.sgd(0.1, momentum=0.9)).init({"w": jnp.ones((16, 4))})
          >>> zero.specs(state)[0].trace["w"] == jax.sharding.PartitionSpec("data")
          True
        """
        return placement.specs(self, tree)

    def apply(self, tx: Any, grads: Any, opt_state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        """One optimizer step: update, add and cast on the share, then gather the new parameters once.

        Equal to `optax.apply_updates(params, tx.update(...)[0])`, with less temporary memory and, for
        parameters narrower than the state, fewer bytes: nothing whole but the new parameters exists.

        Args:
          tx: What `zero.optimizer` returned.
          grads: As for `tx.update`.
          opt_state: The state of `tx.init`.
          params: The parameters.
          **extra: Extra arguments of the inner `update` (`value=`, `value_fn=`, ...).

        Returns:
          `(new params, new state)`, placed as the old ones. Leaves that are not floating come back
          as they are.

        Raises:
          ValueError: If `tx` is not the wrapped optimizer itself.

        Examples:
          >>> import jax, jax.numpy as jnp, optax, jaxzero
          >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)))
          >>> tx = zero.optimizer(optax.sgd(0.5))
          >>> params = jnp.ones(3)
          >>> params, state = zero.apply(tx, jnp.ones(3), tx.init(params), params)
          >>> params
          Array([0.5, 0.5, 0.5], dtype=float32)
        """
        checks.wrapped(tx, wrapper.ShardedOptimizer)
        return tx.calls.update("apply", grads, opt_state, params, extra)
