"""A traced program as one list of steps: inner programs that are only calls are written out in place.

In the list the order of all uses of a parameter is known, so that a gather and what it waits for can be
placed anywhere. `scan` keeps its body; `cond`, `while` and everything else stay single steps.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from .calls import _REMAT, CALLS, inner_programs
from .compat import Literal, open_program

#: The cast of a value that is equal on all devices to one that may differ; it computes nothing.
_CAST = "pvary"


class Var:
    """One value of a flat program."""

    def __init__(self, aval: Any) -> None:
        self.aval = aval

    def __repr__(self) -> str:
        return f"%{id(self) % 10**6}:{self.aval.str_short()}"


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
      region: The number of the innermost `jax.checkpoint` around it, or `None`.
    """

    eqn: Any
    ins: list[Atom]
    outs: list[Var]
    region: int | None

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


def flatten(jaxpr: Any, consts: Sequence[Any] | None = None) -> Flat:
    """The steps of a program, without those that nothing needs.

    Args:
      jaxpr: An open program.
      consts: Its constants, if they are known; else they are the first inputs.

    Returns:
      The flat program.
    """
    env: dict[Any, Atom] = {}
    inputs = [Var(v.aval) for v in jaxpr.invars]
    if consts is None:
        before = [Var(v.aval) for v in jaxpr.constvars]
        env.update(zip(jaxpr.constvars, before, strict=True))
        inputs = before + inputs
    else:
        env.update((v, Known(c)) for v, c in zip(jaxpr.constvars, consts, strict=True))
    env.update(zip([*([] if consts is not None else jaxpr.constvars), *jaxpr.invars], inputs, strict=True))
    writer = _Writer()
    writer.write(jaxpr, env, None)
    flat = Flat(inputs, writer.steps, [_read(env, v) for v in jaxpr.outvars])
    return _needed(flat)


def _read(env: dict[Any, Atom], atom: Any) -> Atom:
    if isinstance(atom, Literal):
        aval = atom.aval
        return Known(np.asarray(atom.val, aval.dtype))  # type: ignore[attr-defined]
    return env[atom]


class _Writer:
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.regions = 0

    def write(self, jaxpr: Any, env: dict[Any, Atom], region: int | None) -> None:
        for eqn in jaxpr.eqns:
            ins = [_read(env, v) for v in eqn.invars]
            name = eqn.primitive.name
            if name == _CAST:  # where types are checked, every value is evaluated as varying
                env.update(zip(eqn.outvars, ins, strict=True))
                continue
            if name in CALLS:
                inner, consts = open_program(eqn.params[CALLS[name]])
                if name in _REMAT:
                    self.regions += 1
                    ins = self._barrier(eqn.params, ins, self.regions)
                here: dict[Any, Atom] = dict(zip(inner.constvars, map(Known, consts), strict=True))
                here.update(zip(inner.invars, ins, strict=True))
                self.write(inner, here, self.regions if name in _REMAT else region)
                env.update((v, _read(here, o)) for v, o in zip(eqn.outvars, inner.outvars, strict=True))
                continue
            outs = [Var(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, outs, strict=True))
            self.steps.append(Step(eqn, ins, outs, region))

    def _barrier(self, params: Any, ins: list[Atom], region: int) -> list[Atom]:
        """What `jax.checkpoint` lowers to: its operands in one barrier, so that nothing is merged with the forward."""
        prevent = params.get("prevent_cse", True)
        chosen = prevent if isinstance(prevent, tuple) else (prevent,) * len(ins)
        if not params.get("differentiated", True) or not any(chosen):
            return ins
        held = [i for i, (x, p) in enumerate(zip(ins, chosen, strict=True)) if p and isinstance(x, Var)]
        outs = [Var(ins[i].aval) for i in held]  # type: ignore[union-attr]
        self.steps.append(Step(None, [ins[i] for i in held], outs, region))
        out = list(ins)
        for i, v in zip(held, outs, strict=True):
            out[i] = v
        return out


def _needed(flat: Flat) -> Flat:
    """Without steps whose results nobody reads: a gather for them would not be removed by the compiler."""
    wanted = {x for x in flat.outs if isinstance(x, Var)}
    kept = []
    for step in reversed(flat.steps):
        if step.eqn is None:
            pairs = [(i, o) for i, o in zip(step.ins, step.outs, strict=True) if o in wanted]
            step = Step(None, [i for i, _ in pairs], [o for _, o in pairs], step.region)
        if wanted.intersection(step.outs) or (step.eqn is not None and step.eqn.effects):
            wanted.update(x for x in step.ins if isinstance(x, Var))
            kept.append(step)
    return Flat(flat.inputs, kept[::-1], flat.outs)


def inlined(jaxpr: Any, consts: Sequence[Any]) -> tuple[list[Any], list[Any], dict[Var, Any]]:
    """A program whose inner calls are written out: a jitted function of a tree would tie all of its leaves together.

    Args:
      jaxpr: An open program.
      consts: Its constants.

    Returns:
      Its equations and its results, over the program's own inputs and new variables; constants by variable.
    """
    eqns: list[Any] = []
    known: dict[Var, Any] = {}

    def write(program: Any, constants: Sequence[Any], env: dict[Any, Any]) -> list[Any]:
        held = [Var(v.aval) for v in program.constvars]
        known.update(zip(held, constants, strict=True))
        env.update(zip(program.constvars, held, strict=True))
        read = lambda atom: atom if isinstance(atom, Literal) else env[atom]
        for eqn in program.eqns:
            ins, name = [read(v) for v in eqn.invars], eqn.primitive.name
            if name in CALLS and name not in _REMAT:
                inner, more = open_program(eqn.params[CALLS[name]])
                outs = write(inner, more, dict(zip(inner.invars, ins, strict=True)))
            else:
                outs = [Var(v.aval) for v in eqn.outvars]
                eqns.append(eqn.replace(invars=ins, outvars=outs))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in program.outvars]

    outs = write(jaxpr, consts, {v: v for v in jaxpr.invars})
    return eqns, outs, known


def speaks_of_axes(jaxpr: Any) -> bool:
    """Whether a program traced inside a manual region tells values that vary from such that do not."""
    return any(eqn.primitive.name == _CAST or any(map(speaks_of_axes, inner_programs(eqn))) for eqn in jaxpr.eqns)
