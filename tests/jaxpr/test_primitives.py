"""The table of primitives against JAX: a primitive or parameter that a version renames fails here."""

import ast
import pathlib

import helpers
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import primitives as core
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero._src.jaxpr import primitives as p
from jaxzero._src.jaxpr.calls import inner_programs, scan_options, while_parts
from jaxzero._src.jaxpr.compat import scan_parts

SOURCE = pathlib.Path(jaxzero.__file__).parent
X, ROW = jnp.ones((4, 3)), jnp.ones(4)


@jax.custom_jvp
def with_jvp(x):
    return x


@jax.custom_vjp
def with_vjp(x):
    return x


with_jvp.defjvp(lambda x, t: (x[0], t[0]))
with_vjp.defvjp(lambda x: (x, None), lambda _, t: (t,))

#: For each primitive a function of `X` whose program has an equation of it.
FUNCTIONS = {
    p.ADD: lambda x: x + x,
    p.ADD_ANY: jax.grad(lambda x: jnp.sum(jnp.sin(x) * x)),
    p.SUB: lambda x: x - x,
    p.MUL: lambda x: x * x,
    p.DIV: lambda x: x / x,
    p.NEG: lambda x: -x,
    p.REAL: lambda x: lax.real(lax.complex(x, x)),
    p.IMAG: lambda x: lax.imag(lax.complex(x, x)),
    p.COPY: lambda x: jnp.array(x, copy=True),
    p.CONVERT: lambda x: x.astype(jnp.bfloat16),
    p.RESHAPE: lambda x: x.reshape(12),
    p.SQUEEZE: lambda x: lax.squeeze(x[:1], (0,)),
    p.TRANSPOSE: lambda x: x.T,
    p.BROADCAST: lambda x: lax.broadcast_in_dim(x, (2, 4, 3), (1, 2)),
    p.SLICE: lambda x: lax.slice(x, (0, 0), (2, 3)),
    p.CONCATENATE: lambda x: lax.concatenate([x, x], 0),
    p.PAD: lambda x: lax.pad(x, 0.0, [(1, 0, 0), (0, 0, 0)]),
    p.REV: lambda x: lax.rev(x, (0,)),
    p.SPLIT: lambda x: lax.split(x, (1, 2), axis=1),
    p.BARRIER: lax.optimization_barrier,
    p.DYNAMIC_SLICE: lambda x: lax.dynamic_slice(x, (jnp.int32(1), jnp.int32(0)), (1, 3)),
    p.DYNAMIC_UPDATE_SLICE: lambda x: lax.dynamic_update_slice(x, x[:1], (jnp.int32(1), jnp.int32(0))),
    p.GATHER: lambda x: x[jnp.array([0, 2])],
    "scatter": lambda x: x.at[jnp.array([0])].set(1.0),
    "scatter-add": lambda x: x.at[jnp.array([0])].add(1.0),
    "scatter-sub": lambda x: x.at[jnp.array([0])].subtract(1.0),
    "scatter-mul": lambda x: x.at[jnp.array([0])].multiply(2.0),
    "scatter-min": lambda x: x.at[jnp.array([0])].min(1.0),
    "scatter-max": lambda x: x.at[jnp.array([0])].max(1.0),
    p.REDUCE_SUM: jnp.sum,
    p.REDUCE_MAX: jnp.max,
    p.REDUCE_MIN: jnp.min,
    p.REDUCE_PROD: jnp.prod,
    p.REDUCE_OR: lambda x: jnp.any(x > 0),
    p.REDUCE_AND: lambda x: jnp.all(x > 0),
    p.ARGMAX: lambda x: jnp.argmax(x, 0),
    p.ARGMIN: lambda x: jnp.argmin(x, 0),
    "cumsum": lax.cumsum,
    "cumprod": lax.cumprod,
    "cummax": lax.cummax,
    "cummin": lax.cummin,
    "cumlogsumexp": lax.cumlogsumexp,
    p.SORT: lambda x: lax.sort(x, dimension=0),
    p.DOT_GENERAL: lambda x: x.T @ x,
    p.RANDOM_BITS: lambda x: jax.random.bits(jax.random.key(0), (4,)),
    p.JIT: jax.jit(lambda x: x + 1),
    p.CUSTOM_JVP: with_jvp,
    p.CUSTOM_VJP: with_vjp,
    p.REMAT: jax.checkpoint(lambda x: jnp.sin(x)),
    p.COND: lambda x: lax.cond(x[0, 0] > 0, lambda x: x, lambda x: -x, x),
    p.SCAN: lambda x: lax.scan(lambda c, v: (c + v, c), x[0], x),
    p.WHILE: lambda x: lax.while_loop(lambda c: c[0, 0] < 3, lambda c: c + x, x),
    p.IO_CALLBACK: lambda x: io_callback(lambda x: None, None, x, ordered=True),
}

#: The same inside a `shard_map` over `data`, with types checked.
MANUAL = {
    p.VARYING_CAST: lambda x: lax.pcast(jnp.ones(3), "data", to="varying") + x,
    p.AXIS_INDEX: lambda x: x + lax.axis_index("data"),
    p.ALL_GATHER: lambda x: lax.all_gather(x, "data"),
    p.ALL_GATHER_INVARIANT: lambda x: lax.all_gather(x, "data", to="invarying"),
    p.PSUM_INVARIANT: lambda x: lax.psum(x, "data"),
    p.PMAX: lambda x: lax.pmax(x, "data"),
    p.PMIN: lambda x: lax.pmin(x, "data"),
    p.REDUCE_SCATTER: lambda x: lax.psum_scatter(jnp.tile(x[:1, :1], (8, 1)), "data"),
    p.ALL_TO_ALL: lambda x: lax.all_to_all(jnp.tile(x[:1, :1], (8, 1)), "data", 0, 0),
    p.PPERMUTE: lambda x: lax.ppermute(x, "data", [(0, 1)]),
}


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_programs(eqn):
            yield from equations(inner)


def placed(mesh, x):
    spec = jax.sharding.NamedSharding(mesh, P("data"))
    explicit = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    return {
        p.SHARDING_CONSTRAINT: (lambda x: lax.with_sharding_constraint(x, spec), x),
        p.RESHARD: (
            lambda x: jax.reshard(x, jax.sharding.NamedSharding(explicit, P("data"))),
            jax.device_put(x, jax.sharding.NamedSharding(explicit, P())),
        ),
    }


@pytest.fixture(scope="module")
def found():
    """One equation of each primitive, by name."""
    mesh = helpers.make_mesh(8)
    manual = lambda f, **how: jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), **how)
    programs = [jax.make_jaxpr(f)(X) for f in FUNCTIONS.values()]
    programs += [jax.make_jaxpr(f)(x) for f, x in placed(mesh, jnp.ones(8)).values()]
    programs += [jax.make_jaxpr(f, axis_env=[("data", 8)])(X) for f in (lambda x: lax.psum(x, "data"),)]
    if jax.__version_info__ >= (0, 12):
        closed = jax.make_jaxpr(jnp.sin)(X)
        programs.append(jax.make_jaxpr(lambda x: core.closed_call_p.bind(x, call_jaxpr=closed))(X))
    for f in MANUAL.values():
        summed = lambda x, f=f: lax.pcast(jnp.zeros((1, 1)), "data", to="varying") + 0 * jnp.sum(f(x))
        programs.append(jax.make_jaxpr(manual(summed))(jnp.ones((8, 3))))
    return {eqn.primitive.name: eqn for program in programs for eqn in equations(program.jaxpr)}


NAMES = {
    name
    for value in vars(p).values()
    for name in ((value,) if isinstance(value, str) else value if isinstance(value, tuple) else ())
    if isinstance(name, str)
} - {p.__doc__, p.__name__, p.__package__, p.__file__, p.__cached__}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_traced_equation_has_the_name_and_the_parameters(found, name):
    if name == p.CLOSED_CALL and jax.__version_info__ < (0, 12):  # only JAX itself can bind it there
        assert name == "closed_call"
        return
    assert name in found, sorted(found)
    lacking = {key for key in p.PARAMETERS.get(name, ()) if key not in found[name].params}
    assert not lacking, sorted(found[name].params)


def test_the_table_has_every_parameter_that_is_read():
    """Keys that are written out in `eqn.params["..."]` anywhere in the library."""
    known = {key for keys in p.PARAMETERS.values() for key in keys} | {"num_consts", "num_carry", "ft_in"}
    read = {}
    for path in (SOURCE / "_src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            of = getattr(node, "value", None) if isinstance(node, ast.Subscript) else None
            key = getattr(node, "slice", None)
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get" and node.args:
                of, key = node.func.value, node.args[0]
            if getattr(of, "attr", "") == "params" and isinstance(key, ast.Constant) and isinstance(key.value, str):
                read[key.value] = path.name
    assert {"jaxpr", "branches", "length", "axes"} - read.keys() <= {"length"}  # the search finds what is there
    assert read.keys() <= known | {"axes", "axis_name", "axis_index_groups"}, read


@pytest.mark.parametrize("folder", ["jaxpr", "partition", "optimizer", "comm", "fsdp", "gradients"])
def test_names_of_primitives_stand_in_the_table_alone(folder):
    """No string in the code is the name of a primitive; `gather` is a word of reports too."""
    for path in (SOURCE / "_src" / folder).rglob("*.py"):
        if path.name == "primitives.py":
            continue
        strings = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
        assert not (strings & (NAMES - {"gather"})), path


def test_operands_of_loops_by_group():
    scan = next(e for e in jax.make_jaxpr(FUNCTIONS[p.SCAN])(X).eqns if e.primitive.name == p.SCAN)
    consts, carry, xs = scan_parts(scan, scan.invars)
    assert ([v.aval.shape for v in consts], [v.aval.shape for v in carry], [v.aval.shape for v in xs]) == (
        [],
        [(3,)],
        [(4, 3)],
    )
    assert scan_options(scan) == {"length": 4, "reverse": False, "unroll": 1}
    loop = next(e for e in jax.make_jaxpr(FUNCTIONS[p.WHILE])(X).eqns if e.primitive.name == p.WHILE)
    assert [len(part) for part in while_parts(loop, loop.invars)] == [0, 1, 1]


def test_private_jax_is_imported_where_it_is_used():
    """No module of the library imports it when it is loaded, and one file alone does at all."""
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        private = [
            n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("jax._src")
        ]
        assert not set(private) & set(tree.body), path
        assert not private or path.name == "compat.py", path
    out = helpers.run_python(
        "import builtins\nseen, real = [], builtins.__import__\n"
        "def spy(name, globals=None, locals=None, fromlist=(), level=0):\n"
        "    if name.startswith('jax._src') and (globals or {}).get('__name__', '').startswith('jaxzero'):\n"
        "        seen.append(name)\n"
        "    return real(name, globals, locals, fromlist, level)\n"
        "builtins.__import__ = spy\n"
        "import jaxzero\nprint(seen)\n"
        "from jaxzero._src.jaxpr import compat\nprint(compat.backends_started(), seen)\n"
    )
    assert out.split("\n")[:2] == ["[]", "False ['jax._src']"]
