"""The reader of compiled programs: texts of every kind by hand, programs compiled here, and recorded ones."""

import helpers
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero._src.analysis import hlo_parser
from jaxzero._src.comm import collectives

HEADER = "HloModule m, is_scheduled=true, num_partitions=8\n"

GROUPS = {
    "replica_groups={{0,4},{1,5},{2,6},{3,7}}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "replica_groups={{0,1,2,3},{4,5,6,7}}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "replica_groups=[2,4]<=[8]": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "replica_groups=[4,2]<=[2,4]T(1,0)": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "replica_groups=mesh['node'=2,'local'=4] {'node'}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "replica_groups=mesh['node'=2,'local'=4] {'local'}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "replica_groups=mesh['node'=2,'local'=4] {'node','local'}": (tuple(range(8)),),
    "replica_groups={}": (tuple(range(8)),),
}


@pytest.mark.parametrize("text", GROUPS)
def test_groups_in_every_way_of_printing_them(text):
    line = f"  %a = f32[8]{{0}} all-gather(%x), channel_id=1, {text}, dimensions={{0}}"
    program = HEADER + "ENTRY %main () -> f32[8] {\n" + line
    (found,) = jaxzero.collectives(program, AbstractMesh((2, 4), ("node", "local")))
    assert found.groups == GROUPS[text]
    size = len(found.groups[0])
    assert (found.nbytes, found.sent) == (32, 32 * (size - 1) / size)
    assert found.axes == {2: ("node",), 4: ("local",), 8: ("node", "local")}[size]
    (found,) = jaxzero.collectives(program)
    assert found.axes is None  # a text alone has no mesh


@pytest.mark.parametrize("leaf", ["layers/0/w", "(root)", "dense(1)/w", "a)b"])
@pytest.mark.parametrize("name", ["jit(step)/{}/all_gather", "jit(step)/transpose(jvp({}))/reduce_scatter", "{}"])
def test_leaves_in_names(leaf, name):
    name = name.format(collectives.leaf_scope(leaf))
    line = f'  %a = f32[8]{{0}} all-gather(%x), replica_groups={{}}, metadata={{op_name="{name}"}}'
    (found,) = jaxzero.collectives(HEADER + "ENTRY %main () -> f32[8] {\n" + line)
    assert found.leaf == leaf


PROGRAM = (
    HEADER
    + """\
%inner (p: f32[4]) -> f32[4] {
  %r = f32[4]{0} reduce-scatter(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
}
%outer (p: f32[4]) -> f32[4] {
  %w = f32[4] while(%p), condition=%test, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
}
%taken (p: f32[4]) -> f32[4] {
  %g = (f32[2]{0}, f32[16]{0}) all-gather-start(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}
ENTRY %main (p: f32[4]) -> f32[4] {
  %w = f32[4] while(%p), condition=%test, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
  %c = f32[16] conditional(%i, %p, %p), branch_computations={%taken, %other}
  ROOT %s = (f32[8]{0}, bf16[8]{0}) all-reduce(%a, %b), replica_groups={{0,1}}
}
"""
)


def test_loops_in_loops_branches_tuples_and_starts():
    found = jaxzero.collectives(PROGRAM)
    assert [(x.kind, x.nbytes, x.times) for x in found] == [
        ("reduce-scatter", 64, 15),
        ("all-gather", 64, 1),
        ("all-reduce", 48, 1),
    ]
    assert [x.sent for x in found] == [15 * 48, 56, 48]


# --- starts and ends -----------------------------------------------------------------------------

GPU = (
    HEADER
    + """\
%fused (p: f32[8,8]) -> f32[8,8] {
  ROOT %d = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
ENTRY %main (p: f32[1,8], q: f32[8,8]) -> f32[8,8] {
  %p = f32[1,8]{1,0} parameter(0), metadata={op_name="params[\\'w\\'].value"}
  %q = f32[8,8]{1,0} parameter(1)
  %g = (f32[1,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%p), replica_groups={}, dimensions={0}
  %m = f32[8,8]{1,0} fusion(%q), kind=kCustom, calls=%fused
  %gd = f32[8,8]{1,0} all-gather-done(%g)
  %h = (f32[1,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%p), replica_groups={}, backend_config={"is_sync":true}
  %c = f32[8,8]{1,0} custom-call(%q), custom_call_target="__cublas$gemm"
  %hd = f32[8,8]{1,0} all-gather-done(%h)
  %s = ((f32[8,8]{1,0}), f32[1,8]{1,0}) reduce-scatter-start(%m), replica_groups={}, dimensions={0}
  %n = f32[8,8]{1,0} negate(%m)
  %sd = f32[1,8]{1,0} reduce-scatter-done(%s)
  %r = ((f32[]), f32[]) all-reduce-start(%x), replica_groups={}
  %rd = f32[] all-reduce-done(%r)
  %o = f32[] all-reduce-start(%x), replica_groups={}
  %od = f32[] all-reduce-done(%o)
  ROOT %c2 = f32[8,8]{1,0} copy(%gd)
}
"""
)


def test_pairs_of_gpus():
    """A result is counted once whatever stands beside it in the type; what XLA calls synchronous hides nothing."""
    found = jaxzero.collectives(GPU)
    assert [(x.kind, x.nbytes, x.distance, x.hidden) for x in found] == [
        ("all-gather", 256, 1, True),
        ("all-gather", 256, None, False),
        ("reduce-scatter", 256, 1, False),
        ("all-reduce", 4, 0, False),
        ("all-reduce", 4, 0, False),
    ]


TPU = (
    HEADER.replace("m, ", "m, entry_computation_layout={(f32[8]{0:T(128)})->f32[8]{0:T(128)}}, ")
    + """\
%begin (p: bf16[1,8]) -> (bf16[1,8], bf16[8,8]) {
  %a1 = bf16[8,8]{1,0:T(8,128)(2,1)} all-gather(%p), replica_groups={}, frontend_attributes={chain_id="0"}
  ROOT %c1 = (bf16[1,8]{1,0}, bf16[8,8]{1,0}) custom-call(%a1), custom_call_target="AsyncCollectiveStart"
}
%between (p: bf16[8,8]) -> bf16[8,8] {
  %d = f32[8,8]{1,0:T(8,128)} convolution(%p, %p), window={}
  %a2 = bf16[8,8]{1,0:T(8,128)(2,1)} all-gather(%p), replica_groups={}, frontend_attributes={chain_id="0"}
}
%end (p: bf16[8,8]) -> bf16[8,8] {
  %a3 = bf16[8,8]{1,0:T(8,128)(2,1)} all-gather(%p), replica_groups={}, frontend_attributes={chain_id="0"}
  ROOT %c3 = bf16[8,8]{1,0} custom-call(%a3), custom_call_target="AsyncCollectiveDone"
}
%all-reduce-scatter.1 (p: f32[8,8]) -> f32[1,8] {
  %r = f32[8,8]{1,0:T(8,128)} all-reduce(%p), replica_groups={}
  ROOT %s = f32[1,8]{1,0} dynamic-slice(%r, %i)
}
%condition (p: s32[]) -> pred[] {
  %limit = s32[]{:T(128)} constant(6)
  ROOT %lt = pred[]{:T(512)} compare(%p, %limit), direction=LT
}
%body (p: s32[]) -> s32[] {
  %start = (bf16[1,8]{1,0}, bf16[8,8]{1,0}) fusion(%p), kind=kCustom, calls=%begin
  %part = bf16[8,8]{1,0} get-tuple-element(%start), index=1
  %work = (bf16[8,8]{1,0}, f32[8,8]{1,0}) fusion(%part), kind=kOutput, calls=%between
  %rest = bf16[8,8]{1,0} get-tuple-element(%work), index=0
  %done = bf16[8,8]{1,0} fusion(%rest), kind=kCustom, calls=%end
}
ENTRY %main (p: s32[]) -> f32[1,8] {
  %w = s32[]{:T(128)} while(%p), condition=%condition, body=%body
  ROOT %f = f32[1,8]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
)


def test_fusions_of_tpus():
    """A gather that fusions begin, carry on and end counts once; a fused slice makes a reduce-scatter; turns count."""
    found = jaxzero.collectives(TPU)
    assert [(x.kind, x.nbytes, x.times, x.looped, x.distance, x.hidden) for x in found] == [
        ("all-gather", 128, 6, True, 3, True),
        ("reduce-scatter", 256, 1, False, None, False),
    ]
    assert hlo_parser.parse(TPU).on_tpu
    assert not hlo_parser.parse(GPU).on_tpu


def test_arguments_and_what_is_reused():
    program = hlo_parser.parse(GPU)
    assert program.arguments() == [
        hlo_parser.HloArgument(0, "params['w'].value", (1, 8), 32),
        hlo_parser.HloArgument(1, "", (8, 8), 256),
    ]
    assert program.reused() == set()
    alias = "input_output_alias={ {0}: (0, {}, may-alias), {1}: (3, {}, must-alias) }, num"
    assert hlo_parser.parse(GPU.replace("num", alias, 1)).reused() == {0, 3}


@pytest.mark.parametrize(
    ("text", "size"), [("pred[3]", 3), ("f8e4m3fn[2,2]", 4), ("(f32[2]{0}, s64[])", 16), ("c64[2]", 16), ("u4[4]", 4)]
)
def test_bytes_of_types(text, size):
    assert hlo_parser.nbytes(text) == size


# --- programs compiled here ----------------------------------------------------------------------


def step(mesh, **options):
    """One compiled step of a scan over layers and a leaf that does not divide."""
    zero = jaxzero.Zero(mesh, **options)
    params = {"layers": jnp.ones((3, 64, 64)), "odd": jnp.ones((67, 33))}

    def loss(p, x):
        x = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, p["layers"])[0]
        return jnp.mean(x**2) + jnp.mean(p["odd"] ** 2) * jnp.mean(x)

    split = NamedSharding(mesh, P(mesh.axis_names))
    x = jax.device_put(jnp.ones((16, 64)), split)
    if zero.stage == 3:
        zero = zero.observe(loss, params, x)
    return jax.jit(zero.value_and_grad(loss)).lower(zero.shard(params), x).compile()


def test_leaves_axes_and_loops_of_a_step(mesh24):
    """The mesh is that of the arguments; what travels alone is named."""
    options = dict(shard_axis="shard", replica_axis="replica", bucket_bytes=None)
    found = jaxzero.collectives(step(mesh24, stage=2, **options))
    layers, odd = 3 * 64 * 64 * 4, (67 * 33 + 1) * 4
    rows = {(x.kind, x.axes, x.nbytes, x.times, x.leaf) for x in found if x.nbytes > 4}
    assert rows >= {
        ("reduce-scatter", ("shard",), layers, 1, "layers"),
        ("reduce-scatter", ("shard",), odd, 1, "odd"),
    }
    assert found.sent("reduce-scatter", ["shard"]) == (layers + odd) * 3 / 4
    over_replicas = found.sent("all-reduce", ["replica"])
    assert over_replicas == (layers + odd) / 4
    assert found.sent("reduce-scatter", ["replica"]) == found.sent("all-gather") == 0


def test_layers_are_gathered_in_the_loop(mesh8):
    found = jaxzero.collectives(step(mesh8, stage=3, persist_bytes=0, chunk_bytes=None))
    layers = [x for x in found if x.nbytes == 64 * 64 * 4]
    assert {x.leaf for x in layers} == {"layers"}
    times = lambda kind, looped: sum(x.times for x in layers if x.kind == kind and x.looped == looped)
    assert times("reduce-scatter", True) == 3
    # Three layers forward and backward; the forward scan gathers ahead, and the first layer before the loop.
    assert (times("all-gather", True), times("all-gather", False)) == (5, 1)
    assert found.sent("all-gather", looped=True) >= 3 * 64 * 64 * 4 * 7 / 8


def test_a_table(mesh8, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    found = jaxzero.collectives(step(mesh8, stage=2, bucket_bytes=None))
    lines = str(found).splitlines()
    assert lines[0].split() == ["collective", "axes", "MB", "times", "loop", "between", "hidden", "leaf"]
    assert lines[2].split() == ["reduce-scatter", "data", "0.049", "1", "no", "-", "no", "layers"]
    assert lines[-1] == f"{len(found)} collectives, {found.sent() / 1e6:.3f} MB sent by each device"


class NoText:
    def as_text(self):
        return None


WRONG = {
    "a number": (8, "collectives: found int.*what jax.jit"),
    "a function": (jax.jit(lambda x: x), r"compile it: f.lower\(\*args\).compile\(\)"),
    "a lowered one": (jax.jit(lambda x: x).lower(1.0), r"compile it: lowered.compile\(\)"),
    "another text": ("module @jit_f {}", "a text that is no compiled program"),
    "no text": (NoText(), "found NoText, which has no text"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_has_no_text_is_refused(name):
    compiled, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        jaxzero.collectives(compiled)


@pytest.mark.parametrize(("mesh", "found"), [(3, "a int"), (helpers.make_mesh(4), "one of 4 devices")])
def test_another_mesh_is_refused(mesh8, mesh, found):
    """Its axes would be given wrong names."""
    summed = jax.shard_map(lambda x: lax.psum(x, "data"), mesh=mesh8, in_specs=P("data"), out_specs=P())
    compiled = jax.jit(summed).lower(jnp.ones(8)).compile()
    with pytest.raises(ValueError, match=f"collectives: mesh is {found}. Expected the mesh of the program's 8 devices"):
        jaxzero.collectives(compiled, mesh)


# --- memory --------------------------------------------------------------------------------------


def test_memory_is_what_xla_says(mesh8):
    zero = jaxzero.Zero(mesh8)
    x = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh8, P("data")))
    compiled = jax.jit(lambda x: x * 2.0, donate_argnums=0).lower(x).compile()
    memory = zero.memory(compiled)
    share = 64 * 64 * 4 // 8
    assert (memory.arguments, memory.outputs, memory.aliased) == (share, share, share)
    assert memory.temporaries == compiled.memory_analysis().temp_size_in_bytes
    assert memory.total == share + memory.temporaries
    assert str(memory).splitlines()[1].split() == ["arguments", "2.048", "kB"]


@pytest.mark.parametrize("wrong", [3, jax.jit(lambda x: x), jax.jit(lambda x: x).lower(1.0)])
def test_memory_of_what_is_no_compiled_program(mesh8, wrong):
    with pytest.raises(ValueError, match=r"memory: a \w+ has no memory analysis.*Fix: pass what"):
        jaxzero.Zero(mesh8).memory(wrong)
