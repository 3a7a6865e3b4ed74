"""Models and losses of many kinds for stage 3, and the comparison of their gradients with the unsharded ones.

A module of its own, so that the float64 run in a fresh interpreter takes the same cases.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import checks
import chex
import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxzero

#: Meshes: one device, a world that divides little, one that divides much, sub-groups with replicas.
MESHES: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    "1": (1, ("data",), {}),
    "3": (3, ("data",), {}),
    "8": (8, ("data",), {}),
    "MiCS": ((2, 4), ("replica", "shard"), dict(shard_axis="shard", replica_axis="replica")),
}

#: Options that plan the gathers differently.
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "alone": dict(prefetch=0, persist_bytes=0, chunk_bytes=None),
    "chunks": dict(prefetch=1, persist_bytes=256, chunk_bytes=2048),
    "ahead": dict(persist_bytes=0, chunk_bytes=None),
}


class Case(NamedTuple):
    """A loss with what it takes; `batch` is dealt but for `whole`.

    Attributes:
      loss: `loss(params, *batch)`.
      params: Whole parameters.
      batch: The rest of its arguments, for all devices.
      whole: Positions of arguments that are given whole.
      aux: Whether it returns aux.
      unsharded: The same loss for one device, where that is another function (no mesh axis to name).
      like: The name of a case with the same numbers, whose unsharded run serves both.
    """

    loss: Callable[..., Any]
    params: Any
    batch: tuple[Any, ...]
    whole: tuple[int, ...] = ()
    aux: bool = False
    unsharded: Callable[..., Any] | None = None
    like: str | None = None


def make_zero(mesh: str, **options: Any) -> jaxzero.Zero:
    shape, names, fixed = MESHES[mesh]
    return jaxzero.Zero(helpers.make_mesh(shape, names), stage=3, **fixed | options)


def x64() -> bool:
    return bool(jax.config.read("jax_enable_x64"))


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), np.float64 if x64() else np.float32)


def examples(seed: int = 1, *shape: int) -> jax.Array:
    return normal(seed, 24, *shape)


def tokens(vocab: int, length: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).integers(0, vocab, (24, length)))


# --- plain JAX -----------------------------------------------------------------------------------


def mlp_params() -> Any:
    sizes = (6, 16, 11, 3)
    return [
        {"w": normal(i, a, b, scale=0.5), "b": normal(i + 9, b, scale=0.1)}
        for i, (a, b) in enumerate(zip(sizes, sizes[1:], strict=False))
    ]


def mlp(p: Any, x: Any, wrap: Any = lambda f: f) -> Any:
    for layer in p[:-1]:
        x = wrap(lambda x, layer: jnp.tanh(x @ layer["w"] + layer["b"]))(x, layer)
    return x @ p[-1]["w"] + p[-1]["b"]


def mlp_loss(p: Any, x: Any, wrap: Any = lambda f: f) -> Any:
    return jnp.mean(jnp.square(mlp(p, x, wrap) - jnp.sin(x[:, :3])))


HEADS = 2


def gpt_params(layers: int = 2, width: int = 8, vocab: int = 37, length: int = 6) -> Any:
    scale = lambda seed, *shape: normal(seed, *shape, scale=shape[-2] ** -0.5 if len(shape) > 1 else 0.3)
    norm = lambda seed: {"g": 1 + scale(seed, width), "b": scale(seed + 1, width)}
    dense = lambda seed, a, b: {"w": scale(seed, a, b), "b": scale(seed + 1, b)}
    params = {"wte": scale(90, vocab, width), "wpe": scale(91, length, width), "norm": norm(92)}
    for i in range(layers):
        params[f"block_{i}"] = {
            "norm1": norm(100 * i),
            "norm2": norm(100 * i + 2),
            "qkv": dense(100 * i + 4, width, 3 * width),
            "out": dense(100 * i + 6, width, width),
            "up": dense(100 * i + 8, width, 4 * width),
            "down": dense(100 * i + 10, 4 * width, width),
        }
    return params


def gpt_stacked() -> Any:
    params = gpt_params(layers=3)
    blocks = [params.pop(k) for k in sorted(params) if k.startswith("block_")]
    return params | {"blocks": jax.tree.map(lambda *x: jnp.stack(x), *blocks)}


def layer_norm(x: Any, p: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * p["g"] + p["b"]


def block(x: Any, p: Any) -> Any:
    n, length, width = x.shape
    dense = lambda x, p: x @ p["w"] + p["b"]
    q, k, v = jnp.split(dense(layer_norm(x, p["norm1"]), p["qkv"]).reshape(n, length, HEADS, -1), 3, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width / HEADS).astype(x.dtype)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v).reshape(x.shape)
    x = x + dense(mixed, p["out"])
    return x + dense(jax.nn.gelu(dense(layer_norm(x, p["norm2"]), p["up"])), p["down"])


def gpt_loss(p: Any, t: Any, wrap: Any = lambda f: f, unroll: int = 1) -> Any:
    """Next-token loss with tied embeddings; unrolled or scanned."""
    inputs, targets = t[:, :-1], t[:, 1:]
    x = p["wte"][inputs] + p["wpe"][: inputs.shape[1]]
    run = wrap(block)
    if "blocks" in p:
        x, _ = lax.scan(lambda x, p: (run(x, p), None), x, p["blocks"], unroll=unroll)
    for name in sorted(k for k in p if k.startswith("block_")):
        x = run(x, p[name])
    logits = layer_norm(x, p["norm"]) @ p["wte"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1))


def tied_loss(p: Any, x: Any) -> Any:
    """One leaf used three times: as it is, transposed, and squared without any data."""
    y = jnp.tanh(x @ p["e"]) @ p["mid"] @ p["e"].T
    return jnp.mean(jnp.square(y - x)) + 0.05 * jnp.sum(jnp.square(p["e"])) + 0.5 * jnp.vdot(p["b"], p["b"])


@jax.custom_vjp
def special(x: Any, w: Any) -> Any:
    return x @ w


special.defvjp(  # the rule is not the derivative: a library that drops it gives another gradient
    lambda x, w: (x @ w, (x, w)), lambda r, ct: (0.5 * ct @ r[1].T, 2.0 * r[0].T @ ct)
)


def custom_loss(p: Any, x: Any) -> Any:
    return jnp.mean(jnp.square(special(jnp.tanh(special(x, p["w"]) + p["b"]), p["v"]))) + jnp.sum(p["w"] ** 2) / 9


def experts_loss(p: Any, x: Any) -> Any:
    """A mixture of experts: each example goes through one of two, by `cond`; the gate is learned."""
    gate = jax.nn.sigmoid(x @ p["gate"])

    def one(x: Any, g: Any) -> Any:
        first = lambda x: jnp.tanh(x @ p["first"]) * g
        second = lambda x: (x @ p["second"]) * (1 - g)
        return lax.cond(g > 0.5, first, second, x)

    mapped = lax.map(lambda xg: one(*xg), (x, gate))  # `cond` stays one in a loop
    return jnp.mean(jnp.square(mapped)) + jnp.mean(jnp.square(jax.vmap(one)(x, gate)))  # and is a select here


def while_loss(p: Any, x: Any) -> Any:
    """A loop whose number of turns depends on the device's data, with weights in its condition and body."""
    free = lax.while_loop(
        lambda c: (c[0] < 6) & (jnp.max(jnp.abs(c[1] @ p["w"])) > 0.5),
        lambda c: (c[0] + 1, 0.6 * jnp.tanh(c[1] @ p["w"] + p["b"])),
        (0, x),
    )[1]
    held = lax.stop_gradient(free.mean(0))
    y = lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y @ p["w"]) + p["b"], x)
    return jnp.mean(jnp.square(y @ p["v"])) + jnp.mean(jnp.square(x @ p["w"])) + 0 * jnp.sum(held)


def while_of_one_example(p: Any, x: Any) -> Any:
    """As many turns as each example needs: the mean over examples does not depend on who holds them."""

    def turns(x: Any) -> Any:
        keep = lambda c: (c[0] < 6) & (jnp.max(jnp.abs(c[1] @ p["w"])) > 0.5)
        return lax.while_loop(keep, lambda c: (c[0] + 1, 0.6 * jnp.tanh(c[1] @ p["w"] + p["b"])), (0, x))[1]

    start = lax.stop_gradient(lax.map(turns, x))
    return jnp.mean(jnp.square(jnp.tanh(start @ p["w"] + p["b"]) @ p["v"]))


def vmap_loss(p: Any, x: Any) -> Any:
    """Per-example functions, weights mapped along one of their own axes, ensembles."""
    each = jax.vmap(lambda x: jnp.tanh(x @ p["w"] + p["b"]))(x)
    columns = jax.vmap(lambda w: jnp.sin(x @ w), in_axes=1, out_axes=1)(p["w"])
    return jnp.mean(jnp.square(each - columns)) + jnp.mean(jax.vmap(lambda v: each @ v, in_axes=1)(p["v"]) ** 2)


def nested_loss(p: Any, x: Any) -> Any:
    """A gradient penalty, a Hessian-vector product, and something printed."""
    f = lambda x: jnp.sum(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"])
    force = jax.vmap(jax.grad(f))(x)
    curve = jax.vmap(lambda x: jax.jvp(jax.grad(f), (x,), (jnp.ones_like(x),))[1])(x)
    jax.debug.print("norm {}", jnp.sum(force), ordered=False)
    return jnp.mean(jnp.square(force + 1)) + jnp.mean(jnp.square(curve))


def layered_loss(p: Any, x: Any) -> Any:
    """A scan in a scan: a leaf with two leading layer axes; another is scanned backwards, a third is closed over."""

    def group(x: Any, w: Any) -> Any:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w + p["b"]), jnp.sum(w * w)), x, w)

    x, norms = lax.scan(group, x, p["deep"])
    x, _ = lax.scan(lambda x, w: (x + jnp.sin(x @ w), None), x, p["back"], reverse=True, unroll=2)
    return jnp.mean(jnp.square(x)) + 0.01 * jnp.sum(norms)


def half_loss(p: Any, x: Any) -> Any:
    """Only parts of leaves are used, some of them twice, by slices, reshapes and gathers."""
    w = p["w"].reshape(-1)[: 6 * 10].reshape(6, 10)
    y = jnp.tanh(x @ w[:, ::2]) + p["b"][jnp.array([0, 2, 2, 5, 1])]
    return jnp.mean(jnp.square(y * p["scale"])) + jnp.mean(jnp.square(x @ w[:, 1:2])) + p["s"] ** 2


def integers_loss(p: Any, x: Any) -> Any:
    """Integer, bool, empty and key leaves among the parameters, and they are read."""
    noise = jax.random.normal(p["key"], (6,))
    x = x[:, p["order"]] * jnp.where(p["mask"], 1.0, 0.5) + 0.1 * noise
    return jnp.mean(jnp.square(x @ p["w"] + p["b"])) + jnp.sum(p["empty"] ** 2) + p["w"][0, 0] * jnp.size(p["empty"])


def key_data_loss(p: Any, x: Any, keys: Any) -> Any:
    """Dropout with a key for each example: the same examples are dropped on any number of devices."""
    drop = jax.vmap(lambda k: jax.random.bernoulli(k, 0.8, (p["w"].shape[1],)))(keys)
    return jnp.mean(jnp.square(jnp.where(drop, jnp.tanh(x @ p["w"] + p["b"]), 0) @ p["v"]))


def dense_params() -> Any:
    return {"w": normal(3, 6, 10, scale=0.5), "b": normal(4, 10, scale=0.3), "v": normal(5, 10, 5, scale=0.4)}


def square_params() -> Any:
    return {"w": normal(3, 6, 6, scale=0.5), "b": normal(4, 6, scale=0.3), "v": normal(5, 6, 5, scale=0.4)}


# --- Flax ----------------------------------------------------------------------------------------


class Net(nn.Module):
    """A convolutional network; with `axes` its batch statistics are those of the whole batch."""

    axes: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        dtype = x.dtype
        for width in (5, 8):
            x = nn.Conv(width, (3, 3), strides=2, use_bias=False, param_dtype=dtype)(x)
            if width == 5:  # before another one, a shift and a scale would have almost no gradient
                x = nn.BatchNorm(use_running_average=False, momentum=0.9, axis_name=self.axes, param_dtype=dtype)(x)
            x = nn.relu(x)
        return nn.Dense(3, param_dtype=dtype)(x.mean((1, 2)))


def drawn(abstract: Any) -> Any:
    """Values for abstract parameters, without a program for each."""
    leaves, tree = jax.tree.flatten(abstract)
    return jax.tree.unflatten(tree, [0.1 + normal(i, *x.shape, scale=0.3) for i, x in enumerate(leaves)])


def cnn(axes: tuple[str, ...]) -> Case:
    images, labels = normal(1, 24, 8, 8, 2), tokens(3, 1)[:, 0]
    variables = drawn(jax.eval_shape(Net().init, jax.random.key(0), images))

    def loss(p: Any, stats: Any, x: Any, y: Any, axes: Any) -> Any:
        logits, new = Net(axes).apply({"params": p, "batch_stats": stats}, x, mutable=["batch_stats"])
        return jnp.mean(jnp.square(logits + 1 + y[:, None])), new["batch_stats"]

    batch = (variables["batch_stats"], images, labels)
    whole = functools.partial(loss, axes=None)
    return Case(functools.partial(loss, axes=axes), variables["params"], batch, (1,), True, whole)


class Layer(nnx.Module):
    """One block of the transformer below."""

    def __init__(self, width: int, rngs: nnx.Rngs, dtype: Any) -> None:
        self.attend = nnx.MultiHeadAttention(
            num_heads=2, in_features=width, decode=False, use_bias=False, rngs=rngs, param_dtype=dtype
        )
        self.norm = nnx.LayerNorm(width, rngs=rngs, param_dtype=dtype)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs, param_dtype=dtype)
        self.down = nnx.Linear(2 * width, width, rngs=rngs, param_dtype=dtype)

    def __call__(self, x: Any) -> Any:
        x = x + self.attend(self.norm(x))
        return x + self.down(jax.nn.gelu(self.up(x)))


class Transformer(nnx.Module):
    """Embedding, two blocks, tied output."""

    def __init__(self, vocab: int, width: int, rngs: nnx.Rngs, dtype: Any) -> None:
        self.embed = nnx.Embed(vocab, width, rngs=rngs, param_dtype=dtype)
        self.layers = nnx.List([Layer(width, rngs, dtype) for _ in range(2)])

    def __call__(self, t: Any) -> Any:
        x = self.embed(t)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(x)


def transformer() -> Case:
    dtype = np.float64 if x64() else np.float32
    graph, params = nnx.split(nnx.eval_shape(lambda: Transformer(19, 8, nnx.Rngs(0), dtype)))
    params = drawn(params)

    def loss(p: Any, t: Any) -> Any:
        logits = nnx.merge(graph, p)(t[:, :-1])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), t[:, 1:, None], -1))

    return Case(loss, params, (tokens(19, 6),))


# --- all of them ---------------------------------------------------------------------------------

NOTHING = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
DOTS = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
FREE = functools.partial(jax.checkpoint, prevent_cse=False)


def wrapped(name: str, wrap: Any, **more: Any) -> Case:
    """The same loss with its blocks inside `jax.checkpoint`."""
    case = CASES[name](())
    return case._replace(loss=functools.partial(case.loss, wrap=wrap, **more), like=name)


#: By name: a function of the mesh axes that makes the case.
CASES: dict[str, Callable[[tuple[str, ...]], Case]] = {
    "mlp": lambda axes: Case(mlp_loss, mlp_params(), (examples(1, 6),)),
    "mlp, remat": lambda axes: wrapped("mlp", jax.checkpoint),
    "gpt": lambda axes: Case(gpt_loss, gpt_params(), (tokens(37, 7),)),
    "gpt, remat": lambda axes: wrapped("gpt", jax.checkpoint),
    "gpt, dots saved": lambda axes: wrapped("gpt", DOTS),
    "gpt, scan": lambda axes: Case(gpt_loss, gpt_stacked(), (tokens(37, 7),)),
    "gpt, scan, remat": lambda axes: wrapped("gpt, scan", FREE),
    "gpt, scan, unroll": lambda axes: wrapped("gpt, scan", NOTHING, unroll=2),
    "layers of layers": lambda axes: Case(
        layered_loss,
        {"deep": normal(1, 2, 3, 6, 6, scale=0.5), "back": normal(2, 4, 6, 6, scale=0.5), "b": normal(3, 6)},
        (examples(1, 6),),
    ),
    "tied": lambda axes: Case(
        tied_loss, {"e": normal(1, 6, 5), "mid": normal(2, 5, 5), "b": normal(3, 7)}, (examples(1, 6),)
    ),
    "custom rule": lambda axes: Case(custom_loss, dense_params(), (examples(1, 6),)),
    "experts": lambda axes: Case(
        experts_loss,
        {"gate": normal(1, 6), "first": normal(2, 6, 8), "second": normal(3, 6, 8)},
        (examples(1, 6),),
    ),
    "while": lambda axes: Case(while_loss, square_params(), (examples(1, 6),)),
    "while of one": lambda axes: Case(while_of_one_example, square_params(), (examples(1, 6),)),
    "vmap": lambda axes: Case(vmap_loss, dense_params(), (examples(1, 6),)),
    "nested": lambda axes: Case(nested_loss, dense_params(), (examples(1, 6),)),
    "parts of leaves": lambda axes: Case(
        half_loss,
        {"w": normal(1, 9, 9), "b": normal(2, 8), "scale": normal(3, 5), "s": normal(4)},
        (examples(1, 6),),
    ),
    "integers": lambda axes: Case(
        integers_loss,
        {
            "w": normal(1, 6, 3),
            "b": normal(2, 3),
            "order": jnp.array([3, 1, 2, 0, 5, 4]),
            "mask": jnp.arange(6) % 2 == 0,
            "empty": jnp.zeros((0, 3)),
            "key": jax.random.key(7),
        },
        (examples(1, 6),),
    ),
    "keys as data": lambda axes: Case(
        key_data_loss, dense_params(), (examples(1, 6), jax.random.split(jax.random.key(3), 24))
    ),
    "cnn": cnn,
    "nnx": lambda axes: transformer(),
}


@functools.lru_cache
def unsharded(name: str) -> tuple[Any, Any]:
    """Loss (with aux) and gradients on one device, the whole batch."""
    case = CASES[name](())
    if case.like:
        return unsharded(case.like)
    loss = case.unsharded or case.loss
    run = jax.jit(lambda p, b: jax.value_and_grad(loss, has_aux=case.aux, allow_int=True)(p, *b))
    return run(case.params, case.batch)


def trainable(tree: Any, params: Any) -> dict[str, Any]:
    """The leaves of gradients that belong to floating parameters, by name."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(tree), strict=True)
    return {helpers.name(path): g for (path, p), g in pairs if jnp.issubdtype(p.dtype, jnp.inexact)}


def whole(tree: Any) -> Any:
    """Split leaves at their logical shapes, on the host; the padding of every layer must be zero."""

    def leaf(x: Any) -> Any:
        if not isinstance(x, jaxzero.EvenSplit):
            return x
        stored, lead = np.asarray(x.value), x.value.ndim - 1
        size = int(np.prod(x.shape[lead:]))
        assert not stored[..., size:].any(), "padding is not zero"
        return jnp.asarray(stored[..., :size].reshape(x.shape))

    return jax.tree.map(leaf, tree, is_leaf=lambda x: isinstance(x, jaxzero.EvenSplit))


def sharded(case: Case, zero: jaxzero.Zero) -> tuple[Any, Any]:
    """Loss (with aux) and gradients through `zero`, the latter whole; every copy of a value is compared."""
    params = jax.jit(zero.shard)(checks.place(case.params, zero.mesh, P()))
    value, grads = zero.value_and_grad(case.loss, has_aux=case.aux, whole_argnums=case.whole)(params, *case.batch)
    arrays = [x for x in jax.tree.leaves((value, grads)) if isinstance(x, jax.Array)]
    helpers.assert_all_shards_equal(arrays)
    chex.assert_trees_all_equal_structs(grads, params)
    for g, p in zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True):
        if jnp.issubdtype(p.dtype, jnp.inexact):
            assert (g.shape, g.dtype) == (p.shape, p.dtype)
            assert g.sharding.is_equivalent_to(p.sharding, g.ndim), "a gradient does not rest like its parameter"
    return value, whole(grads)


def inside(case: Case, zero: jaxzero.Zero) -> tuple[Any, Any]:
    """The same in a user's own `shard_map`."""
    params, axes = zero.shard(case.params), checks.axes_of(zero)
    specs = zero.specs(params)
    dealt = tuple(P() if i + 1 in case.whole or not jnp.ndim(x) else P(axes) for i, x in enumerate(case.batch))
    grad_fn = zero.value_and_grad(case.loss, has_aux=case.aux, whole_argnums=case.whole)
    run = jax.shard_map(grad_fn, mesh=zero.mesh, in_specs=(specs, *dealt), out_specs=(P(), specs))
    batch = [checks.place(x, zero.mesh, spec) for x, spec in zip(case.batch, dealt, strict=True)]
    value, grads = jax.jit(run)(params, *batch)
    helpers.assert_all_shards_equal((value, grads))
    return value, whole(grads)


def compare(name: str, mesh: str, options: str, rtol: float = 5e-6, run: Any = sharded, observe: bool = True) -> None:
    """Asserts that loss, aux and every gradient equal the unsharded ones."""
    zero = make_zero(mesh, **OPTIONS[options])
    case = CASES[name](checks.axes_of(zero))
    if observe:
        zero = zero.observe(case.loss, case.params, *case.batch, whole_argnums=case.whole)
    value, grads = run(case, zero)
    want_value, want = unsharded(name)
    want = trainable(want, case.params)
    assert all(np.any(np.asarray(x)) for x in want.values() if x.size), "a gradient is zero: the test shows nothing"
    helpers.close(trainable(grads, case.params), want, rtol)
    helpers.close(jax.tree.map(jnp.asarray, value), want_value, 2 * rtol)
