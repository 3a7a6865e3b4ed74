"""A sum of two terms of which one is scattered onto zeros: the terms are scattered onto the other one.

The gradient of an embedding that is also the head of the model is such a sum. With 50257 tokens of width 256:

    dot        (50257, 256)                      the term of the head
    zeros      (50257, 256)
    scatter    zeros, tokens, rows               the term of the embedding
    add        dot, scatter                      the gradient

The compiler turns this into `scatter dot, tokens, rows`, which needs one array of this shape instead of three, unless
a barrier stands before the sum. Gradients are reduced one after another behind such barriers, so it is done here.
"""

from collections import Counter
from collections.abc import Mapping

from ..jaxpr.flat import Flat, Step, Var
from ..jaxpr.primitives import ADD, ADD_ANY, SCATTER_ADD
from .gradient_terms import is_zero


def scatter_onto_sums(flat: Flat) -> Flat:
    """The same program, but what is scattered onto zeros and then added to `x` is scattered onto `x` at once."""
    made_by = {v: step for step in flat.steps for v in step.outs}
    reads = Counter(x for x in [*(x for step in flat.steps for x in step.ins), *flat.outs] if isinstance(x, Var))
    joined: dict[Step, Step] = {}
    left_out: set[Step] = set()
    for step in flat.steps:
        scatter = _scatter_in_sum(step, made_by, reads)
        if scatter is not None:
            (onto,) = [x for x in step.ins if x is not scatter.outs[0]]
            joined[step] = Step(scatter.eqn, [onto, *scatter.ins[1:]], step.outs, step.remat)
            left_out.add(scatter)
    return Flat(flat.inputs, [joined.get(step, step) for step in flat.steps if step not in left_out], flat.outs)


def _scatter_in_sum(step: Step, made_by: Mapping[Var, Step], reads: Mapping[Var, int]) -> Step | None:
    """The step that scatters one of the two terms that a step adds onto zeros; `None` if there is none."""
    if step.name not in (ADD, ADD_ANY) or not all(isinstance(x, Var) for x in step.ins):
        return None
    for x in step.ins:
        scatter = made_by.get(x) if reads[x] == 1 else None  # type: ignore[arg-type, index]
        if scatter is None or scatter.name != SCATTER_ADD or not isinstance(scatter.ins[0], Var):
            continue
        zeros = made_by.get(scatter.ins[0])
        if zeros is not None and is_zero(zeros, made_by) and _same_type(step):
            return scatter
    return None


def _same_type(step: Step) -> bool:
    """Whether both terms have the shape and dtype of their sum."""
    avals = [x.aval for x in [*step.ins, *step.outs] if isinstance(x, Var)]
    return len({(aval.shape, aval.dtype) for aval in avals}) == 1
