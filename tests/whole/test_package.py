"""The wheel and the source distribution: each installs in a fresh environment and trains a step there."""

import os
import pathlib
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest

import jaxzero

ROOT = pathlib.Path(__file__).parents[2]
SMOKE = """
import jax, jax.numpy as jnp, optax
jax.config.update("jax_num_cpu_devices", 8)
import jaxzero
zero = jaxzero.Zero(jax.make_mesh((8,), ("data",)), stage=3)
params = zero.shard({"w": jnp.ones((5, 3)), "b": jnp.zeros(3)})
tx = zero.optimizer(optax.adamw(1e-2))
loss, grads = zero.value_and_grad(lambda p, x: jnp.mean((x @ p["w"] + p["b"]) ** 2))(params, jnp.ones((16, 5)))
params, state = zero.apply(tx, grads, tx.init(params), params)
print(jaxzero.__file__, float(loss), zero.gather(params)["w"].shape)
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)], check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["*.whl", "*.tar.gz"])
def test_a_fresh_environment_trains_a_step(tmp_path, distributions, pattern):
    """From another folder, without the extras, which are named by the program that needs them."""
    (archive,) = distributions.glob(pattern)
    assert jaxzero.__version__ in archive.name
    venv.create(tmp_path / "env", with_pip=True)
    ours = ("PYTHONPATH", "XLA_FLAGS")  # the flags are those of the JAX that is here
    env = {k: v for k, v in os.environ.items() if k not in ours} | {"JAX_PLATFORMS": "cpu", "NPROC": "32"}
    run = lambda *words: subprocess.run(
        [tmp_path / "env/bin" / words[0], *words[1:]], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    installed = run("python", "-m", "pip", "install", "--quiet", str(archive))
    assert installed.returncode == 0, installed.stderr
    trained = run("python", "-c", SMOKE)
    assert trained.returncode == 0, trained.stderr
    where, loss, shape = trained.stdout.split(maxsplit=2)
    assert where.startswith(str(tmp_path))
    assert (float(loss), shape.strip()) == (25.0, "(5, 3)")
    assert run("jaxzero", "--version").stdout.startswith(f"jaxzero {jaxzero.__version__}, jax ")
    asked = run("jaxzero", "doctor")
    assert (asked.returncode, asked.stderr) == (
        2,
        'jaxzero: the command line needs tyro. Fix: pip install ".[cli]" in the folder of jaxzero\n',
    )


@pytest.mark.slow
def test_files_of_the_distributions(distributions):
    """The wheel has the package and its licence alone; the source distribution has the tests too."""
    (wheel,), (source,) = distributions.glob("*.whl"), distributions.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"jaxzero", f"jaxzero-{jaxzero.__version__}.dist-info"}
    assert {"jaxzero/py.typed", f"jaxzero-{jaxzero.__version__}.dist-info/licenses/LICENSE"} <= set(names)
    with tarfile.open(source) as archive:
        there = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "tests/conftest.py", "docs/guide.md"} <= there
