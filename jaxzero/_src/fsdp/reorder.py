"""When whole gradients are made: after the product that is the parameter's last use, one after another.

A *wgrad step* is the product that makes the gradient of a large parameter. For `y = x @ w`, with `x` of shape
(batch, 4096), `w` of shape (4096, 16384) and `dy` the gradient of `y`, the backward pass has two products:

    dw = x.T @ dy      (4096, 16384)   the wgrad step: as large as `w` itself
    dx = dy @ w.T      (batch, 4096)   the last use of `w`

Autodiff puts `dw` first. Both read `dy`, so neither needs the other's result. If `dx` comes first, `w` is no longer
needed when `dw` is made, and one array of (4096, 16384) is whole at a time instead of two. So each wgrad step, with
the transposes and casts behind it, moves behind the next use of a large parameter that reads the same data. Only
steps after the end of the forward pass move, so the numbers of the forward pass stay.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ..jaxpr.flat import Flat, Step, Var
from ..jaxpr.primitives import CONVERT, RESHAPE, SQUEEZE, TRANSPOSE

#: What autodiff puts between the product that makes a gradient and the gradient.
_RELABELS = {TRANSPOSE, RESHAPE, SQUEEZE, CONVERT}


def wgrad_steps(flat: Flat, terms: Mapping[Var, Sequence[int]], large: Callable[[int], bool]) -> dict[Step, list[Step]]:
    """The steps that make a large gradient, and the moves and casts behind each.

    Args:
      flat: The program.
      terms: Variable -> the positions of the gradients of which it is a term.
      large: Whether the gradient at a position is reduced by itself.

    Returns:
      Wgrad step -> the steps from its result to the term. Only steps whose result nothing else reads.
    """
    made_by = {v: step for step in flat.steps for v in step.outs}
    reads = Counter(x for x in [*(x for step in flat.steps for x in step.ins), *flat.outs] if isinstance(x, Var))
    found: dict[Step, list[Step]] = {}
    for v, positions in terms.items():
        if not all(map(large, positions)):
            continue
        step, tail, x = made_by.get(v), [], v
        while step is not None and step.name in _RELABELS and reads[x] == 1 and isinstance(step.ins[0], Var):
            tail.append(step)
            x = step.ins[0]
            step = made_by.get(x)
        if step is not None and step.eqn is not None and reads[x] == 1:
            found[step] = tail[::-1]
    return found


def defer_wgrads(
    flat: Flat, wgrads: Mapping[Step, Sequence[Step]], uses: Sequence[Step], first: int = 0
) -> tuple[Flat, dict[Step, Step]]:
    """Moves each wgrad step behind the next use of a large parameter that reads the same data.

    Args:
      flat: The program.
      wgrads: The result of `wgrad_steps`.
      uses: The steps that use a large parameter.
      first: The number of the first step that may move.

    Returns:
      The program in its new order; wgrad step -> the use behind which it was moved.
    """
    number = {step: i for i, step in enumerate(flat.steps)}
    behind: dict[Step, Step] = {}
    for wgrad in wgrads:
        data = {x for x in wgrad.ins if isinstance(x, Var)}
        later = (u for u in uses if number[u] > number[wgrad] >= first and not data.isdisjoint(u.ins))
        use = min(later, key=number.__getitem__, default=None)
        if use is not None and use not in wgrads:
            behind[wgrad] = use
    groups = {wgrad: [wgrad, *wgrads[wgrad]] for wgrad in behind}
    moved = {step for group in groups.values() for step in group}
    order: list[Step] = []
    for step in flat.steps:
        if step not in moved:
            order.append(step)
            order += [s for wgrad, use in behind.items() if use is step for s in groups[wgrad]]
    return Flat(flat.inputs, order, flat.outs), behind
