"""The primitives that the library knows: the one table of their names, and of the parameters that it reads.

Names come from the objects of `jax.extend.core.primitives`; of the few primitives that it does not export they are
written out. `tests/jaxpr/test_primitives.py` traces an equation of each one and compares its name and its parameters
with this table, so that a primitive which a later JAX renames fails a test and does not silently become one without a
rule.
"""

from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as core

from ..sharding.axes import names

# --- elementwise, and relabelling ----------------------------------------------------------------
ADD = core.add_p.name
#: The sum of cotangents that autodiff makes.
ADD_ANY = core.add_jaxvals_p.name
SUB = core.sub_p.name
MUL = core.mul_p.name
DIV = core.div_p.name
NEG = core.neg_p.name
REAL = core.real_p.name
IMAG = core.imag_p.name
COPY = core.copy_p.name
CONVERT = core.convert_element_type_p.name
RESHAPE = core.reshape_p.name
SQUEEZE = core.squeeze_p.name
TRANSPOSE = core.transpose_p.name
BROADCAST = core.broadcast_in_dim_p.name
SLICE = core.slice_p.name
CONCATENATE = core.concatenate_p.name
PAD = core.pad_p.name
REV = core.rev_p.name
SPLIT = "split"
#: The identity, for the compiler and for placement.
BARRIER = "optimization_barrier"
RESHARD = "reshard"
SHARDING_CONSTRAINT = core.sharding_constraint_p.name
#: The cast of a value that is equal on all devices to one that may differ; it computes nothing.
VARYING_CAST = "pvary"

# --- indexing ------------------------------------------------------------------------------------
DYNAMIC_SLICE = core.dynamic_slice_p.name
DYNAMIC_UPDATE_SLICE = core.dynamic_update_slice_p.name
GATHER = core.gather_p.name
SCATTER_ADD = core.scatter_add_p.name
SCATTERS = (
    core.scatter_p.name,
    SCATTER_ADD,
    "scatter-sub",
    core.scatter_mul_p.name,
    core.scatter_min_p.name,
    core.scatter_max_p.name,
)

# --- reductions and products ---------------------------------------------------------------------
REDUCE_SUM = core.reduce_sum_p.name
REDUCE_MAX = core.reduce_max_p.name
REDUCE_MIN = core.reduce_min_p.name
REDUCE_PROD = core.reduce_prod_p.name
REDUCE_OR = core.reduce_or_p.name
REDUCE_AND = core.reduce_and_p.name
REDUCTIONS = (REDUCE_SUM, REDUCE_MAX, REDUCE_MIN, REDUCE_PROD, REDUCE_OR, REDUCE_AND)
ARGMAX = core.argmax_p.name
ARGMIN = core.argmin_p.name
CUMULATIVE = (
    core.cumsum_p.name,
    core.cumprod_p.name,
    core.cummax_p.name,
    core.cummin_p.name,
    core.cumlogsumexp_p.name,
)
SORT = core.sort_p.name
DOT_GENERAL = core.dot_general_p.name
#: Factorisations and solutions of matrices: the operations of each are a multiple of `m * n * min(m, n)`.
FACTORISATIONS = {
    core.cholesky_p.name: 1 / 3,
    core.eig_p.name: 25,
    core.eigh_p.name: 9,
    core.hessenberg_p.name: 4,
    core.householder_product_p.name: 2,
    core.lu_p.name: 2 / 3,
    core.qr_p.name: 4,
    core.schur_p.name: 25,
    core.svd_p.name: 20,
    core.triangular_solve_p.name: 1,
    core.tridiagonal_p.name: 4,
    "geqrf": 2,
}
RANDOM_BITS = core.random_bits_p.name

# --- inner programs ------------------------------------------------------------------------------
JIT = core.jit_p.name
CLOSED_CALL = core.closed_call_p.name  # 0.10 calls it `closed_call`, 0.12 `eval_jaxpr`
CUSTOM_JVP = core.custom_jvp_call_p.name
CUSTOM_VJP = core.custom_vjp_call_p.name
REMAT = core.remat_p.name
COND = core.cond_p.name
SCAN = core.scan_p.name
WHILE = core.while_p.name
SHARD_MAP = "shard_map"
IO_CALLBACK = "io_callback"

# --- collectives ---------------------------------------------------------------------------------
AXIS_INDEX = core.axis_index_p.name
ALL_GATHER = core.all_gather_p.name
#: The gather whose result is typed as equal on all devices, and the sum of values that vary.
ALL_GATHER_INVARIANT = "all_gather_invariant"
PSUM_INVARIANT = "psum_invariant"
PSUM = core.psum_p.name
PMAX = core.pmax_p.name
PMIN = core.pmin_p.name
REDUCE_SCATTER = "reduce_scatter"
ALL_TO_ALL = core.all_to_all_p.name
PPERMUTE = core.ppermute_p.name

#: Equations that only call an inner program, and the parameter that holds it. An optimizer is not differentiated and
#: the program of a gradient has the custom rules resolved already, so of a custom rule only the function is left.
CALLS = {
    JIT: "jaxpr",
    CLOSED_CALL: "call_jaxpr",
    CUSTOM_JVP: "call_jaxpr",
    CUSTOM_VJP: "call_jaxpr",
    REMAT: "jaxpr",
}

#: The parameters that the library reads, by primitive.
PARAMETERS: dict[str, tuple[str, ...]] = {
    CONVERT: ("new_dtype",),
    RESHAPE: ("dimensions",),
    TRANSPOSE: ("permutation",),
    BROADCAST: ("broadcast_dimensions",),
    SLICE: ("start_indices", "limit_indices", "strides"),
    CONCATENATE: ("dimension",),
    PAD: ("padding_config",),
    REV: ("dimensions",),
    DYNAMIC_SLICE: ("slice_sizes",),
    GATHER: ("dimension_numbers", "slice_sizes"),
    **dict.fromkeys(SCATTERS, ("dimension_numbers",)),
    **dict.fromkeys((*REDUCTIONS, ARGMAX, ARGMIN), ("axes",)),
    **dict.fromkeys(CUMULATIVE, ("axis",)),
    SORT: ("dimension",),
    DOT_GENERAL: ("dimension_numbers",),
    RANDOM_BITS: ("bit_width",),
    JIT: ("jaxpr",),
    CLOSED_CALL: ("call_jaxpr",),
    CUSTOM_JVP: ("call_jaxpr",),
    CUSTOM_VJP: ("call_jaxpr",),
    REMAT: ("jaxpr", "prevent_cse", "differentiated"),
    COND: ("branches",),
    SCAN: ("jaxpr", "length", "reverse", "unroll"),  # and how its operands are grouped: `compat.scan_parts`
    WHILE: ("cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts"),
    IO_CALLBACK: ("ordered",),
    SHARD_MAP: ("newly_manual_axes",),
    SHARDING_CONSTRAINT: ("sharding",),
    AXIS_INDEX: ("axis_name",),
    **dict.fromkeys((PSUM, PMAX, PMIN), ("axes", "axis_index_groups")),
    PSUM_INVARIANT: ("axes",),
    **dict.fromkeys((ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL), ("axis_name", "axis_index_groups")),
    ALL_GATHER_INVARIANT: ("axis_name",),
    PPERMUTE: ("axis_name",),
}


def collective_axes(eqn: JaxprEqn) -> tuple[str, ...]:
    """The mesh axes of a collective or of `axis_index`, outer first; none for any other equation."""
    return names(eqn.params.get("axes", eqn.params.get("axis_name")))
