"""A traced program as one list of steps: the programs of calls are written out in place.

The list shows the order of all uses of a parameter, so that a gather, and what it waits for, can be placed
anywhere. `scan` keeps its body; `cond`, `while` and everything else stay single steps.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn
from jax.extend.core import Var as JaxprVar

from .calls import called_program, inner_programs
from .compat import Literal, aval, literal_value
from .needed import needed
from .primitives import REMAT, VARYING_CAST
from .trace import AnyJaxpr


class Var:
    """One value of a flat program."""

    def __init__(self, aval: jax.core.ShapedArray | jax.ShapeDtypeStruct) -> None:
        self.aval = aval

    def __repr__(self) -> str:
        return f"%{id(self) % 10**6}:{self.aval.dtype}{list(self.aval.shape)}"


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """A literal, or a constant of an inner program."""

    value: Any


Atom = Var | Known


@dataclasses.dataclass(eq=False)
class Step:
    """One equation, or a barrier that the recomputation of a `jax.checkpoint` begins with.

    Attributes:
      eqn: The equation; `None` for a barrier, whose results are its operands.
      ins: Its operands.
      outs: Its results.
      remat: The number of the innermost `jax.checkpoint` around it, or `None`.
    """

    eqn: Any  # of most steps a `JaxprEqn`
    ins: list[Atom]
    outs: list[Var]
    remat: int | None

    @property
    def name(self) -> str:
        """The primitive's name."""
        return "barrier" if self.eqn is None else self.eqn.primitive.name


@dataclasses.dataclass(eq=False)
class Flat:
    """A program as a list of steps."""

    inputs: list[Var]
    steps: list[Step]
    outs: list[Atom]


def flatten(jaxpr: AnyJaxpr, consts: Sequence[jax.Array] | None = None) -> Flat:
    """The steps of a program that its results need.

    Args:
      jaxpr: An open program.
      consts: Its constants, if they are known; else they are the first inputs.

    Returns:
      The flat program.
    """
    env: dict[JaxprVar, Atom] = {}
    inputs = [Var(aval(v)) for v in jaxpr.invars]
    if consts is None:
        before = [Var(aval(v)) for v in jaxpr.constvars]
        env.update(zip(jaxpr.constvars, before, strict=True))
        inputs = before + inputs
    else:
        env.update((v, Known(c)) for v, c in zip(jaxpr.constvars, consts, strict=True))
    env.update(zip([*([] if consts is not None else jaxpr.constvars), *jaxpr.invars], inputs, strict=True))
    writer = _Writer()
    writer.write(jaxpr, env, None)
    flat = Flat(inputs, writer.steps, [_read(env, v) for v in jaxpr.outvars])
    return _needed(flat)


def _read(env: dict[JaxprVar, Atom], atom: JaxprVar | Literal) -> Atom:
    return Known(literal_value(atom)) if isinstance(atom, Literal) else env[atom]


class _Writer:
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.remats = 0

    def write(self, jaxpr: AnyJaxpr, env: dict[JaxprVar, Atom], remat: int | None) -> None:
        for eqn in jaxpr.eqns:
            ins = [_read(env, v) for v in eqn.invars]
            if eqn.primitive.name == VARYING_CAST:  # where types are checked, every value is evaluated as varying
                env.update(zip(eqn.outvars, ins, strict=True))
                continue
            called = called_program(eqn)
            if called is not None:
                self._write_call(eqn, *called, ins, env, remat)
                continue
            outs = [Var(aval(v)) for v in eqn.outvars]
            env.update(zip(eqn.outvars, outs, strict=True))
            self.steps.append(Step(eqn, ins, outs, remat))

    def _write_call(
        self,
        eqn: JaxprEqn,
        inner: AnyJaxpr,
        consts: Sequence[jax.Array],
        ins: list[Atom],
        env: dict[JaxprVar, Atom],
        remat: int | None,
    ) -> None:
        if eqn.primitive.name == REMAT:
            self.remats += 1
            remat = self.remats
            ins = self._barrier(eqn.params, ins, remat)
        here: dict[JaxprVar, Atom] = dict(zip(inner.constvars, map(Known, consts), strict=True))
        here.update(zip(inner.invars, ins, strict=True))
        self.write(inner, here, remat)
        env.update((v, _read(here, o)) for v, o in zip(eqn.outvars, inner.outvars, strict=True))

    def _barrier(self, params: dict[str, Any], ins: list[Atom], remat: int) -> list[Atom]:
        """The operands of a `jax.checkpoint` behind one barrier, as JAX lowers it.

        So the compiler merges nothing of the recomputation with the forward pass.
        """
        prevent = params.get("prevent_cse", True)
        chosen = prevent if isinstance(prevent, tuple) else (prevent,) * len(ins)
        if not params.get("differentiated", True) or not any(chosen):
            return ins
        held = [i for i, (x, p) in enumerate(zip(ins, chosen, strict=True)) if p and isinstance(x, Var)]
        outs = [Var(ins[i].aval) for i in held]  # type: ignore[union-attr]
        self.steps.append(Step(None, [ins[i] for i in held], outs, remat))
        out = list(ins)
        for i, v in zip(held, outs, strict=True):
            out[i] = v
        return out


def _needed(flat: Flat) -> Flat:
    """The program without steps whose results are not read: the compiler would not remove a gather for them.

    Steps with effects stay. A barrier keeps those of its operands whose results are read.
    """
    variables = lambda atoms: [x for x in atoms if isinstance(x, Var)]
    reads: dict[Var, list[Var]] = {}
    for step in flat.steps:
        if step.eqn is None:
            reads.update((o, variables([i])) for i, o in zip(step.ins, step.outs, strict=True))
        else:
            reads.update(dict.fromkeys(step.outs, variables(step.ins)))
    effects = [step for step in flat.steps if step.eqn is not None and step.eqn.effects]
    results = [*variables(flat.outs), *(v for step in effects for v in variables(step.ins))]
    found = needed(results, lambda v: reads.get(v, ()))
    kept = []
    for step in flat.steps:
        if step.eqn is None:
            pairs = [(i, o) for i, o in zip(step.ins, step.outs, strict=True) if o in found]
            step = Step(None, [i for i, _ in pairs], [o for _, o in pairs], step.remat)
        if not found.isdisjoint(step.outs) or step in effects:
            kept.append(step)
    return Flat(flat.inputs, kept, flat.outs)


def inlined(
    jaxpr: AnyJaxpr, consts: Sequence[jax.Array], *, remat: bool = False
) -> tuple[list[JaxprEqn], list[Any], dict[Var, jax.Array]]:
    """A program whose calls are written out: a jitted function of a tree would make all leaves depend on each other.

    Args:
      jaxpr: An open program.
      consts: Its constants.
      remat: Whether rematerialised calls are written out too: where nothing is differentiated they mean nothing.

    Returns:
      Its equations and its results, over the program's own inputs and new variables; constants by variable.
    """
    eqns: list[JaxprEqn] = []
    known: dict[Var, jax.Array] = {}

    def write(program: AnyJaxpr, constants: Sequence[jax.Array], env: dict[Any, Any]) -> list[Any]:
        held = [Var(aval(v)) for v in program.constvars]
        known.update(zip(held, constants, strict=True))
        env.update(zip(program.constvars, held, strict=True))
        read = lambda atom: atom if isinstance(atom, Literal) else env[atom]
        for eqn in program.eqns:
            ins: list[Any] = [read(v) for v in eqn.invars]
            called = called_program(eqn)
            if called is not None and (remat or eqn.primitive.name != REMAT):
                inner, more = called
                outs: list[Any] = write(inner, more, dict(zip(inner.invars, ins, strict=True)))
            else:
                outs = [Var(aval(v)) for v in eqn.outvars]
                eqns.append(eqn.replace(invars=ins, outvars=outs))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in program.outvars]

    outs = write(jaxpr, consts, {v: v for v in jaxpr.invars})
    return eqns, outs, known


def casts_to_varying(jaxpr: AnyJaxpr) -> bool:
    """Whether a program, traced inside a manual region, casts values that are equal on all devices to varying ones."""
    casts = lambda eqn: eqn.primitive.name == VARYING_CAST or any(map(casts_to_varying, inner_programs(eqn)))
    return any(map(casts, jaxpr.eqns))
