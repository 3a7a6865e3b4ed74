"""Training steps that keep what their plan promises, and eight that do not, compiled for the devices given.

Each is a function of devices that returns `(zero, options of verify, a function that compiles)`. Those of `HONEST`
must pass, those of `SABOTAGED` be refused with the message beside them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero

LAYERS, WIDTH, HIDDEN, VOCAB = 4, 64, 128, 131
PARAMS = {
    "emb": jax.ShapeDtypeStruct((VOCAB, WIDTH), jnp.float32),
    "head": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32),
    "layers": {
        "up": jax.ShapeDtypeStruct((LAYERS, WIDTH, HIDDEN), jnp.float32),
        "down": jax.ShapeDtypeStruct((LAYERS, HIDDEN, WIDTH), jnp.float32),
    },
}
INNER = optax.adamw(1e-3)
REPLICAS = dict(shard_axis="shard", replica_axis="replica")


def loss_fn(params: Any, tokens: Any) -> Any:
    """The mean next-token loss of a scan over layers between an embedding and a head of its own."""
    x = params["emb"][tokens[:, :-1]]

    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    x, _ = lax.scan(layer, x, params["layers"])
    logits = jnp.tanh(x @ params["head"])
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None] % HIDDEN, -1))


def flat(devices: Any) -> Mesh:
    return Mesh(devices[:8], ("data",))


def grouped(devices: Any) -> Mesh:
    return Mesh(devices[:8].reshape(2, 4), ("replica", "shard"))


def tokens_on(mesh: Mesh) -> Any:
    return jax.ShapeDtypeStruct((16, 9), jnp.int32, sharding=NamedSharding(mesh, P(mesh.axis_names)))


def make(mesh: Mesh, **options: Any) -> jaxzero.Zero:
    zero = jaxzero.Zero(mesh, **options)
    return zero.observe(loss_fn, PARAMS, tokens_on(mesh)) if zero.stage == 3 else zero


def placed(mesh: Mesh, tree: Any, specs: Any) -> Any:
    put = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    return jax.tree.map(put, tree, specs)


def at_rest(zero: jaxzero.Zero) -> tuple[Any, Any]:
    """Abstract parameters and state of `INNER`."""
    params = jax.eval_shape(zero.shard, PARAMS)
    whole = jax.tree.map(lambda _: P(), params)
    params = placed(zero.mesh, params, zero.specs(params) if zero.stage == 3 else whole)
    state = jax.eval_shape(zero.optimizer(INNER).init, params)
    return params, placed(zero.mesh, state, zero.specs(state))


def compiling(zero: jaxzero.Zero, step: Any, arguments: Any = None, donate: Any = (0, 1)) -> Any:
    """A function that compiles a step of parameters (by default those of `zero`, at rest), state and tokens."""

    def build() -> Any:
        params, state = at_rest(zero) if arguments is None else arguments()
        return jax.jit(step, donate_argnums=donate).lower(params, state, tokens_on(zero.mesh)).compile()

    return build


def plain_step(zero: jaxzero.Zero, accumulate: int = 1) -> Any:
    tx = zero.optimizer(INNER)

    def step(params: Any, state: Any, tokens: Any) -> Any:
        value, grads = zero.value_and_grad(loss_fn, accumulate=accumulate)(params, tokens)
        return *zero.apply(tx, grads, state, params), value

    return step


# --- what keeps its promise ----------------------------------------------------------------------


def plainly(devices: Any, *, accumulate: int = 1, replicas: bool = False, **options: Any) -> Any:
    zero = make(grouped(devices), **REPLICAS, **options) if replicas else make(flat(devices), **options)
    return zero, dict(accumulate=accumulate), compiling(zero, plain_step(zero, accumulate))


def in_a_region(zero: jaxzero.Zero, local: Any) -> Any:
    """`local(params, state, tokens)` in a `shard_map` of the user's."""

    def step(params: Any, state: Any, tokens: Any) -> Any:
        specs = zero.specs(state)
        split = jax.shard_map(local, mesh=zero.mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
        return split(params, state, tokens)

    return step


def inside_shard_map(devices: Any) -> Any:
    zero = make(flat(devices), stage=2)
    tx = zero.optimizer(INNER)

    def local(params: Any, state: Any, tokens: Any) -> Any:
        grads = jax.grad(loss_fn)(lax.pcast(params, "data", to="varying"), tokens)
        return zero.apply(tx, grads, state, params)

    return zero, {}, compiling(zero, in_a_region(zero, local))


#: From devices: the options, what else `verify` takes, and what compiles the step.
Make = Callable[..., tuple[jaxzero.Zero, dict[str, Any], Callable[[], Any]]]

HONEST: dict[str, Make] = {
    "stage 1": functools.partial(plainly, stage=1),
    "stage 2": functools.partial(plainly, stage=2),
    "stage 3": functools.partial(plainly, stage=3, persist_bytes=0),
    "stage 2, accumulated": functools.partial(plainly, stage=2, accumulate=2),
    "stage 3, accumulated": functools.partial(plainly, stage=3, accumulate=2, chunk_bytes=None),
    "MiCS, stage 2": functools.partial(plainly, stage=2, accumulate=2, replicas=True),
    "MiCS, stage 3": functools.partial(plainly, stage=3, accumulate=2, replicas=True),
    "in a shard_map": inside_shard_map,
}


# --- what does not -------------------------------------------------------------------------------


def psum_for_psum_scatter(devices: Any) -> Any:
    """The numbers are right: every device sums whole gradients and keeps its share."""
    zero, summing = make(flat(devices), stage=2), make(flat(devices), stage=1)
    tx = zero.optimizer(INNER)

    def step(params: Any, state: Any, tokens: Any) -> Any:
        value, grads = summing.value_and_grad(loss_fn)(params, tokens)
        return *zero.apply(tx, grads, state, params), value

    return zero, {}, compiling(zero, step)


def missing_pcast(devices: Any) -> Any:
    """Inside `shard_map` autodiff sums the gradients of parameters that do not vary; then they are summed again."""
    zero = make(flat(devices), stage=2, bucket_bytes=None)
    tx = zero.optimizer(INNER)

    def local(params: Any, state: Any, tokens: Any) -> Any:
        grads = jax.grad(loss_fn)(params, tokens)
        return zero.apply(tx, lax.pcast(grads, "data", to="varying"), state, params)

    return zero, {}, compiling(zero, in_a_region(zero, local))


def state_left_whole(devices: Any) -> Any:
    zero = make(flat(devices), stage=2)
    whole = lambda tree: placed(zero.mesh, tree, jax.tree.map(lambda _: P(), tree))

    def step(params: Any, state: Any, tokens: Any) -> Any:
        value, grads = zero.value_and_grad(loss_fn)(params, tokens)
        updates, state = INNER.update(zero.gather(grads), state, params)
        return optax.apply_updates(params, updates), state, value

    return zero, {}, compiling(zero, step, lambda: (whole(PARAMS), whole(jax.eval_shape(INNER.init, PARAMS))))


def second_hop_in_the_loop(devices: Any) -> Any:
    zero = make(grouped(devices), stage=2, **REPLICAS)
    tx = zero.optimizer(INNER)

    def step(params: Any, state: Any, tokens: Any) -> Any:
        halves = tokens.reshape(2, 8, 9)

        def micro(total: Any, half: Any) -> Any:
            _, grads = zero.value_and_grad(loss_fn)(params, half)
            return jax.tree.map(jnp.add, total, grads), None

        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(zero.value_and_grad(loss_fn), params, halves[0])[1])
        grads, _ = lax.scan(micro, zeros, halves)
        return zero.apply(tx, grads, state, params)

    return zero, dict(accumulate=2), compiling(zero, step)


def donation_lost(devices: Any) -> Any:
    zero = make(flat(devices), stage=2)
    return zero, {}, compiling(zero, plain_step(zero), donate=(0,))


def gathered_at_the_start(devices: Any) -> Any:
    zero, whole = make(flat(devices), stage=3), make(flat(devices), stage=2)
    tx = zero.optimizer(INNER)

    def step(params: Any, state: Any, tokens: Any) -> Any:
        _, grads = whole.value_and_grad(loss_fn)(zero.gather(params), tokens)
        return zero.apply(tx, zero.shard(whole.gather(grads)), state, params)

    return zero, {}, compiling(zero, step)


def leaf_replicated(devices: Any) -> Any:
    zero = make(flat(devices), stage=3)

    def arguments() -> Any:
        params, state = at_rest(zero)
        return {**params, "head": placed(zero.mesh, params["head"], P())}, state

    return zero, {}, compiling(zero, plain_step(zero), arguments)


def wrong_axis(devices: Any) -> Any:
    zero = make(grouped(devices), stage=2, **REPLICAS)
    other = make(grouped(devices), stage=2, shard_axis="replica", replica_axis="shard")
    return zero, {}, compiling(other, plain_step(other))


SABOTAGED: dict[str, tuple[Make, str]] = {
    "psum for psum_scatter": (
        psum_for_psum_scatter,
        r"all-reduce over data: not promised; reduce-scatter over data: missing. Fix: jax.lax.psum_scatter over",
    ),
    "missing pcast": (missing_pcast, r"(?s)all-reduce over data: not promised.*jax.lax.pcast\(params, \('data',\)"),
    "state left whole": (state_left_whole, r"(?s)layers/up at rest: whole on every device among .*mu\['layers'\]"),
    "second hop in the loop": (
        second_hop_in_the_loop,
        "(?s)all-reduce over replica: more than promised.*once, after the loop over micro-steps",
    ),
    "donation lost": (donation_lost, r"(?s)reused: not reused: state\[0\].mu.*donate_argnums=\(0, 1\)"),
    "gathered at the start": (gathered_at_the_start, "(?s)gathered outside the loop over layers.*no zero.gather"),
    "a leaf replicated": (leaf_replicated, r"(?s)head at rest: whole on every device among params\['head'\]"),
    "wrong axis": (wrong_axis, "(?s)reduce-scatter over replica: not promised.*reduce-scatter over shard: missing"),
}
