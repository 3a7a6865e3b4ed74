"""Compares a compiled training step with what its plan promises."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import optax

from .._table import table
from .._text import path_text, size_text
from .._types import Path, PyTree
from ..jaxpr.collectives import EXCHANGE, GATHER, REDUCE, SCATTER
from ..sharding.axes import Axes
from ..sharding.layout import Shape
from ..sharding.leaves import Leaf
from ..sharding.options import Options, param_leaves, resolve_axes
from . import planner
from .hlo import Collectives, collectives
from .hlo_parser import HloArgument, HloProgram, parse, sizes, text_of
from .plan import Plan, not_split

CALL = "verify"
#: A collective, an argument or a difference of fewer bytes is ignored.
SMALL = 4096
#: Collectives of all kinds together.
ANY = "traffic"


@dataclasses.dataclass(frozen=True)
class Check:
    """One promise of the plan, compared with the compiled program.

    Attributes:
      what: The promise: traffic of a kind over some axes, memory, ...
      promised: Bytes, or a count where `what` says so.
      found: The same, in the compiled program.
      problem: What is wrong; empty if nothing is.
      fix: How to correct it.
    """

    what: str
    promised: float
    found: float
    problem: str = ""
    fix: str = ""


@dataclasses.dataclass(frozen=True)
class Verification:
    """A compiled program that keeps what its plan promises; `print` shows promised and found.

    Attributes:
      checks: What was promised, and found.
      collectives: The collectives of the program.
      note: What else must be known; empty if nothing.
    """

    checks: tuple[Check, ...]
    collectives: Collectives
    note: str = ""

    def __str__(self) -> str:
        table = promised_and_found(self.checks)
        return f"{self.note}\n\n{table}" if self.note else table


def promised_and_found(checks: Sequence[Check]) -> str:
    """Promised and found, a row for each check."""
    rows = [(c.what, size_text(c.promised), size_text(c.found), c.problem or "ok") for c in checks]
    return table(("per device", "promised", "found", ""), rows, "<>><")


def verify(
    options: Options,
    compiled: jax.stages.Compiled | str,
    params: PyTree,
    inner: optax.GradientTransformation | None,
    accumulate: int,
    sync: str,
    donated: bool,
) -> Verification:
    """See `Zero.verify`."""
    program = parse(text_of(CALL, compiled))
    plan = planner.make_plan(options, params, inner, accumulate, sync)
    axes, _ = resolve_axes(options, CALL)
    if program.devices != options.mesh.size:
        raise ValueError(
            f"{CALL}: the program was compiled for {program.devices} devices; expected {options.mesh.size}, the mesh "
            f"{dict(options.mesh.shape)}. Fix: verify it with the Zero that it was made with."
        )
    found = collectives(compiled, options.mesh)
    unknown = any(note.startswith(planner.UNKNOWN_UPDATE) for note in plan.notes)
    leaves = [leaf for leaf in param_leaves(options, params, axes.n).leaves if leaf.layout is not None]
    owned = _owned(options, program, leaves)
    checks = [
        *_traffic(options, program, plan, found, axes, inner is not None and not unknown),
        *_on_use(options, program, found, leaves, axes, accumulate),
        *_at_rest(options, plan, owned, inner is not None, axes),
        *(_reused(program, owned) if donated else ()),
    ]
    _refuse_problems(checks)
    unseen = options.stage == 3 and not options.observed and options.stacked is None
    notes = (not_split(options.mesh.shape, axes.shard), f"no loss was observed. {planner.NOT_OBSERVED}" * unseen)
    return Verification(tuple(checks), found, "\n".join(filter(None, notes)))


def _refuse_problems(checks: Sequence[Check]) -> None:
    """Raises, with a table, if a promise is not kept."""
    wrong = [c for c in checks if c.problem]
    if wrong:
        missing_first = sorted(wrong, key=lambda c: c.problem != "missing")
        fixes = " ".join(dict.fromkeys(f"Fix: {c.fix}" for c in missing_first))
        raise ValueError(
            f"{CALL}: the compiled program is not what was promised: "
            f"{'; '.join(f'{c.what}: {c.problem}' for c in wrong)}. {fixes}\n{promised_and_found(checks)}"
        )


def verify_hidden(done: Verification, options: Options, hidden: float) -> Verification:
    """Checks that a share of the bytes sent over the axes of `Zero` has a matrix product between start and end."""
    if isinstance(hidden, bool) or not isinstance(hidden, (int, float)) or not 0 <= hidden <= 1:
        raise ValueError(
            f"{CALL}: hidden={hidden!r}. Expected a share of the bytes sent, from 0 to 1, or None. Fix: hidden=0.9."
        )
    axes, _ = resolve_axes(options, CALL)
    ours = [x for x in done.collectives if set(x.axes or ()) & set(axes.every)]
    sent, have = sum(x.sent for x in ours), sum(x.sent for x in ours if x.hidden)
    problem = fix = ""
    if have < hidden * sent:
        problem = f"{have / sent:.0%} are"
        fix = "compile with compiler_options=zero.compiler_options(); observe the loss, for the order of use."
    check = Check(f"{hidden:.0%} of the bytes sent, behind products", hidden * sent, have, problem, fix)
    checks = (*done.checks, check)
    _refuse_problems(checks)
    return dataclasses.replace(done, checks=checks)


# --- traffic -------------------------------------------------------------------------------------


def _traffic(
    options: Options, program: HloProgram, plan: Plan, found: Collectives, axes: Axes, known: bool
) -> Iterator[Check]:
    """Checks of bytes sent, by kind and axes; other mesh axes are not checked."""
    promised: dict[tuple[str, tuple[str, ...]], float] = {}
    for row in plan.traffic:
        promised[row.kind, row.axes] = promised.get((row.kind, row.axes), 0.0) + row.nbytes
    sent: dict[tuple[str, tuple[str, ...]], float] = {}
    for x in found:
        if x.sent and set(x.axes or ()) & set(axes.every):
            sent[x.kind, x.axes or ()] = sent.get((x.kind, x.axes or ()), 0.0) + x.sent
    most = promised
    if program.on_tpu:  # an all-reduce sends twice as much as the gather or reduce-scatter that it replaces
        most = _together({key: nbytes if key[0] == REDUCE else 2 * nbytes for key, nbytes in promised.items()})
        promised, sent = _together(promised), _together(sent)
    elif program.on_cpu and _narrow(options, plan):
        most = {key: 2 * nbytes for key, nbytes in promised.items()}
    for key in sorted({*promised, *sent}):
        want, have = promised.get(key, 0.0), sent.get(key, 0.0)
        low, high = _limits(options, program, key[0], want, most.get(key, 0.0))
        what = f"{key[0]} over {'+'.join(key[1])}"
        if have < low:
            yield Check(what, want, have, "missing", _missing(key[0], axes))
        elif have > high:
            fix = _extra(key, axes) + ("" if known else " If the optimizer sends it, pass the optimizer: inner=.")
            yield Check(what, want, have, "more than promised" if want > SMALL else "not promised", fix)
        elif max(want, have) > SMALL:
            yield Check(what, want, have)


def _together(sent: dict[tuple[str, tuple[str, ...]], float]) -> dict[tuple[str, tuple[str, ...]], float]:
    """The sum over all kinds: for TPUs XLA replaces gathers and reduce-scatters by all-reduces."""
    out: dict[tuple[str, tuple[str, ...]], float] = {}
    for (_, over), nbytes in sent.items():
        out[ANY, over] = out.get((ANY, over), 0.0) + nbytes
    return out


def _narrow(options: Options, plan: Plan) -> bool:
    """Whether 16-bit numbers are sent: XLA sends them as float32 between CPUs."""
    wire = [options.reduce_dtype or "float32", *(leaf.dtype for leaf in plan.leaves if leaf.layout != "whole")]
    return any(jax.numpy.dtype(dtype).itemsize < 4 for dtype in wire)


def _limits(options: Options, program: HloProgram, kind: str, promised: float, most: float) -> tuple[float, float]:
    """The least and the most bytes that keep a promise; `most`: the promise after XLA's rewrites.

    For CPUs XLA may merge the gathers of one parameter. For TPUs it sends operands of products as bfloat16, sums over
    the iterations of a loop before it reduces, and replaces gathers by reductions. Without `observe` the number of
    gathers per parameter is unknown, so only a lower bound is checked.
    """
    seen = options.stage < 3 or (options.observed is not None and options.observed.loss is not None)
    if promised <= SMALL:
        return 0.0, SMALL + promised if seen or kind == REDUCE else float("inf")
    low, high = 0.99 * promised, 1.01 * most + SMALL
    if options.stage == 3 and kind == GATHER:
        low = 0.2 * promised
    if program.on_tpu:
        low = 0.2 * promised
    return low, high if seen or kind == REDUCE else float("inf")


def _missing(kind: str, axes: Axes) -> str:
    if kind == SCATTER:
        return f"jax.lax.psum_scatter over {axes.shard}, as zero.value_and_grad does, not jax.lax.psum."
    if kind == REDUCE:
        return f"one jax.lax.psum over {axes.replica or axes.shard}, as zero.value_and_grad does."
    if kind == EXCHANGE:
        return "zero.apply deals out the work on whole matrices of the optimizer that zero.optimizer wraps."
    return "zero.apply gathers new parameters, zero.value_and_grad at stage 3 gathers them on use."


def _extra(key: tuple[str, tuple[str, ...]], axes: Axes) -> str:
    kind, over = key
    reduced = kind in (REDUCE, ANY)
    if reduced and set(over) & set(axes.shard):
        return (
            f"where jax.grad stands inside shard_map, jax.lax.pcast(params, {axes.every}, to='varying') before it, or "
            "autodiff sums whole gradients; and no jax.lax.psum of gradients."
        )
    if reduced:
        return f"reduce over {axes.replica} once, after the loop over micro-steps, and only the share."
    return f"gather and reduce once, over {axes.shard}, by zero.value_and_grad and zero.apply alone."


# --- stage 3 -------------------------------------------------------------------------------------


def _on_use(
    options: Options, program: HloProgram, found: Collectives, leaves: Sequence[Leaf], axes: Axes, accumulate: int
) -> Iterator[Check]:
    """Checks that parameters are gathered where they are used: stacked ones layer by layer, others a few at a time."""
    if options.stage < 3:
        return
    fix = "no zero.gather in the step: zero.value_and_grad gathers parameters where they are used."
    idle = set(options.observed.unused) if options.observed else set()
    used = [leaf for leaf in leaves if leaf.trainable and leaf.path not in idle]
    stacked = [leaf for leaf in used if leaf.layers and _nbytes(leaf) > SMALL]
    if stacked:
        trip_count = accumulate * min(leaf.shape[0] for leaf in stacked)
        # Two iterations may stand outside of the loop, and XLA may unroll by two.
        often = lambda x: x.times > 1 and 2 * (x.times + accumulate) >= trip_count
        inside = sum(x.sent for x in found if x.kind == GATHER and often(x))
        want = accumulate * sum(map(_nbytes, stacked)) * (axes.n - 1) / axes.n
        problem = "gathered outside the loop over layers" if inside < 0.2 * want else ""
        yield Check("all-gather of layers in their loop, at least", want, inside, problem, fix)
    early = max(_before_products(program, max(options.persist_bytes, SMALL)), key=sum, default=[])
    plain = sum(map(_nbytes, used)) - sum(map(_nbytes, stacked))
    if len(early) > options.prefetch + 3 and sum(early) > plain / 2:
        problem = f"{len(early)} gathers stand before the first matrix product"
        yield Check("all-gather before the first use", plain / 2, sum(early), problem, fix)


def _before_products(program: HloProgram, least: int) -> Iterator[list[int]]:
    """For each computation, the bytes of its large gathers before its first matrix product."""
    for body in program.computations.values():
        first = next((i for i, x in enumerate(body) if program.is_product(x)), 0)
        early = [max(sizes(x.type), default=0) for x in body[:first] if x.op in (GATHER, f"{GATHER}-start")]
        yield [size for size in early if size > least]


# --- memory --------------------------------------------------------------------------------------


def _nbytes(leaf: Leaf) -> int:
    return leaf.cut.size * jax.numpy.dtype(leaf.dtype).itemsize


def _owned(options: Options, program: HloProgram, leaves: Sequence[Leaf]) -> list[tuple[HloArgument, Leaf]]:
    """The arguments that are parameters, or state like one: their names end with its path, and they have its shape.

    Arguments of other shapes are examples named like a parameter, or state of another shape (Adafactor).
    """
    by_name = {jax.tree_util.keystr(leaf.path): leaf for leaf in leaves}
    out = []
    for argument in program.arguments():
        name = argument.name.removesuffix(".value")
        longest = max((text for text in by_name if name.endswith(text)), key=len, default=None)
        if longest is not None and argument.shape in _shapes(options, by_name[longest]):
            out.append((argument, by_name[longest]))
    if leaves and not out:
        raise ValueError(
            f"{CALL}: no argument of the program is one of these parameters. Found arguments "
            f"{[a.name or '(no name)' for a in program.arguments()[:4]]}; expected names that end with "
            f"{next(iter(by_name))!r}. Fix: pass the parameters that the step takes."
        )
    return out


def _shapes(options: Options, leaf: Leaf) -> tuple[Shape, Shape, Shape]:
    """Shapes on one device: split, whole, and whole with padding."""
    split, whole = leaf.spec(options.shard_axes), leaf.spec(None)
    stored = leaf.cut.stored_shape
    ways = ((stored, split), (leaf.shape, whole), (stored, whole))
    one, two, three = (planner.local_shape(options, shape, spec) for shape, spec in ways)
    return one, two, three


def _at_rest(
    options: Options, plan: Plan, owned: Sequence[tuple[HloArgument, Leaf]], with_state: bool, axes: Axes
) -> Iterator[Check]:
    """Checks that no state and no parameter of stage 3 is whole, and that the sum of bytes is as planned."""
    whole: dict[Path, list[HloArgument]] = {}
    for argument, leaf in owned:
        split, *full = _shapes(options, leaf)
        if argument.shape in full and argument.shape != split:
            whole.setdefault(leaf.path, []).append(argument)
    allowed = 0 if options.stage == 3 else 1  # the parameter itself
    for path, arguments in whole.items():
        if len(arguments) > allowed:
            found = sum(a.nbytes for a in arguments)
            names = ", ".join(a.name for a in arguments[: 3 + allowed])
            what = f"{path_text(path)} at rest"
            share = found * allowed / len(arguments) + found * (1 - allowed / len(arguments)) / axes.n
            problem = f"whole on every device among {names}"
            yield Check(what, share, found, problem, "tx.init of zero.optimizer, zero.shard and zero.init split them.")
    if with_state:
        stored = plan.at_rest[options.stage]
        want = stored.parameters + stored.state - plan.other_state
        have = sum(a.nbytes for a, _ in owned)
        problem = "above the plan" if have > 1.01 * want + SMALL else ""
        fix = "what the step takes is the state of tx.init and the parameters of zero.shard."
        yield Check("parameters and state at rest", want, have, problem, fix)


def _reused(program: HloProgram, owned: Sequence[tuple[HloArgument, Leaf]]) -> Iterator[Check]:
    """Checks that new parameters and state take the memory of the old ones."""
    again = program.reused()
    want = sum(a.nbytes for a, _ in owned)
    lost = [a for a, _ in owned if a.number not in again]
    have = want - sum(a.nbytes for a in lost)
    names = ", ".join(a.name for a in lost[:3])
    problem = f"not reused: {names}" if want - have > SMALL else ""
    fix = "jax.jit(step, donate_argnums=(0, 1)), with results placed as the arguments; or verify(..., donated=False)."
    yield Check("memory of donated arguments, reused", want, have, problem, fix)
