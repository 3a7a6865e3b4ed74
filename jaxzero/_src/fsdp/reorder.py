"""When whole gradients are made: after the product that is the parameter's last use, one after another.

Of the two products in the backward pass of `x @ w` autodiff puts the gradient of `w` first, and its result is
as large as `w` itself. If the product with `w` comes first, `w` is gone when its gradient is made.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ..jaxpr.flat import Flat, Step, Var

#: What autodiff puts between the product that makes a gradient and the gradient.
_RELABELS = {"transpose", "reshape", "squeeze", "convert_element_type"}


def find(flat: Flat, terms: Mapping[Var, Sequence[int]], large: Callable[[int], bool]) -> dict[Step, list[Step]]:
    """The steps that make a large gradient, and the moves and casts behind each.

    Args:
      flat: The program.
      terms: Variables that are terms of gradients -> the positions of those.
      large: Whether the gradient at a position is reduced by itself.

    Returns:
      Step -> the steps from its result to the term. Only steps whose result nothing else reads.
    """
    made = {v: step for step in flat.steps for v in step.outs}
    used = Counter(x for x in [*(x for step in flat.steps for x in step.ins), *flat.outs] if isinstance(x, Var))
    makers: dict[Step, list[Step]] = {}
    for v, positions in terms.items():
        if not all(map(large, positions)):
            continue
        step, tail, x = made.get(v), [], v
        while step is not None and step.name in _RELABELS and used[x] == 1 and isinstance(step.ins[0], Var):
            tail.append(step)
            x = step.ins[0]
            step = made.get(x)
        if step is not None and step.eqn is not None and used[x] == 1:
            makers[step] = tail[::-1]
    return makers


def defer_wgrads(flat: Flat, makers: Mapping[Step, Sequence[Step]], uses: Sequence[Step]) -> dict[Step, Step]:
    """Moves each maker behind the next use of a large parameter that reads the same data.

    Args:
      flat: The program; its steps are put in the new order.
      makers: The result of `find`.
      uses: The steps that use a large parameter.

    Returns:
      Maker -> the use that it was moved behind.
    """
    at = {step: i for i, step in enumerate(flat.steps)}
    behind: dict[Step, Step] = {}
    for maker in makers:
        data = {x for x in maker.ins if isinstance(x, Var)}
        later = (u for u in uses if at[u] > at[maker] and data.intersection(x for x in u.ins if isinstance(x, Var)))
        use = min(later, key=at.__getitem__, default=None)
        if use is not None and use not in makers:
            behind[maker] = use
    moved = {step for maker in behind for step in (maker, *makers[maker])}
    order: list[Step] = []
    for step in flat.steps:
        if step not in moved:
            order.append(step)
            order += [s for maker, use in behind.items() if use is step for s in (maker, *makers[maker])]
    flat.steps[:] = order
    return behind
