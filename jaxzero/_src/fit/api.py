"""`fit`: the settings for a loss, an optimizer and a machine, and what was tried."""

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._table import fold, table, terminal_width
from .._text import size_text
from .._types import PyTree
from ..analysis.machine import Machine
from ..analysis.predict import machine_of
from ..analysis.topology import topology
from ..sharding.scalars import is_int, positions
from .problem import Problem
from .search import Search, Trial
from .step import tokens_of
from .ways import start_ways


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOptions:
    """How `fit` searches.

    Attributes:
      accumulate: Micro-steps, as for `value_and_grad`.
      whole_argnums: As for `value_and_grad`.
      remat: The same loss with `jax.checkpoint`: less memory, more time. It is tried too.
      offload: Whether state and parameters may be stored in the host's memory; for devices that are here.
      compiles: How many programs may be compiled.
      devices: Devices to compile for; default: `topology` of the machine's name.
      cache: A folder in which results are kept; without one they are kept in this process.
      progress: What is called with a line for each compile; default: it is printed to stderr.
    """

    accumulate: int = 1
    whole_argnums: Any = ()
    remat: Callable[..., PyTree] | None = None
    offload: bool = False
    compiles: int = 12
    devices: np.ndarray | None = None
    cache: str | None = None
    progress: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class Fit:
    """What `fit` found; `print` shows a table.

    Attributes:
      trials: All ways, compiled or ruled out: those that fit first, by predicted time.
      memory: The budget in bytes.
      machine: The machine.
      tokens: What one step works off, and its unit.
      advice: What would fit, where nothing does.
    """

    trials: tuple[Trial, ...]
    memory: float
    machine: Machine
    tokens: tuple[int, str] | None
    advice: str = ""

    @property
    def best(self) -> Trial | None:
        """The fastest way that fits."""
        first = self.trials[0] if self.trials else None
        return first if first is not None and first.fits else None

    @property
    def constructor(self) -> str:
        """The call of the best way, to paste; empty where nothing fits."""
        return self.best.way.constructor if self.best else ""

    def __str__(self) -> str:
        rows = [self._row(x) for x in self.trials if x.found]
        head = ("settings", "memory", "step", "computing", "per second", "")
        title = f"{self.machine.name}, {size_text(self.memory)} per device; times are predicted"
        out = [table(head, rows, "<>>>><", title=title)]
        ruled = [f"not compiled: {x.way}: {x.why}" for x in self.trials if not x.found]
        last = self.constructor or self.advice
        return "\n".join([*out, *(line for text in ruled for line in fold(text, terminal_width())), last])

    def _row(self, x: Trial) -> tuple[str, ...]:
        assert x.found is not None
        if x.found.total is None:
            return str(x.way), "refused", "", "", "", "does not fit"
        rate = f"{self.tokens[0] / x.found.seconds:,.0f} {self.tokens[1]}" if self.tokens else ""
        times = f"{1e3 * x.found.seconds:.4g} ms", f"{x.found.busy / x.found.seconds:.0%}"
        return str(x.way), size_text(x.found.total), *times, rate, "" if x.fits else "does not fit"


def fit(
    loss_fn: Callable[..., PyTree],
    params: PyTree,
    batch: PyTree,
    inner: optax.GradientTransformation,
    machine: Machine | str,
    *,
    memory: float | None = None,
    options: FitOptions = FitOptions(),
) -> Fit:
    """The fastest settings of `Zero` that fit a machine's memory, found by compiling; nothing runs.

    A function, as the mesh is part of what it chooses. Tries stages and groups (a node, two nodes, ..., all), then,
    where none fits, what saves memory, then single options around the best way. Bytes at rest, temporaries of other
    groups and planned traffic rule out most ways, so that few programs are compiled. Times are those of `predict`.

    Args:
      loss_fn: The loss, as for `value_and_grad`.
      params: Parameters, concrete or abstract.
      batch: The rest of the loss's arguments, as a tuple; global, concrete or abstract.
      inner: The optimizer, not wrapped.
      machine: The name of a machine as for `topology`, or a `Machine`.
      memory: Bytes of a device's memory that a step may need; default: all of it.
      options: How to search.

    Returns:
      A `Fit`: all trials by predicted time with their memory, the best one, and the constructor call to paste. Where
      nothing fits, `best` is `None` and `advice` says what would.

    Raises:
      ValueError: For a loss that cannot be traced, a budget below one layer, a batch that does not divide among the
        devices, an unknown machine, a topology whose plug-in is not installed.

    Examples:
      >>> import jax, jax.numpy as jnp, numpy as np, optax, jaxzero
      >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
      >>> w, x = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((16, 64), jnp.float32)
      >>> here = jaxzero.FitOptions(devices=np.array(jax.devices()), compiles=2, progress=lambda line: None)
      >>> found = jaxzero.fit(loss, w, (x,), optax.adam(1e-3), "h100:1x8", memory=1e6, options=here)
      >>> found.constructor.startswith('jaxzero.Zero(jax.make_mesh((8,), ("data",)), stage=')
      True
    """
    _check(memory, options)
    hardware = machine_of(machine)
    budget = hardware.memory if memory is None else float(memory)
    devices = topology(hardware.name) if options.devices is None else np.asarray(options.devices, dtype=object).ravel()
    problem = Problem(
        {False: loss_fn} | ({True: options.remat} if options.remat else {}),
        _abstract(params),
        _abstract(batch if isinstance(batch, tuple) else (batch,)),
        inner,
        hardware,
        devices,
        options.accumulate,
        positions(options.whole_argnums),
        options.cache,
    )
    _check_loss(problem)
    problem.check_memory(budget)
    search = Search(problem.known, problem.compile_way, budget, options.compiles, options.progress)
    starts = start_ways(hardware, devices.size, tuple(problem.losses))
    trials = search.run(starts, remat=True in problem.losses, offload=options.offload)
    trials.sort(key=lambda x: (not x.fits, x.found is None, x.found.seconds if x.found else math.inf))
    advice = "" if search.best else _advice(trials, problem, budget, options)
    return Fit(tuple(trials), budget, hardware, tokens_of(problem.batch, problem.whole), advice)


def _advice(trials: list[Trial], problem: Problem, budget: float, options: FitOptions) -> str:
    """What would fit, from the way that needs least."""
    needed = lambda x: x.found.total if x.found and x.found.total is not None else math.inf
    least = min(trials, key=lambda x: (needed(x), x.rest))
    what = []
    temporaries = max(0.0, needed(least) - least.rest) if needed(least) < math.inf else 0.0
    if temporaries < budget:
        count = math.ceil(least.rest * least.way.group / (budget - temporaries))
        per_node = problem.machine.per_node if not problem.machine.torus else 4
        what.append(f"about {max(problem.devices.size + per_node, per_node * math.ceil(count / per_node))} devices")
    if least.rest < budget and temporaries:
        steps = max(2, math.ceil(temporaries / (budget - least.rest)))
        what.append(f"micro-batches (accumulate={options.accumulate * steps}, if activations need most)")
    if options.remat is None:
        what.append("a loss with jax.checkpoint around each layer (remat=)")
    if not options.offload:
        what.append("state in the host's memory (offload)")
    size = f"{size_text(needed(least))} compiled" if needed(least) < math.inf else f"{size_text(least.rest)} at rest"
    return f"Nothing fits {size_text(budget)}. Least: {least.way}, {size}. What may fit: {'; '.join(what)}."


# --- checks --------------------------------------------------------------------------------------


def _check(memory: object, options: FitOptions) -> None:
    if memory is not None and not (isinstance(memory, (int, float)) and 0 < memory < math.inf):
        raise ValueError(f"fit: memory={memory!r}. Expected positive bytes per device. Fix: for example memory=80e9.")
    if not is_int(options.compiles, 1):
        raise ValueError(f"fit: compiles={options.compiles!r}. Expected a positive int. Fix: compiles=12.")


def _check_loss(problem: Problem) -> None:
    """Refuses a loss that cannot be traced, and a batch that does not divide."""
    for again, loss in problem.losses.items():
        try:
            jax.eval_shape(loss, problem.params, *problem.batch)
        except Exception as error:
            name = "options.remat" if again else "the loss"
            text = str(error).splitlines()[0] if str(error) else "no message"
            raise ValueError(
                f"fit: {name} cannot be traced: {type(error).__name__}: {text}. Expected a function of the parameters "
                "and the batch that jax.eval_shape accepts. Fix: try jax.eval_shape(loss_fn, params, *batch)."
            ) from error
    parts = problem.devices.size * problem.accumulate
    given = [x for i, b in enumerate(problem.batch, 1) if i not in problem.whole for x in jax.tree.leaves(b)]
    for x in given:
        if x.shape and x.shape[0] % parts:
            raise ValueError(
                f"fit: the batch has {x.shape[0]} examples. Expected a multiple of {parts}: {problem.devices.size} "
                f"devices x {problem.accumulate} micro-steps. Fix: for example "
                f"{parts * max(1, math.ceil(x.shape[0] / parts))} examples."
            )


def _abstract(tree: PyTree) -> PyTree:
    make = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype if hasattr(x, "dtype") else jnp.result_type(x))
    return jax.tree.map(make, tree)
