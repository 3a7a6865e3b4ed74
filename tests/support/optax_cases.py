"""Every public Optax transformation, how the tests build it, and which names are left out.

The expressions are run as they stand here and printed in the README as they stand here. A key is
the public name, optionally with a variant after a comma. `test_optax_grid.py` asserts that every
name of `optax` and `optax.contrib` that makes a transformation is a key here or in `EXCLUDED`.
"""

import contextlib
import dataclasses
import inspect
import warnings

import jax
import jax.numpy as jnp
import optax
import optax.contrib as contrib


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: the key, the expression, and what its update needs beyond gradients."""

    key: str
    expression: str
    needs: tuple[str, ...] = ()
    params: str = "odd"  # "odd", "arrays" (no scalar), "complex", "lookahead" or "matrix" (a bare array)
    grows: bool = False  # the state gains leaves in the first update

    @property
    def name(self) -> str:
        return self.key.split(",")[0]

    def make(self) -> optax.GradientTransformation:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the deprecated aliases
            made = eval(self.expression, {"optax": optax, "contrib": contrib, **HELPERS})
        return made.gradient_transformation() if isinstance(made, optax.MultiSteps) else made


def ndim_mask(tree):
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def labels(tree):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", tree)


def odd_steps(step):
    return step % 2 == 1


FROZEN = {"conv": False, "emb": True, "even": False, "layers": True, "scale": True, "tiny": False}
HELPERS = dict(jax=jax, jnp=jnp, ndim_mask=ndim_mask, labels=labels, odd_steps=odd_steps, FROZEN=FROZEN)

VALUE, SEARCH = ("value",), ("value", "grad", "value_fn")

ALIASES = [
    Case("optax.adabelief", "optax.adabelief(1e-2)"),
    Case("optax.adadelta", "optax.adadelta(1.0, weight_decay=0.1)"),
    Case("optax.adafactor", "optax.adafactor(1e-2, min_dim_size_to_factor=4)"),
    Case("optax.adafactor, unfactored", "optax.adafactor(1e-2, factored=False, momentum=0.9)"),
    Case("optax.adagrad", "optax.adagrad(1e-2)"),
    Case("optax.adam", "optax.adam(1e-2)"),
    Case("optax.adam, bfloat16 moment", "optax.adam(1e-2, mu_dtype=jnp.bfloat16)"),
    Case("optax.adamax", "optax.adamax(1e-2)"),
    Case("optax.adamaxw", "optax.adamaxw(1e-2, weight_decay=0.1)"),
    Case("optax.adamw", "optax.adamw(1e-2, weight_decay=0.1)"),
    Case("optax.adamw, ndim mask", "optax.adamw(1e-2, weight_decay=0.1, mask=ndim_mask)"),
    Case("optax.adan", "optax.adan(1e-2, weight_decay=0.1)"),
    Case("optax.amsgrad", "optax.amsgrad(1e-2)"),
    Case("optax.fromage", "optax.fromage(1e-2)"),
    Case("optax.lamb", "optax.lamb(1e-2, weight_decay=0.1)"),
    Case("optax.lars", "optax.lars(1e-1, weight_decay=0.1)"),
    Case("optax.lbfgs", "optax.lbfgs(memory_size=3)", SEARCH),
    Case("optax.lbfgs, fixed step", "optax.lbfgs(1e-1, memory_size=3, linesearch=None)"),
    Case("optax.lion", "optax.lion(1e-2)"),
    Case("optax.nadam", "optax.nadam(1e-2)"),
    Case("optax.nadamw", "optax.nadamw(1e-2, weight_decay=0.1)"),
    Case("optax.noisy_sgd", "optax.noisy_sgd(1e-2, key=jax.random.key(3))"),
    Case("optax.novograd", "optax.novograd(1e-2, weight_decay=0.1)"),
    Case("optax.optimistic_adam", "optax.optimistic_adam(1e-2, optimism=1e-2)"),
    Case("optax.optimistic_adam_v2", "optax.optimistic_adam_v2(1e-2)"),
    Case("optax.optimistic_gradient_descent", "optax.optimistic_gradient_descent(1e-2)"),
    Case("optax.polyak_sgd", "optax.polyak_sgd(0.5)", VALUE),
    Case("optax.radam", "optax.radam(1e-2, b2=0.9, threshold=4.0)"),
    Case("optax.rmsprop", "optax.rmsprop(1e-2, momentum=0.9)"),
    Case("optax.rmsprop, centered", "optax.rmsprop(1e-2, centered=True)"),
    Case("optax.rprop", "optax.rprop(1e-2)"),
    Case("optax.sgd", "optax.sgd(0.5)"),
    Case("optax.sgd, momentum", "optax.sgd(0.1, momentum=0.9, nesterov=True)"),
    Case("optax.sign_sgd", "optax.sign_sgd(1e-2)"),
    Case("optax.signum", "optax.signum(1e-2)"),
    Case("optax.sm3", "optax.sm3(1e-1)", params="arrays"),
    Case("optax.yogi", "optax.yogi(1e-2)"),
    Case("contrib.acprop", "contrib.acprop(1e-2, weight_decay=0.1)"),
    Case("contrib.ademamix", "contrib.ademamix(1e-2, weight_decay=0.1)"),
    Case("contrib.adopt", "contrib.adopt(1e-2)"),
    Case("contrib.cocob", "contrib.cocob(1.0, weight_decay=0.1)"),
    Case("contrib.dadapt_adamw", "contrib.dadapt_adamw(1.0, estim_lr0=1e-2)"),
    Case("contrib.dog", "contrib.dog(1.0, ('distance', 1e-2))"),
    Case("contrib.dowg", "contrib.dowg(1.0, 1e-2)"),
    Case("contrib.galore", "contrib.galore(1e-2, rank=2, update_proj_gap=2, weight_decay=0.1)"),
    Case("contrib.madgrad", "contrib.madgrad(1e-2, weight_decay=0.1)"),
    Case("contrib.momo", "contrib.momo(1.0, weight_decay=0.1)", VALUE),
    Case("contrib.momo_adam", "contrib.momo_adam(1e-2, adapt_lower_bound=True)", VALUE),
    Case("contrib.muon", "contrib.muon(1e-2, weight_decay=0.1)"),
    Case("contrib.prodigy", "contrib.prodigy(1.0, estim_lr0=1e-2)"),
    Case("contrib.schedule_free_adamw", "contrib.schedule_free_adamw(1e-2, weight_decay=0.1)"),
    Case("contrib.schedule_free_sgd", "contrib.schedule_free_sgd(1e-1)"),
    Case("contrib.simplified_ademamix", "contrib.simplified_ademamix(1e-3, alpha=1.0)"),
    Case("contrib.sophia", "contrib.sophia(1e-2, update_interval=2)", ("obj_fn",)),
]

TRANSFORMATIONS = [
    Case("optax.adaptive_grad_clip", "optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.5))"),
    Case("optax.add_decayed_weights", "optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.5))"),
    Case(
        "optax.add_noise",
        "optax.chain(optax.add_noise(0.01, 0.5, jax.random.key(3)), optax.sgd(0.5))",
    ),
    Case("optax.apply_every", "optax.chain(optax.sgd(0.1), optax.apply_every(2))"),
    Case("optax.centralize", "optax.chain(optax.centralize(), optax.sgd(0.5))"),
    Case("optax.clip", "optax.chain(optax.clip(0.02), optax.sgd(0.5))"),
    Case("optax.clip_by_block_rms", "optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.5))"),
    Case(
        "optax.clip_by_global_norm",
        "optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2))",
    ),
    Case("optax.ema", "optax.chain(optax.ema(0.9), optax.sgd(0.5))"),
    Case("optax.identity", "optax.chain(optax.identity(), optax.sgd(0.5))"),
    Case(
        "optax.keep_params_nonnegative",
        "optax.chain(optax.sgd(0.5), optax.keep_params_nonnegative())",
    ),
    Case(
        "optax.measure_with_ema",
        "optax.chain(optax.sgd(0.5), optax.monitor({'ema': optax.measure_with_ema(optax.tree.norm, 0.9)}))",
        grows=True,
    ),
    Case(
        "optax.monitor",
        "optax.chain(optax.sgd(0.5), optax.monitor({'norm': optax.tree.norm}))",
        grows=True,
    ),
    Case(
        "optax.normalize_by_update_norm",
        "optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.5))",
    ),
    Case("optax.scale", "optax.scale(-0.5)"),
    Case("optax.scale_by_adadelta", "optax.chain(optax.scale_by_adadelta(), optax.scale(-1.0))"),
    Case("optax.scale_by_adam", "optax.chain(optax.scale_by_adam(), optax.scale(-1e-2))"),
    Case("optax.scale_by_adamax", "optax.chain(optax.scale_by_adamax(), optax.scale(-1e-2))"),
    Case("optax.scale_by_adan", "optax.chain(optax.scale_by_adan(), optax.scale(-1e-2))"),
    Case("optax.scale_by_amsgrad", "optax.chain(optax.scale_by_amsgrad(), optax.scale(-1e-2))"),
    Case(
        "optax.scale_by_backtracking_linesearch",
        "optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5))",
        SEARCH,
    ),
    Case("optax.scale_by_belief", "optax.chain(optax.scale_by_belief(), optax.scale(-1e-2))"),
    Case(
        "optax.scale_by_distance_over_gradients",
        "optax.chain(optax.scale_by_distance_over_gradients(1e-2), optax.scale(-1.0))",
        params="arrays",  # its update turns a scalar into a vector of one, sharded or not
    ),
    Case(
        "optax.scale_by_factored_rms",
        "optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=4), optax.scale(-1e-2))",
    ),
    Case(
        "optax.scale_by_lbfgs",
        "optax.chain(optax.scale_by_lbfgs(memory_size=2), optax.scale(-0.1))",
    ),
    Case("optax.scale_by_learning_rate", "optax.scale_by_learning_rate(0.5)"),
    Case(
        "optax.scale_by_learning_rate, schedule",
        "optax.scale_by_learning_rate(optax.linear_schedule(0.5, 0.1, 4))",
    ),
    Case("optax.scale_by_lion", "optax.chain(optax.scale_by_lion(), optax.scale(-1e-2))"),
    Case("optax.scale_by_novograd", "optax.chain(optax.scale_by_novograd(), optax.scale(-1e-2))"),
    Case(
        "optax.scale_by_optimistic_gradient",
        "optax.chain(optax.scale_by_optimistic_gradient(), optax.scale(-0.1))",
    ),
    Case(
        "optax.scale_by_param_block_norm",
        "optax.chain(optax.scale_by_param_block_norm(), optax.scale(-0.1))",
    ),
    Case(
        "optax.scale_by_param_block_rms",
        "optax.chain(optax.scale_by_param_block_rms(), optax.scale(-0.1))",
    ),
    Case("optax.scale_by_polyak", "optax.chain(optax.scale_by_polyak(), optax.scale(-0.5))", VALUE),
    Case("optax.scale_by_radam", "optax.chain(optax.scale_by_radam(), optax.scale(-1e-2))"),
    Case("optax.scale_by_rms", "optax.chain(optax.scale_by_rms(), optax.scale(-1e-2))"),
    Case("optax.scale_by_rprop", "optax.chain(optax.scale_by_rprop(1e-2), optax.scale(-1.0))"),
    Case("optax.scale_by_rss", "optax.chain(optax.scale_by_rss(), optax.scale(-1e-2))"),
    Case(
        "optax.scale_by_schedule",
        "optax.scale_by_schedule(optax.linear_schedule(-0.5, -0.1, 4))",
    ),
    Case("optax.scale_by_sign", "optax.chain(optax.scale_by_sign(), optax.scale(-1e-2))"),
    Case("optax.scale_by_sm3", "optax.chain(optax.scale_by_sm3(), optax.scale(-1e-2))", params="arrays"),
    Case("optax.scale_by_stddev", "optax.chain(optax.scale_by_stddev(), optax.scale(-1e-2))"),
    Case(
        "optax.scale_by_trust_ratio",
        "optax.chain(optax.scale_by_trust_ratio(), optax.scale(-0.1))",
    ),
    Case("optax.scale_by_yogi", "optax.chain(optax.scale_by_yogi(), optax.scale(-1e-2))"),
    Case(
        "optax.scale_by_zoom_linesearch",
        "optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(5))",
        SEARCH,
    ),
    Case("optax.set_to_zero", "optax.chain(optax.set_to_zero(), optax.add_decayed_weights(-0.1))"),
    Case("optax.snapshot", "optax.chain(optax.snapshot('norm', optax.tree.norm), optax.sgd(0.5))"),
    Case(
        "optax.stateless",
        "optax.stateless(lambda u, p: jax.tree.map(lambda u, p: -0.1 * (u + 0.1 * p), u, p))",
    ),
    Case(
        "optax.stateless_with_tree_map",
        "optax.stateless_with_tree_map(lambda u, p: -0.1 * u / (1 + jnp.max(jnp.abs(p))))",
    ),
    Case("optax.trace", "optax.chain(optax.trace(0.9), optax.scale(-0.1))"),
    Case("optax.zero_nans", "optax.chain(optax.zero_nans(), optax.sgd(0.5))"),
    Case(
        "contrib.hutchinson_estimator_diag_hessian",
        "optax.chain(contrib.hutchinson_estimator_diag_hessian(), optax.scale(-0.1))",
        ("obj_fn",),
    ),
    Case("contrib.normalize", "optax.chain(contrib.normalize(), optax.sgd(0.5))"),
    Case(
        "contrib.reduce_on_plateau",
        "optax.chain(optax.sgd(0.5), contrib.reduce_on_plateau(0.5, 1, rtol=0.5))",
        VALUE,
    ),
    Case("contrib.scale_by_acprop", "optax.chain(contrib.scale_by_acprop(), optax.scale(-1e-2))"),
    Case("contrib.scale_by_ademamix", "optax.chain(contrib.scale_by_ademamix(), optax.scale(-1e-2))"),
    Case("contrib.scale_by_adopt", "optax.chain(contrib.scale_by_adopt(), optax.scale(-1e-2))"),
    Case("contrib.scale_by_cocob", "optax.chain(contrib.scale_by_cocob(), optax.scale(-1.0))"),
    Case(
        "contrib.scale_by_galore",
        "optax.chain(contrib.scale_by_galore(rank=2, update_proj_gap=2), optax.scale(-1e-2))",
    ),
    Case("contrib.scale_by_madgrad", "contrib.scale_by_madgrad(1e-2)"),
    Case("contrib.scale_by_muon", "optax.chain(contrib.scale_by_muon(), optax.scale(-1e-2))", params="matrix"),
    Case(
        "contrib.scale_by_simplified_ademamix",
        "optax.chain(contrib.scale_by_simplified_ademamix(), optax.scale(-1e-3))",
    ),
]

WRAPPERS = [
    Case("optax.MultiSteps", "optax.MultiSteps(optax.adam(1e-2), 2)"),
    Case(
        "optax.MultiSteps, skip_not_finite",
        "optax.MultiSteps(optax.adam(1e-2), 2, should_skip_update_fn=optax.skip_not_finite)",
    ),
    Case(
        "optax.MultiSteps, skip_large_updates",
        "optax.MultiSteps(optax.sgd(-1.0), 1, should_skip_update_fn=lambda u, s, p: "
        "optax.skip_large_updates(u, s, p, 4.0))",
    ),
    Case("optax.apply_if_finite", "optax.apply_if_finite(optax.adamw(1e-2), 3)"),
    Case("optax.chain", "optax.chain(optax.trace(0.9), optax.adam(1e-2))"),
    Case(
        "optax.conditionally_mask",
        "optax.conditionally_mask(optax.adam(1e-2), odd_steps)",
    ),
    Case(
        "optax.conditionally_transform",
        "optax.conditionally_transform(optax.adam(1e-2), odd_steps)",
    ),
    Case("optax.flatten", "optax.flatten(optax.adam(1e-2))"),
    Case("optax.freeze", "optax.chain(optax.adam(1e-2), optax.freeze(FROZEN))"),
    Case(
        "optax.inject_hyperparams",
        "optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(1e-2, 10))",
    ),
    Case(
        "optax.inject_stateful_hyperparams",
        "optax.inject_stateful_hyperparams(optax.adamw)(optax.cosine_decay_schedule(1e-2, 10))",
    ),
    Case("optax.lookahead", "optax.lookahead(optax.adam(1e-2), 2, 0.5)", params="lookahead"),
    Case(
        "optax.lookahead, reset state",
        "optax.lookahead(optax.adam(1e-2), 2, 0.5, reset_state=True)",
        params="lookahead",
    ),
    Case("optax.masked", "optax.masked(optax.adam(1e-2), ndim_mask)"),
    Case(
        "optax.multi_transform",
        "optax.multi_transform({'matrix': optax.adam(1e-2), 'vector': optax.sgd(0.1)}, labels)",
    ),
    Case(
        "optax.named_chain",
        "optax.named_chain(('clip', optax.clip_by_global_norm(0.05)), ('adam', optax.adam(1e-2)))",
    ),
    Case(
        "optax.partition",
        "optax.partition({'matrix': optax.lamb(1e-2), 'vector': optax.set_to_zero()}, labels)",
    ),
    Case(
        "optax.selective_transform",
        "optax.selective_transform(optax.adam(1e-2), freeze_mask=FROZEN)",
    ),
    Case("optax.with_extra_args_support", "optax.with_extra_args_support(optax.adam(1e-2))"),
    Case("contrib.mechanize", "contrib.mechanize(optax.adam(1e-2), s_init=1e-2)"),
    Case("contrib.sam", "contrib.sam(optax.sgd(0.1), optax.sgd(0.05))"),
    Case(
        "contrib.sam, opaque",
        "contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True)",
        ("grad_fn",),
    ),
    Case("contrib.schedule_free", "contrib.schedule_free(optax.sgd(0.1), 0.1)"),
    Case(
        "contrib.split_real_and_imaginary",
        "contrib.split_real_and_imaginary(optax.adam(1e-2))",
        params="complex",
    ),
]

GROUPS = {"Optimizers": ALIASES, "Transformations": TRANSFORMATIONS, "Wrappers": WRAPPERS}
CASES = {case.key: case for group in GROUPS.values() for case in group}

_PER_EXAMPLE = (
    "its update takes per-example gradients (a batch dimension in front of every leaf), so there "
    "is no mean gradient to reduce; a leaf of the wrong shape is refused by name"
)
EXCLUDED = {
    "contrib.differentially_private_aggregate": _PER_EXAMPLE,
    "contrib.dpsgd": _PER_EXAMPLE,
}


def makes_a_transformation(value) -> bool:
    """Does calling `value` in one of the usual ways give a GradientTransformation?"""
    if inspect.isclass(value):
        return hasattr(value, "gradient_transformation")  # MultiSteps
    if inspect.ismodule(value) or not callable(value):
        return False
    with contextlib.suppress(ValueError, TypeError):  # some callables have no signature
        if "GradientTransformation" in str(inspect.signature(value)):
            return True
    for arguments in ((), (0.1,), (optax.sgd(0.1),)):
        with contextlib.suppress(Exception), warnings.catch_warnings():  # most are not called like this
            warnings.simplefilter("ignore")
            if isinstance(value(*arguments), optax.GradientTransformation):
                return True
    return False


def public_names() -> set[str]:
    """The names in `optax` and `optax.contrib` that make a GradientTransformation."""
    return {
        f"{label}.{name}"
        for label, module in (("optax", optax), ("contrib", contrib))
        for name in dir(module)
        if not name.startswith("_") and makes_a_transformation(getattr(module, name))
    }
