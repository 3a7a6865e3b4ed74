"""Programs that are compiled for eager calls, kept as long as the function that they were traced from.

An eager call traces the user's function each time, as `jax.value_and_grad` runs it each time: what the function reads
beside its arguments, an attribute or an array in a dict, may have changed. It compiles only if the program is a new
one. A compiled program holds nothing of the function: arrays that this closes over are arguments.
"""

import dataclasses
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import jax

from ..jaxpr.compat import is_weak
from ..jaxpr.trace import AnyJaxpr, Program
from ..partition import alike

Array = jax.Array
T = TypeVar("T")
#: Runs a traced call: takes the parameters, the arrays of the batch and the constants.
Run = Callable[[Sequence[Array], Sequence[Array], Sequence[Array]], T]

#: How many programs of one function are kept: it may read a number that is another one at each step.
_CACHE_SIZE = 32


@dataclasses.dataclass(frozen=True)
class TracedCall(Generic[T]):
    """A user's function, traced for one call.

    Attributes:
      program: The program.
      run: Evaluates it; holds neither the function nor the constants.
      joins: What `run` depends on beside the program and the call.
    """

    program: Program
    run: Run[T]
    joins: Hashable = ()

    @property
    def key(self) -> Hashable:
        """Equal keys of one call mean equal results for equal arrays and constants."""
        jaxpr: AnyJaxpr = self.program.jaxpr
        same = alike.key(jaxpr.eqns, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars)
        leaves, tree = jax.tree.flatten(self.program.out)
        return same, tree, tuple(map(is_weak, leaves)), self.joins


class Programs:
    """The compiled programs of one function and one call."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, Run[Any]] = {}

    def compiled(self, call: Hashable, traced: TracedCall[T]) -> Run[T]:
        """The traced call, compiled: before, if `call` and the program are equal."""
        key = (call, traced.key)
        try:
            found = self._by_key.get(key)
        except TypeError:  # what a user's tree holds as static data has no hash
            return jax.jit(traced.run)
        if found is None:
            if len(self._by_key) >= _CACHE_SIZE:
                self._by_key.pop(next(iter(self._by_key)))
            # A program's equations hold the objects that its key names by identity, so these stay alive.
            found = self._by_key[key] = jax.jit(traced.run)
        return found

    def clear(self) -> None:
        """Forgets all programs."""
        self._by_key.clear()


class KeptPrograms:
    """The programs of all functions that are alive, by identity: a callable need not have a hash."""

    def __init__(self) -> None:
        self._by_function: dict[int, tuple[weakref.ref[Any], dict[Hashable, Programs]]] = {}

    def of(self, fn: Callable[..., Any], *key: Hashable) -> Programs:
        """The programs of `fn` for calls of one kind; new ones where nothing can be kept."""
        fn = getattr(fn, _ORIGIN, fn)
        owner = getattr(fn, "__self__", fn)  # a bound method is a new object at each access
        number = id(owner)
        if number not in self._by_function:
            try:
                ref = weakref.ref(owner, lambda _: self._by_function.pop(number, None))
            except TypeError:  # a class with __slots__
                return Programs()
            self._by_function[number] = (ref, {})
        return self._by_function[number][1].setdefault((getattr(fn, "__func__", None), *key), Programs())

    def cache_clear(self) -> None:
        """Forgets all programs."""
        for _, by_kind in list(self._by_function.values()):  # a function may die meanwhile
            for programs in by_kind.values():
                programs.clear()


kept = KeptPrograms()

_ORIGIN = "_jaxzero_origin"


def calling(origin: Callable[..., Any], fn: Callable[..., T]) -> Callable[..., T]:
    """`fn`, which the library makes anew around a user's function `origin`; its programs are kept with that one."""
    setattr(fn, _ORIGIN, origin)
    return fn
