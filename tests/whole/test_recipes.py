"""The recipes run one after the other; what they report is compared with plain JAX and Optax."""

import importlib.util
import pathlib
import re
import types

import jax
import numpy as np
import optax
import pytest

PAGE = (pathlib.Path(__file__).parents[2] / "docs/recipes.md").read_text()


def sections():
    """The code below each heading, in order."""
    parts = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    return {part.splitlines()[0]: "\n".join(re.findall(r"```python\n(.*?)```", part, re.DOTALL)) for part in parts}


class Board:
    """In place of TensorBoard's writer and of a run of Weights & Biases."""

    def __init__(self, *_):
        self.seen = []

    def add_scalar(self, name, value, step):
        self.seen.append((name, value, step))

    def log(self, values, step):
        self.seen += [(name, value, step) for name, value in values.items()]


@pytest.fixture(scope="module")
def names():
    found: dict[str, object] = {}
    patch, boards = pytest.MonkeyPatch(), [Board(), Board()]
    patch.setitem(__import__("sys").modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=lambda _: boards[0]))
    patch.setitem(__import__("sys").modules, "wandb", types.SimpleNamespace(init=lambda **_: boards[1]))
    for heading, code in sections().items():
        if "Grain" not in heading or importlib.util.find_spec("grain"):
            exec(code, found)
        else:
            compile(code, heading, "exec")
        if heading.startswith("Norms"):
            found["first"] = found["norms"]
    patch.undo()
    return found | {"boards": boards}


def test_every_recipe_says_what_plain_jax_says(names):
    zero, x, y = names["zero"], names["x"], names["y"]
    plain = names["init"](jax.random.key(0))
    grads = jax.grad(names["loss_fn"])(plain, x, y)
    inner = optax.adamw(1e-2)
    updates, _ = inner.update(grads, inner.init(plain), plain)
    np.testing.assert_allclose(names["first"]["gradient"], optax.tree.norm(grads), rtol=1e-5)
    np.testing.assert_allclose(names["first"]["update"], optax.tree.norm(updates), rtol=1e-3)
    assert float(names["rate"]) == float(names["schedule"](0))
    assert names["ema"]["b"].value.addressable_shards[0].data.size == 1
    now = zero.gather(names["params"])
    losses = np.asarray(names["metrics"]["losses"])
    assert (losses.shape, float(names["metrics"]["worst"])) == ((16,), losses.max())
    np.testing.assert_allclose(losses.mean(), names["loss_fn"](now, x, y), rtol=1e-4)
    assert float(names["free_loss"]) > 0
    assert float(names["ema_loss"]) > 0
    assert names["best"] < float(names["loss_fn"](plain, x, y))
    np.testing.assert_array_equal(zero.gather(names["after"])["w"], now["w"])
    assert float(np.max(np.abs(zero.gather(names["after"])["b"] - now["b"]))) > 1e-3
    assert {g.dtype for g in jax.tree.leaves(names["half_grads"])} == {np.dtype("float32")}


def test_reports_of_the_recipes(names):
    assert len(names["named"]) > 2
    assert any("transpose" in line for line in names["named"])  # the backward pass keeps the name
    assert names["memory"].aliased > 0
    for board in names["boards"]:
        assert {name for name, *_ in board.seen} == {"loss", "gradient", "update"}
    table = PAGE[PAGE.index("## Out of memory") :]
    fields = set(re.findall(r"`memory\.(\w+)`", table))
    assert fields == {"aliased", "arguments", "temporaries"}
    assert all(hasattr(names["memory"], field) for field in fields)
