"""The `Zero` object: options, and the operations on training state that they govern."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax

from ._types import PyTree
from .analysis.compiler_options import compiler_options
from .analysis.explain import Report, explain
from .analysis.memory import Memory, memory
from .analysis.plan import Plan
from .analysis.planner import make_plan
from .analysis.verify import Verification, verify, verify_hidden
from .comm.placement import gather, outside, shard, specs
from .fsdp.init import init_sharded
from .fsdp.observe import observe
from .gradients.aux import hashable
from .gradients.checks import GradOptions
from .gradients.forward import forward
from .gradients.value_and_grad import value_and_grad
from .optimizer.gather_state import gather_state
from .optimizer.measure import measure
from .optimizer.wrapper import apply, wrap
from .sharding.options import Options, plain_options, require_observed
from .sharding.scalars import positions


@dataclasses.dataclass(frozen=True)
class Zero(Options):
    """Training state split over a mesh, with the numbers of the unsharded run (ZeRO stages 1, 2 and 3).

    The inner optimizer is traced at full, unsharded shapes and the traced program is evaluated on even shares, so any
    Optax optimizer is exact: norms, masks, factored moments and random draws mean what they mean without sharding.
    With `N` shares and `M` bytes of parameters, one step sends per device

    * stage 1: an all-reduce of gradients `2M(N-1)/N` and an all-gather of new parameters `M(N-1)/N`;
    * stage 2: a reduce-scatter of gradients `M(N-1)/N` and the same all-gather;
    * stage 3: two all-gathers, forward and backward, and a reduce-scatter, each `M(N-1)/N`;
    * with `replica_axis` (MiCS): the same inside a group, and one all-reduce of the share, `2(M/N)(R-1)/R`.

    Args:
      mesh: A `jax.sharding.Mesh`, all Auto or all Explicit; may be left out where every call is inside a `shard_map`.
      stage: 1 (optimizer state split), 2 (gradients too) or 3 (parameters too, gathered on use).
      shard_axis: Mesh axis, or tuple of axes (outer first), over which state is split.
      replica_axis: Mesh axis or axes over which the split state is repeated, or `None`.
      hierarchical: For a tuple of shard axes such as `("node", "local")`: gathers go across nodes, then inside the
        node, reduce-scatters the other way round. `p` devices on nodes of `k` then bring `M(p-k)/p` bytes into a node,
        not `M(p-1)/p`, for one more copy of each leaf. `None`: for every tuple; `False`: one flat collective.
      bucket_bytes: Leaves smaller than this travel together, in collectives of about this many bytes;
        `None`: every leaf alone. Numbers and storage do not depend on it.
      deal: Whether work on whole matrices (Muon, Shampoo) is dealt out, each matrix to one device; `explain` shows it.
      reduce_dtype: Dtype in which gradients are summed; `None`: float32, or a leaf's own if wider.
      predivide: What gradients are divided by before they are summed; the rest follows. `None`: the number of summands
        where `reduce_dtype` has 16 bits, so that sums cannot overflow (its square root keeps small ones), 1 elsewhere.
      stacked: A predicate on key paths: leaves whose leading axis counts layers, cut inside each; `observe` finds them.
      param_specs: How other mesh axes shard the parameters already (tensor parallelism): a tree of `PartitionSpec`s
        like them, such as `jax.tree.map(lambda x: x.sharding.spec, params)` or what `flax.linen.get_partition_spec` and
        `flax.nnx.get_partition_spec` give, or a function of (key path, abstract leaf). A leaf is cut along its first
        dimension that none of these axes shards, padded to a multiple of `N`; a leaf without such a dimension is not
        cut. The axes stay with the compiler, in losses too.
      overwrite: A predicate on key paths: leaves whose gradient is their next value (scales and maxima of FP8): the
        largest over devices and microbatches. `None`: the leaves of Flax's collection ``_overwrite_with_gradient``.
      prefetch: Stage 3: how many large gathers may run ahead of the computation; 0 takes least memory.
      persist_bytes: Stage 3: parameters of up to so many bytes (a stack with all layers) stay whole within a step.
      chunk_bytes: Stage 3: smaller parameters, in order of first use, travel together in collectives of about this
        many bytes; `None`: every one alone.
      regather: Stage 3: ``"never"`` keeps what the forward pass has gathered whole until the end of the backward pass:
        one gather per step, for `M` bytes. ``"local"``, for `shard_axis=("node", "local")`, keeps `1/k` of it (`k`
        devices in a node); the backward pass gathers inside the node only (hpZ of ZeRO++).
      unused: How parameters that the observed loss does not use are treated: ``"zero"`` gives them a zero gradient, as
        JAX does (decay and momentum go on); ``"skip"`` leaves them and their state untouched, and `value_and_grad`
        refuses another loss, which uses them; ``"error"`` makes `observe` refuse them by name.
      offload: What is kept in the host's memory (`pinned_host`) between uses: ``("state",)``, ``("state", "params")``
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

        `init` and `update` are as in Optax. In the global view `update` takes gradients that are means over the whole
        batch, whole or split. Inside a user's `shard_map` a share-shaped leaf is already reduced and split; a full leaf
        that varies is this device's own gradient and is reduced as the stage prescribes.
        State keeps the inner optimizer's tree; its arrays are plain, `1/N` per device. Put the wrapper outermost:
        `zero.optimizer(optax.chain(clip, adamw))`.

        Args:
          inner: An `optax.GradientTransformation`, with or without extra arguments.
          grads: ``"reduced"`` says that full gradients inside `shard_map` are the mean over all devices
            already; ``"local"`` that they are this device's own.

        Returns:
          An `optax.GradientTransformationExtraArgs`. Communication: that of the stage, and what `explain` prints.

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
        return wrap(self, inner, grads == "reduced")

    def init(self, init_fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
        """Parameters from `init_fn(*args)`, made as they are stored: at stage 3 no device ever holds them whole.

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
        return init_sharded(self, init_fn, *args)

    def shard(self, params: PyTree) -> PyTree:
        """Parameters as they are stored between steps: whole on every device; at stage 3 each leaf split.

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
        return shard(self, params)

    def gather(
        self,
        tree: PyTree,
        *,
        like: PyTree = None,
        optimizer: optax.GradientTransformation | None = None,
        host: bool = False,
    ) -> PyTree:
        """Plain full arrays from a tree in split form; one gather per leaf.

        Parameters and gradients show their logical shapes. Optimizer state holds plain arrays, some of them flat and
        padded, so it needs `like`: the parameters.

        Args:
          tree: Plain arrays and `EvenSplit` leaves; with `like` optimizer state, or a part of it that is a tree like
            the parameters (`state[0].mu`).
          like: The parameters, whole, split or abstract.
          optimizer: What made the state, wrapped or not. For state with leaves that are not shaped like parameters
            (Adafactor, Shampoo); `tree` is then all of the state.
          host: Whether to return NumPy arrays; then no device holds a whole leaf (in one process).

        Returns:
          The same tree with logical shapes, replicated over the mesh, or on the host.

        Raises:
          ValueError: For optimizer state without `like`, where its type or placement shows it; for a leaf of state
            whose logical shape is not known.

        Examples:
          >>> import jax, jax.numpy as jnp, optax, jaxzero
          >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)))
          >>> loss = lambda p, x: jnp.mean(x * p.sum())
          >>> _, grad = zero.value_and_grad(loss)(jnp.ones(3), jnp.ones(8))
          >>> grad
          EvenSplit(shape=(3,), stored=float32[8])
          >>> zero.gather(grad)
          Array([1., 1., 1.], dtype=float32)
          >>> state = zero.optimizer(optax.adam(1e-3)).init(jnp.ones(3))
          >>> state[0].mu.shape, zero.gather(state, like=jnp.ones(3))[0].mu.shape
          ((8,), (3,))
        """
        if like is not None:
            return gather_state(self, tree, like, optimizer, host)
        if optimizer is not None:
            raise ValueError(
                "gather: optimizer= without like=. Expected the parameters too, which show logical shapes. Fix: "
                "zero.gather(state, like=params, optimizer=tx)."
            )
        if host:
            outside(self, "gather")
            return gather_state(self, tree, tree, None, host)
        return gather(self, tree)

    def measure(self, f: Callable[..., PyTree], *trees: PyTree) -> PyTree:
        """Statistics of split trees, exact: `f` of full arrays, evaluated on shares.

        A split leaf may be padded, so `jnp.mean`, `x.size` and the like are wrong on what it stores. Here `f` is traced
        at logical shapes, as an optimizer is, and evaluated on the shares: sums are one number per device.

        Args:
          f: A function of trees of full arrays, such as `optax.tree.norm`; returns any tree, of scalars mostly.
          *trees: Parameters, gradients, updates, split or whole. For optimizer state pass
            `zero.gather(state, like=params)`.

        Returns:
          What `f` returns, equal on all devices; called eagerly it is compiled at each call. Inside a user's
          `shard_map` too, where a plain leaf that varies over the shard axis is this device's rows.

        Raises:
          ValueError: For optimizer state, where it shows; inside `shard_map` for a gradient that is not reduced.

        Examples:
          >>> import jax, jax.numpy as jnp, jaxzero
          >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)), stage=3)
          >>> params = zero.shard({"w": jnp.ones((5, 3)), "b": jnp.ones(3)})  # 15 of 16 and 3 of 8 stored elements
          >>> means = zero.measure(lambda p: jax.tree.map(jnp.mean, p), params)
          >>> float(means["w"]), float(means["b"])
          (1.0, 1.0)
        """
        return measure(self, f, trees)

    def specs(self, tree: PyTree) -> PyTree:
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
        return specs(self, tree)

    def value_and_grad(  # noqa: PLR0913 - as `jax.value_and_grad`, with an option for each choice of the user
        self,
        loss_fn: Callable[..., PyTree],
        has_aux: bool = False,
        *,
        accumulate: int = 1,
        accumulate_dtype: jax.typing.DTypeLike = jnp.float32,
        sync: str = "each",
        weighted: bool = False,
        aux: Any = None,
        whole_argnums: int | Sequence[int] = (),
        fold_keys: bool = True,
    ) -> Callable[..., PyTree]:
        """The mean loss over the whole global batch and its gradient, reduced as the stage prescribes.

        The loss is differentiated on each device's own examples (the local mean); the mean over devices is taken once,
        here. Mesh axis names are bound in it, so `lax.pmean` and `BatchNorm(axis_name=...)` mean the whole batch.

        Args:
          loss_fn: `loss_fn(params, *batch) -> loss`, the mean over examples, for one device; or
            `(loss, aux)` with `has_aux`.
          has_aux: Whether it returns aux. A leaf of aux whose leading dimension grows with the number of examples
            (logits, losses per example) comes back whole and in order, cut over the devices as the batch is; other
            floating leaves are averaged over devices and micro-steps, statistics and maxima too; what is left must
            not depend on the device. `aux` says otherwise.
          accumulate: Into how many micro-batches each device's examples are cut; their gradients are added in
            a `scan`, and the replica hop comes once, after it. Keys are folded with the number of the
            micro-batch too, so dropout with `accumulate=2` draws other values than with `accumulate=1`.
          accumulate_dtype: Dtype in which they are added; wider ones keep their own.
          sync: At stage 2: ``"each"`` reduce-scatters every micro-step and adds shares, ``"once"`` adds whole
            local gradients and reduce-scatters once (`1/accumulate` of the bytes, whole gradients in memory).
          weighted: Whether the loss returns `(sum, weight)` instead of a mean. The result is the exact
            `sum/weight` over all devices and micro-steps and its gradient (the weight counts as constant); with
            a total weight of zero, a loss and gradients of zero.
          aux: How leaves of aux are joined over devices and micro-steps, where the default does not fit: ``"mean"``,
            ``"concat"`` (along the leading dimension), ``"max"`` or ``"sum"``, for all leaves; or a tree of these like
            aux or a part of it; or a function of (key path, abstract leaf). `None`, for a leaf too: the default.
          whole_argnums: Positions of arguments (the parameters are 0) that are given whole to every device, by position
            or by keyword: tables, schedules. All others are cut on their leading dimension, which they must have in
            common, over all devices; scalars are whole.
          fold_keys: Whether a scalar typed key is folded with the device's index, so that dropout differs between
            devices. Arrays of keys are data and are cut. Keys named in `whole_argnums` are never folded.

        Returns:
          `grad_fn(params, *batch) -> (loss, grads)` or `((loss, aux), grads)`. Gradients are whole at stage 1
          (all-reduce); from stage 2 on they are split: arrays cut in rows, or `EvenSplit` (reduce-scatter). At stage 3
          each parameter is gathered where it is used, forward and backward. Inside a user's `shard_map` gradients are
          shares at every stage. Leaves of integer, bool or key dtype and empty ones are no error, as they are for
          `jax.grad`: their gradient is zeros (of a key, `float0`); `apply` and the optimizer leave them unchanged.

        Raises:
          ValueError: For a batch that does not divide, arrays with different numbers of examples, a loss that is no
            floating scalar, an aux leaf of which cannot be told how it is joined, parameters that are not stored as
            this stage says, ordered effects.

        Examples:
          >>> import jax, jax.numpy as jnp, jaxzero
          >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)))
          >>> loss = lambda w, x: jnp.mean((x * w) ** 2)
          >>> value, grad = zero.value_and_grad(loss)(jnp.float32(3.0), jnp.ones(16))
          >>> float(value), float(grad)
          (9.0, 6.0)
        """
        joins = hashable("value_and_grad", aux)
        how = GradOptions(bool(has_aux), accumulate, accumulate_dtype, sync, bool(weighted), joins)
        how.check("value_and_grad", self.stage)
        require_observed(self, "value_and_grad")
        return value_and_grad(plain_options(self), loss_fn, how, positions(whole_argnums), bool(fold_keys))

    def forward(
        self,
        fn: Callable[..., PyTree],
        *,
        whole_argnums: int | Sequence[int] = (),
        fold_keys: bool = True,
    ) -> Callable[..., PyTree]:
        """A function of the parameters, without gradients: evaluation, generation.

        Each device runs `fn` on its own examples. At stage 3 parameters are gathered where they are used, once per use,
        and dropped again, as in `value_and_grad`: `M(N-1)/N` bytes per device if each is used once.

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
        return forward(plain_options(self), fn, positions(whole_argnums), bool(fold_keys))

    def apply(self, tx: Any, grads: PyTree, opt_state: PyTree, params: PyTree, **extra: Any) -> tuple[PyTree, PyTree]:
        """One optimizer step: update, add and cast on the share, then gather the new parameters once.

        Equal to `optax.apply_updates(params, tx.update(...)[0])`, with less temporary memory and, for narrow
        parameters, fewer bytes: nothing whole but the new parameters exists.

        Args:
          tx: What `zero.optimizer` returned; or `optax.inject_hyperparams`, or `optax.multi_transform` with fixed
            labels, around that.
          grads: As for `tx.update`.
          opt_state: The state of `tx.init`.
          params: The parameters.
          **extra: Extra arguments of the inner `update` (`value=`, `value_fn=`, ...).

        Returns:
          `(new params, new state)`, placed as the old ones. Leaves that are not floating come back as they are.

        Raises:
          ValueError: If `tx` is not the wrapped optimizer, and does more than hand gradients and updates on.

        Examples:
          >>> import jax, jax.numpy as jnp, optax, jaxzero
          >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)))
          >>> tx = zero.optimizer(optax.sgd(0.5))
          >>> params = jnp.ones(3)
          >>> params, state = zero.apply(tx, jnp.ones(3), tx.init(params), params)
          >>> params
          Array([0.5, 0.5, 0.5], dtype=float32)
        """
        return apply(tx, grads, opt_state, params, extra)

    def observe(
        self,
        loss_fn: Callable[..., PyTree],
        params: PyTree,
        *batch: PyTree,
        whole_argnums: int | Sequence[int] = (),
        **named: PyTree,
    ) -> Self:
        """A `Zero` with a record of how a loss uses its parameters: which leaves a `scan` stacks.

        Traces only: nothing is computed or sent. A leaf whose every use is as the scanned operand of a `scan` is
        *stacked*: it is split inside each layer, and the scan's body gathers one layer.

        Args:
          loss_fn: The loss, as for `value_and_grad`.
          params: Parameters, whole or split, concrete or abstract.
          *batch: The rest of its arguments, global, concrete or abstract.
          whole_argnums: As for `value_and_grad`.
          **named: Arguments by keyword.

        Returns:
          The same options with `stacked` and `observed` filled in.

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
        observed, stacked = observe(self, loss_fn, params, batch, named, positions(whole_argnums))
        return dataclasses.replace(self, stacked=stacked, observed=observed)

    # --- reports: nothing is computed or sent ---

    def explain(self, inner: optax.GradientTransformation, params: PyTree, **extra: Any) -> Report:
        """What the partitioner does with each equation of `inner.update`, and what it costs.

        Traces only: nothing is computed or sent. Gradients are taken as split; the collectives of the stage come on
        top. With `param_specs` the update is compiled too, which shows what it moves over the other mesh axes.

        Args:
          inner: The optimizer, not wrapped.
          params: Parameters, concrete or abstract.
          **extra: What `inner.update` takes beside gradients, state and parameters, by name: `value`, `grad`,
            `value_fn`. Arrays may be abstract.

        Returns:
          A `Report`; `print` it.

        Raises:
          ValueError: For an extra argument that `inner.update` needs and does not get.

        Examples:
          >>> import jax, jax.numpy as jnp, optax, jaxzero
          >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)))
          >>> report = zero.explain(optax.adam(1e-3), {"w": jnp.ones((16, 4))})
          >>> len(report.crossings)
          0
        """
        return explain(self, inner, params, extra)

    def plan(
        self,
        params: PyTree,
        inner: optax.GradientTransformation | None = None,
        *,
        accumulate: int = 1,
        sync: str = "each",
    ) -> Plan:
        """What each device will hold and send: memory at rest at every stage, traffic per step and mesh axis.

        Traces only: nothing is allocated, compiled or sent, and the mesh may be a `jax.sharding.AbstractMesh`. At
        stage 3 traffic follows the loss that `observe` saw; without one each parameter is assumed to be used once
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
        return make_plan(plain_options(self), params, inner, accumulate, sync)

    def memory(self, compiled: jax.stages.Compiled) -> Memory:
        """The memory that a compiled program needs on each device, as XLA reports it; sends nothing.

        Args:
          compiled: What `jax.jit(f).lower(*args).compile()` returned, for devices that are here or not.

        Returns:
          A `Memory`, in bytes per device; `print` it.

        Raises:
          ValueError: If `compiled` is not a compiled program.

        Examples:
          >>> import jax, jax.numpy as jnp, jaxzero
          >>> zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)), stage=3)
          >>> params = zero.shard({"w": jnp.ones((64, 64))})
          >>> step = jax.jit(zero.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2)))
          >>> memory = zero.memory(step.lower(params, jnp.ones((8, 64))).compile())
          >>> memory.arguments  # an eighth of the parameters and of the batch
          2304
        """
        return memory(compiled)

    def compiler_options(self) -> dict[str, Any]:
        """XLA options of jax 0.10.2 for GPUs that hide collectives behind products: for `jax.jit(compiler_options=)`.

        Buckets stay apart, and two collectives may be on the wire at a time. Empty for CPUs and TPUs.
        """
        return compiler_options(plain_options(self))

    def verify(
        self,
        compiled: jax.stages.Compiled | str,
        params: PyTree,
        inner: optax.GradientTransformation | None = None,
        *,
        accumulate: int = 1,
        sync: str = "each",
        donated: bool = True,
        hidden: float | None = None,
    ) -> Verification:
        """Proves that a compiled training step does what its plan promises, or raises; sends nothing.

        Reads the program that XLA made: bytes sent per kind and mesh axis; that stage 3 gathers stacked layers in their
        loop; that no state, and at stage 3 no parameter, is whole on every device; that donated memory is reused. The
        step is one of `value_and_grad` and `apply`, or does by hand what they do, in or outside `shard_map`. Stage 3
        is checked against the loss that `observe` saw; without one only missing collectives are found, not extra ones.
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
          hidden: The least share of the bytes sent that stands behind matrix products, 0 to 1; on CPUs it is 0.

        Returns:
          A `Verification`: what was promised and found (`print` it), and all collectives.

        Raises:
          ValueError: With a table of promised and found: a promised collective is missing, one that was not promised is
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
          per device                           promised     found
          -----------------------------------------------------------
          all-gather over data                 14.34 kB  14.34 kB  ok
          reduce-scatter over data             14.34 kB  14.34 kB  ok
          parameters and state at rest         20.48 kB  20.48 kB  ok
          memory of donated arguments, reused  20.48 kB  20.48 kB  ok
        """
        done = verify(plain_options(self), compiled, params, inner, accumulate, sync, donated)
        return done if hidden is None else verify_hidden(done, plain_options(self), hidden)
