"""What may stand outside of `zero.optimizer`: each transformation there, compared with the unsharded run.

python tests/support/outside_cases.py      # writes the table of docs/outside.md from the results
"""

import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import optax

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)

import checks
import helpers
from jax.sharding import PartitionSpec as P
from stage3_models import normal

import jaxzero

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "outside.md"
BEGIN, END = "<!-- outside:begin -->\n", "<!-- outside:end -->"
COLUMNS = ("stage 1", "stage 2", "stage 3", "in `shard_map`")

#: Leaves that are cut in rows, leaves that are padded, a scalar.
PARAMS = {"a": normal(0, 13, 3), "b": normal(1, 3), "d": normal(3, 16, 2), "s": normal(4)}
MASK = {"a": True, "b": True, "d": False, "s": True}
LABELS = {"a": "x", "b": "y", "d": "x", "s": "y"}
BATCHES = checks.quadratic_batches(3)
#: With state, and without a division that hides errors of scale, as Adam has it.
INNER = optax.sgd(0.1, momentum=0.9)

Wrap = Callable[[optax.GradientTransformation], optax.GradientTransformation]


def before(*transformations: optax.GradientTransformation) -> Callable[[Wrap], optax.GradientTransformation]:
    """Transformations of gradients, then the wrapped optimizer."""
    return lambda wrap: optax.chain(*transformations, wrap(INNER))


def after(*transformations: optax.GradientTransformation) -> Callable[[Wrap], optax.GradientTransformation]:
    """The wrapped optimizer, then transformations of its updates."""
    return lambda wrap: optax.chain(wrap(INNER), *transformations)


def masked(wrap: Wrap) -> optax.GradientTransformation:
    """With what the mask leaves out not moved at all."""
    rest = {k: not v for k, v in MASK.items()}
    return optax.chain(optax.masked(wrap(INNER), MASK), optax.masked(optax.set_to_zero(), rest))


def inject(wrap: Wrap) -> optax.GradientTransformation:
    return optax.inject_hyperparams(lambda rate: wrap(optax.adamw(rate)))(rate=lambda count: 0.1 / (1 + count))


#: From the place and the name to a function of `zero.optimizer`, or of the identity, that makes the optimizer.
CASES: dict[tuple[str, str], Callable[[Wrap], optax.GradientTransformation]] = {
    ("before", "clip"): before(optax.clip(0.1)),
    ("before", "scale_by_schedule"): before(optax.scale_by_schedule(lambda count: 1.0 / (1 + count))),
    ("before", "zero_nans"): before(optax.zero_nans()),
    ("before", "trace"): before(optax.trace(0.9)),
    ("before", "ema"): before(optax.ema(0.9)),
    ("before", "scale_by_adam"): before(optax.scale_by_adam()),
    ("before", "clip_by_global_norm"): before(optax.clip_by_global_norm(0.1)),
    ("before", "normalize_by_update_norm"): before(optax.normalize_by_update_norm()),
    ("before", "clip_by_block_rms"): before(optax.clip_by_block_rms(0.01)),
    ("before", "centralize"): before(optax.centralize()),
    ("before", "adaptive_grad_clip"): before(optax.adaptive_grad_clip(0.01)),
    ("before", "scale_by_factored_rms"): before(optax.scale_by_factored_rms(min_dim_size_to_factor=3)),
    ("before", "add_noise"): before(optax.add_noise(0.1, 0.5, jax.random.key(0))),
    ("before", "add_decayed_weights"): before(optax.add_decayed_weights(0.1)),
    ("after", "scale"): after(optax.scale(0.5)),
    ("after", "add_decayed_weights"): after(optax.add_decayed_weights(-0.01)),
    ("after", "clip_by_global_norm"): after(optax.clip_by_global_norm(0.1)),
    ("after", "clip_by_block_rms"): after(optax.clip_by_block_rms(0.01)),
    ("after", "scale_by_trust_ratio"): after(optax.scale_by_trust_ratio(), optax.scale(0.1)),
    ("after", "keep_params_nonnegative"): after(optax.keep_params_nonnegative()),
    ("around", "inject_hyperparams"): inject,
    ("around", "multi_transform"): lambda wrap: optax.multi_transform(
        {"x": wrap(INNER), "y": wrap(optax.sgd(0.1))}, LABELS
    ),
    ("around", "masked"): masked,
    ("around", "MultiSteps"): lambda wrap: optax.MultiSteps(wrap(INNER), 2).gradient_transformation(),
    ("around", "apply_if_finite"): lambda wrap: optax.apply_if_finite(wrap(INNER), 3),
    ("around", "skip_not_finite in MultiSteps"): lambda wrap: optax.MultiSteps(
        wrap(INNER), 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    ("around", "conditionally_mask"): lambda wrap: optax.conditionally_mask(wrap(INNER), lambda step: step != 1),
    ("around", "contrib.schedule_free"): lambda wrap: optax.contrib.schedule_free(wrap(INNER), 0.05),
}


def plain(make: Callable[[Wrap], optax.GradientTransformation]) -> Any:
    """The parameters of the unsharded run."""
    tx, params = make(lambda inner: inner), PARAMS
    state = tx.init(params)
    for batch in BATCHES:
        updates, state = tx.update(jax.grad(checks.quadratic)(params, batch), state, params)
        params = optax.apply_updates(params, updates)
    return params


def on_global_arrays(make: Callable[[Wrap], optax.GradientTransformation], stage: int) -> Any:
    """Those of a run with the gradients of `value_and_grad`."""
    zero = jaxzero.Zero(helpers.make_mesh(8), stage=stage)
    tx, params = make(zero.optimizer), zero.shard(PARAMS)
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        _, grads = zero.value_and_grad(checks.quadratic)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for batch in BATCHES:
        params, state = step(params, state, batch)
    return zero.gather(params)


def inside(make: Callable[[Wrap], optax.GradientTransformation]) -> Any:
    """Those of a run in a `shard_map`, behind `reduce_gradients`."""
    mesh = helpers.make_mesh(8)
    wrap = lambda inner: jaxzero.zero2(inner, "data", grads="reduced")
    tx = optax.chain(jaxzero.reduce_gradients("data"), make(wrap))

    def steps(params: Any, batches: Any) -> Any:
        state = tx.init(params)
        for batch in batches:
            own = jax.lax.pcast(params, "data", to="varying")
            updates, state = tx.update(jax.grad(checks.quadratic)(own, batch), state, params)
            params = optax.apply_updates(params, updates)
        return params

    run = jax.jit(jax.shard_map(steps, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    return run(checks.place(PARAMS, mesh, P()), checks.place(BATCHES, mesh, P("data")))


def outcome(case: tuple[str, str], column: str) -> tuple[str, str]:
    """What becomes of a case: a word of the table, and the error if there is one."""
    make = CASES[case]
    try:
        got = on_global_arrays(make, int(column[-1])) if column.startswith("stage") else inside(make)
    except (TypeError, ValueError) as error:
        return "refused", f"{type(error).__name__}: {error}"
    try:
        checks.assert_params_equal(got, plain(make))
    except AssertionError as error:
        return "**wrong**", str(error)
    return "exact", ""


def table(outcomes: dict[tuple[tuple[str, str], str], str]) -> str:
    """The rows of the page."""
    rows = [f"| outside the wrapper | | {' | '.join(COLUMNS)} |", "|---|---|" + "---|" * len(COLUMNS)]
    for place, name in CASES:
        cells = " | ".join(outcomes[(place, name), column] for column in COLUMNS)
        rows.append(
            f"| {place} | `optax.{name}` | {cells} |".replace("optax.schedule_free", "optax.contrib.schedule_free")
        )
    return "\n".join(rows) + "\n"


def written() -> dict[tuple[tuple[str, str], str], str]:
    """The outcomes that the page shows."""
    text = PAGE.read_text()
    rows = text[text.index(BEGIN) + len(BEGIN) : text.index(END)].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    names = [(place, name.strip("`").removeprefix("optax.")) for place, name, *_ in cells]
    return {(n, c): x for n, row in zip(names, cells, strict=True) for c, x in zip(COLUMNS, row[2:], strict=True)}


def main() -> None:
    """Runs every cell and writes the table; prints what is refused or wrong."""
    found = {}
    for case in CASES:
        for column in COLUMNS:
            found[case, column], said = outcome(case, column)
            sys.stdout.write(f"{case} {column}: {found[case, column]} {said[:1500]}\n")
            sys.stdout.flush()
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(BEGIN) + len(BEGIN)] + table(found) + text[text.index(END) :])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
