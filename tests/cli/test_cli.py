"""The command line: what it prints, its exit status, and one line for whatever cannot be done."""

import dataclasses
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import checks
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh

import jaxzero
import jaxzero.cli
from jaxzero.cli import app, compile, doctor, optimizers, plan, problem, self_test, settings

ROOT = pathlib.Path(__file__).parents[2]

MODELS = """
import jax, jax.numpy as jnp, optax

f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
def params(): return {"w": f32(64, 64), "b": f32(64)}
def loss(p, x): return jnp.mean(jnp.tanh(x @ p["w"] + p["b"]) ** 2)
def mlp(): return params(), loss, f32(16, 64)
def real(): return {"w": jnp.ones((3, 5))}
def text(): return "no"
def nothing(): return None
def mixed(): return {"w": f32(3), "name": "a"}
def pair(): return f32(3), "second"
def broken(): return 1 / 0
def bad_loss(): return params(), lambda p, x: x @ p["w"][:3], f32(16, 64)
def clipped(): return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
def loud():
    print("reading data")
    return params(), lambda p, x: print("tracing") or loss(p, x), f32(16, 64)
def loud_adam():
    print("an optimizer")
    adam = optax.adam(1e-3)
    return adam._replace(init=lambda p: print("its state") or adam.init(p))
def leaves(): raise SystemExit(0)
def half(): return optax.GradientTransformation(lambda p: (), lambda u, s, p=None: 1 / 0)
number = 3
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A folder with a module, as a user's."""
    (tmp_path / "cli_models.py").write_text(MODELS)
    (tmp_path / "cli_bad_import.py").write_text("import numpyy\n")
    (tmp_path / "cli_bad_syntax.py").write_text("def f(:\n")
    (tmp_path / "cli_leaves.py").write_text("import sys\nsys.exit()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield
    for name in ("cli_models", "cli_bad_import", "cli_bad_syntax", "cli_leaves"):
        sys.modules.pop(name, None)


def run(capsys, *arguments):
    """The exit status, stdout and stderr of one command."""
    try:
        status = jaxzero.cli.main(arguments)
    except SystemExit as error:  # tyro's own
        status = error.code
    out = capsys.readouterr()
    return status, out.out, out.err


# --- plan ----------------------------------------------------------------------------------------


def test_plan_prints_the_plan(models, capsys):
    status, out, err = run(capsys, "plan", "cli_models:params", "--mesh", "data=8")
    assert (status, err) == (0, "")
    want = jaxzero.Zero(AbstractMesh((8,), ("data",))).plan(
        {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}, optax.adamw(1)
    )
    assert out.rstrip() == str(want).rstrip()


def test_plan_of_an_optimizer_that_takes_more_than_gradients(models, capsys):
    """Its state is counted, and a note says that the traffic of its update is not."""
    arguments = ("--mesh", "data=8", "--optimizer", "lbfgs", "--json")
    status, out, _ = run(capsys, "plan", "cli_models:params", *arguments)
    found = json.loads(out)
    assert status == 0
    assert found["at_rest"][2]["state"] > 0
    assert any("what the update of the optimizer sends is missing" in note for note in found["notes"])


def test_plan_as_json(models, capsys):
    arguments = ("--mesh", "replica=2,data=4", "--stage", "3", "--optimizer", "cli_models:clipped", "--json")
    status, out, _ = run(capsys, "plan", "cli_models:mlp", *arguments)
    found = json.loads(out)
    assert status == 0
    assert (found["target"], found["stage"], found["mesh"]) == ("cli_models:mlp", 3, {"replica": 2, "data": 4})
    assert (found["shard_axis"], found["replica_axis"]) == (["data"], ["replica"])
    assert any("observed loss" in note for note in found["notes"])
    assert {row["phase"] for row in found["traffic"] if row["kind"] == "all-reduce"} == {"gradient", "update"}  # clip


@pytest.mark.parametrize("command", ["plan", "compile"])
def test_json_is_all_of_stdout(models, capsys, command):
    """What the user's code prints, while it is called or traced, goes to stderr."""
    arguments = ("--mesh", "data=8", "--optimizer", "cli_models:loud_adam", "--json")
    status, out, err = run(capsys, command, "cli_models:loud", *arguments)
    assert (status, json.loads(out)["target"]) == (0, "cli_models:loud"), err
    assert {"reading data", "tracing", "an optimizer", "its state"} <= set(err.splitlines())


def test_options_reach_zero():
    given = dict(stage=3, regather="local", bucket_bytes=5, prefetch=1, persist_bytes=6, chunk_bytes=7)
    made = settings.Settings(target="a:b", **given).zero(AbstractMesh((2, 2, 4), ("replica", "node", "local")))
    assert {name: getattr(made, name) for name in given} == given
    assert (made.shard_axis, made.replica_axis) == (("node", "local"), ("replica",))
    other = settings.Settings(target="a:b", shard_axis="local", replica_axis="node,replica")
    made = other.zero(AbstractMesh((2, 2, 4), ("replica", "node", "local")))
    assert (made.shard_axis, made.replica_axis) == ("local", ("node", "replica"))


# --- what a function returns ---------------------------------------------------------------------


def test_flax_linen():
    nn = pytest.importorskip("flax.linen")
    model = nn.Sequential([nn.Dense(4), nn.BatchNorm(use_running_average=False), nn.Dropout(0.5, deterministic=False)])
    for inputs in ((jnp.ones((8, 5)),), ((jnp.ones((8, 5)),),)):
        found = problem.read((model, *inputs))
        assert jax.tree.map(lambda x: x.shape, found.params) == {
            "layers_0": {"kernel": (5, 4), "bias": (4,)},
            "layers_1": {"scale": (4,), "bias": (4,)},
        }
        assert jax.eval_shape(found.loss, found.params, *found.batch).shape == ()
        assert found.whole == (1,)
        assert "mean square" in found.note
    assert problem.read(model) is None


def test_flax_nnx():
    nnx = pytest.importorskip("flax.nnx")
    make = lambda: nnx.Sequential(nnx.Linear(5, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
    for model in (make(), nnx.eval_shape(make)):
        alone, found = problem.read(model), problem.read((model, jnp.ones((8, 5))))
        assert alone.loss is None
        assert alone.params == found.params
        assert sorted(x.shape for x in jax.tree.leaves(found.params)) == [(4,), (4,), (4,), (5, 4)]
        assert jax.eval_shape(found.loss, found.params, *found.batch).shape == ()
        assert jax.tree.leaves(found.batch[0])  # the running mean and variance are no parameters


def test_flax_models_train_as_planned():
    """The whole way: what was read is planned at stage 3, with running statistics given whole."""
    nnx = pytest.importorskip("flax.nnx")
    found = problem.read((nnx.BatchNorm(16, rngs=nnx.Rngs(0)), jnp.ones((8, 16)))).sized(32, 8, 1)
    assert found.batch[1].shape == (32, 16)
    made = settings.Settings(target="a:b", stage=3)
    zero = made.observed(made.zero(AbstractMesh((8,), ("data",))), found)
    assert zero.plan(found.params).at_rest[3].parameters == 2 * 2 * 4


def test_examples_are_counted():
    found = problem.Problem({}, lambda p, x, y: 0, (jax.ShapeDtypeStruct((6, 2), jnp.int32), jnp.float32(1)))
    assert found.sized(None, 3, 2).batch[0].shape == (6, 2)
    assert found.sized(24, 4, 2).batch[0].shape == (24, 2)
    with pytest.raises(ValueError, match=r"--batch: 6 examples do not divide over 4 devices x 1.*--batch 8"):
        found.sized(None, 4, 1)


def test_every_known_optimizer_is_one():
    assert {"adamw", "muon", "lamb", "adafactor", "sgd"} <= optimizers.known().keys()
    assert isinstance(optimizers.make("muon"), optax.GradientTransformation)


# --- compile -------------------------------------------------------------------------------------


def test_compile_for_virtual_devices(models, capsys):
    status, out, err = run(capsys, "compile", "cli_models:mlp", "--mesh", "data=8", "--stage", "3", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["memory"]["total"] > found["memory"]["arguments"] > 0
    assert {x["kind"] for x in found["collectives"]} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert found["sent"] == sum(x["sent"] for x in found["collectives"])


def test_examples_are_dealt_over_the_axes_of_the_zero_alone(models, capsys):
    """Other axes of the mesh send nothing of their own, and 12 examples need not divide over 8 devices."""
    arguments = ("--mesh", "data=4,model=2", "--shard-axis", "data", "--batch", "12", "--json")
    status, out, err = run(capsys, "compile", "cli_models:mlp", *arguments)
    assert (status, err) == (0, "")
    assert {axis for x in json.loads(out)["collectives"] for axis in x["axes"]} == {"data"}
    assert run(capsys, "plan", "cli_models:mlp", *arguments)[0] == 0


def test_compile_prints_tables(models, capsys):
    status, out, _ = run(capsys, "compile", "cli_models:mlp", "--mesh", "data=8", "--accumulate", "2")
    assert status == 0
    assert re.search(r"reduce-scatter +data +yes +2 ", out)
    assert "temporaries" in out
    assert "sent by each device: all rows" in out
    assert "total = arguments + temporaries + outputs - aliased" in out


@pytest.mark.parametrize("command", [compile.Compile, plan.Plan])
def test_devices_are_chosen_before_the_code_of_the_user_runs(monkeypatch, command):
    """It may use a device when it is imported; then it is too late to say how many there are, and of what kind."""
    called = []
    monkeypatch.setattr(compile.Compile, "_mesh", lambda self: called.append("devices"))
    monkeypatch.setattr(plan, "stay_on_cpu", lambda: called.append("devices"))
    monkeypatch.setattr(optimizers, "make", lambda name: called.append("user") or sys.exit())
    with pytest.raises(SystemExit):
        command(target="a:b", mesh="data=8").run()
    assert called == ["devices", "user"]


def test_meshes_of_machines():
    made = lambda name, devices: compile._default(name, devices)
    assert made("h100:2x8", 16) == {"node": 2, "local": 8}
    assert made("h100:1x8", 8) == made("h100", 8) == {"data": 8}
    assert made("v5e:4x4", 16) == {"data": 16}


def test_compile_predicts_the_time_on_a_machine(models, capsys, monkeypatch):
    """The devices are those of this process, the figures those of the machine."""
    monkeypatch.setattr(compile, "topology", lambda name: __import__("numpy").array(jax.devices()))
    arguments = ("compile", "cli_models:mlp", "--topology", "h100:2x4", "--figures", "launch=1,local_latency=1e-9")
    status, out, _ = run(capsys, *arguments, "--json")
    found = json.loads(out)["predicted"]
    assert status == 0
    assert 1 < found["busy"] <= found["seconds"]
    assert found["unit"] == "examples"
    assert found["tokens_per_second"] == pytest.approx(16 / found["seconds"])
    assert {tuple(row["axes"]) for row in found["rows"]} >= {("node",), ("local",)}
    status, out, _ = run(capsys, *arguments)
    assert "predicted, not measured" in out
    assert "examples per second" in out


def test_fit_prints_what_fits(models, capsys, monkeypatch, tmp_path):
    """The devices are those of this process; `remat` is an argument of the function."""
    from jaxzero.cli import fit

    monkeypatch.setattr(fit, "topology", lambda name: __import__("numpy").array(jax.devices()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with open("cli_models.py", "a") as file:
        file.write("def both(remat=False): return params(), jax.checkpoint(loss) if remat else loss, f32(16, 64)\n")
    arguments = ("fit", "cli_models:both", "--topology", "h100:1x8", "--compiles", "6")
    status, out, err = run(capsys, *arguments, "--memory", "1MB", "--json")
    found = json.loads(out)
    assert (status, found["memory"]) == (0, 1e6), err
    assert found["constructor"] == found["trials"][0]["constructor"]
    assert 1 <= sum(x["found"] is not None for x in found["trials"]) <= 6
    assert "1 of 6: stage" in err
    assert any(x["way"]["remat"] for x in found["trials"])
    status, out, _ = run(capsys, *arguments, "--memory", "20kB")
    assert (status, "Nothing fits 20 kB" in out) == (1, True)


def test_a_topology_that_the_mesh_does_not_fit(monkeypatch):
    monkeypatch.setattr(compile, "topology", lambda name: __import__("numpy").array(jax.devices()))
    wrong = compile.Compile(target="a:b", topology="h100:1x8", mesh="data=4")
    with pytest.raises(ValueError, match=r"--mesh data=4: 4 devices, but h100:1x8 has 8. Fix: .*multiply to 8"):
        wrong._mesh()
    assert dict(dataclasses.replace(wrong, mesh=None)._mesh().shape) == {"data": 8}


# --- doctor --------------------------------------------------------------------------------------


def test_doctor_is_green_here(capsys):
    status, out, err = run(capsys, "doctor", "--json")
    found = json.loads(out)
    assert (status, found["ok"], err) == (0, True, "")
    by_name = {check["name"]: check for check in found["checks"]}
    assert by_name["jax"]["detail"] == jax.__version__
    assert "equal plain Optax" in by_name["self-test"]["detail"]
    assert "cpu" in by_name["devices"]["detail"]


def test_doctor_says_what_failed(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "NEEDED", ("no-such-package",))
    monkeypatch.setattr(doctor, "devices", lambda: doctor._child("devices", ["-c", "1 / 0"], {}))
    monkeypatch.setattr(doctor, "self_test", lambda: doctor.Finding("self-test", "ok", ""))
    status, out, _ = run(capsys, "doctor")
    assert status == 1
    assert re.search(r"failed +no-such-package +pip install no-such-package", out)
    assert re.search(r"failed +devices +ZeroDivisionError: division by zero", out)
    assert "something failed" in out


def test_doctor_gives_up(monkeypatch):
    monkeypatch.setattr(doctor, "PATIENCE", 0.01)
    assert doctor._child("devices", ["-c", "import time; time.sleep(60)"], {}) == doctor.Finding(
        "devices", "failed", "no answer after 0.01 s"
    )


def test_self_test_can_fail(capsys, monkeypatch):
    monkeypatch.setattr(self_test, "difference", lambda stage: 1.0 if stage == 2 else 0.0)
    assert self_test.main() == 1
    assert "at stage [2]" in capsys.readouterr().err


# --- bad input: one line, exit status 2, no traceback --------------------------------------------

MESH = ("--mesh", "data=8")
BAD = [
    (("plan", "nowhere_at_all:f", *MESH), ["no module 'nowhere_at_all'", "Fix"]),
    (("plan", "cli_bad_import:f", *MESH), ["cli_bad_import", "ModuleNotFoundError", "numpyy", r"cli_bad_import.py:1"]),
    (("plan", "cli_bad_syntax:f", *MESH), ["cli_bad_syntax", "SyntaxError", "line 1"]),
    (("plan", "cli_models:parms", *MESH), ["has no 'parms'", "did you mean 'params'"]),
    (("plan", "cli_models", *MESH), ["names no function", "module:function"]),
    (("plan", "cli_models:number", *MESH), ["is a int, not a function"]),
    (("plan", "cli_models:text", *MESH), ["returned a str", "Expected parameters"]),
    (("plan", "cli_models:nothing", *MESH), ["returned None", "Expected parameters"]),
    (("plan", "cli_models:mixed", *MESH), ["returned a dict with a str in it", "Expected parameters"]),
    (("plan", "cli_models:pair", *MESH), ["returned a tuple of ShapeDtypeStruct, str"]),
    (("plan", "cli_models:broken", *MESH), ["cli_models:broken raised ZeroDivisionError", r"cli_models.py:\d+"]),
    (("plan", "cli_models:bad_loss", *MESH), ["the loss of cli_models:bad_loss raised TypeError", "cli_models.py"]),
    (("plan", "cli_models:params", *MESH, "--optimizer", "adamww"), ["adamww", "did you mean 'adamw'"]),
    (("plan", "cli_models:params", *MESH, "--optimizer", "cli_models:params"), ["found a dict", "GradientTransf"]),
    (("plan", "cli_models:params", "--mesh", "data=0"), ["--mesh data=0", "positive", "Fix"]),
    (("plan", "cli_models:params", "--mesh", "data8"), ["--mesh data8", "Fix"]),
    (("plan", "cli_models:params", "--mesh", "a=2,a=4"), ["different axis names", "Fix"]),
    (("plan", "cli_models:params", "--mesh", "replica=8"), ["shard_axis is empty"]),
    (("plan", "cli_models:params", *MESH, "--shard-axis", "dat"), ["shard_axis='dat'", "data"]),
    (("plan", "cli_models:params", *MESH, "--regather", "local"), ["regather='local' with stage=2", "Fix"]),
    (("plan", "cli_models:params", *MESH, "--accumulate", "0"), ["accumulate=0"]),
    (("plan", "cli_models:mlp", *MESH, "--accumulate", "0"), ["accumulate=0"]),
    (("plan", "cli_models:mlp", "--mesh", "data=3"), ["16 examples", "--batch 18"]),
    (("plan", "cli_models:params", *MESH, "--batch", "16"), ["--batch: 16", "no examples", "Fix"]),
    (("plan", "cli_models:leaves", *MESH), ["cli_models:leaves raised SystemExit: 0 at cli_models.py"]),
    (("plan", "cli_leaves:f", *MESH), ["importing cli_leaves raised SystemExit"]),
    (("plan", "cli_models:params", *MESH, "--optimizer", "cli_models:half"), ["cli_models:half raised ZeroDivisionE"]),
    (("compile", "cli_models:mlp", *MESH, "--optimizer", "lbfgs"), ["optax's lbfgs raised TypeError", "'value'"]),
    (("plan", "cli_models:params", *MESH, "--optimizer", "sam"), ["in optax.contrib and needs more than a learning"]),
    (("compile", "cli_models:mlp", "--mesh", "data=4096"), ["4096", "at most 2048 virtual CPU devices", "Fix"]),
    (("export", "cli_models.py"), ["cli_models.py", "is a file"]),
    (("compile", "cli_models:mlp", "--topology", "h10:2x8"), ["'h10:2x8' is no known machine", "did you mean 'h100'"]),
    (("compile", "cli_models:mlp", "--topology", "h100:2"), ["nodes x GPUs", "Fix"]),
    (
        ("compile", "cli_models:mlp", "--mesh", "data=8", "--figures", "launch=1"),
        ["--figures without --topology", "Fix"],
    ),
    (("compile", "cli_models:mlp", "--topology", "h100", "--figures", "lanch=1"), ["unknown figure", "did you mean"]),
    (("fit", "cli_models:mlp", "--topology", "h100", "--memory", "lots"), ["--memory lots: expected bytes", "70GB"]),
    (("compile", "cli_models:mlp"), ["neither --topology nor --mesh", "Fix"]),
    (("compile", "cli_models:params", *MESH), ["a step needs a loss", "Fix"]),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=lambda x: " ".join(x[1:]) if isinstance(x, tuple) else "")
def test_bad_input(models, capsys, arguments, words):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("jaxzero: ")
    assert err.count("\n") == 1
    assert re.search(checks.saying(*words), err), err


@pytest.mark.parametrize("arguments", [("plan", "a:b"), ("plan", "a:b", *MESH, "--stge", "3"), ("plann",), ()])
def test_wrong_flags(capsys, arguments):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert "--help" in err
    assert "Traceback" not in err


def test_version_needs_no_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert run(capsys, "--version") == (0, f"jaxzero {jaxzero.__version__}, jax {jax.__version__}\n", "")


def test_missing_packages_are_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tyro", None)
    status, _, err = run(capsys, "doctor")
    assert (status, err) == (
        2,
        'jaxzero: the command line needs tyro. Fix: pip install ".[cli]" in the folder of jaxzero\n',
    )


# --- the program ---------------------------------------------------------------------------------


def test_help_has_examples(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    for command in app.COMMANDS:
        name = command.__name__.rpartition(".")[2]
        assert f"jaxzero {name}" in out
        status, shown, _ = run(capsys, name, "--help")
        assert status == 0
        assert "Examples:" in shown
        assert f"  jaxzero {name}" in shown
    assert plan.__doc__ is not None


def test_examples_in_help_parse(models):
    """Every line that --help shows is one that the parser takes."""
    import tyro

    lines = [line.split() for c in app.COMMANDS for line in c.__doc__.splitlines() if line.startswith("  jaxzero ")]
    assert len(lines) >= 6
    for _, name, *arguments in lines:
        command = {c.__name__.rpartition(".")[2]: c.COMMAND for c in app.COMMANDS}[name]
        tyro.cli(command, args=arguments, config=(tyro.conf.FlagCreatePairsOff,))


def test_entry_point_is_there():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["jaxzero"].partition(":")
    assert getattr(importlib.import_module(module), name) is jaxzero.cli.main


def start(**options):
    """`python -m jaxzero` in the folder of the user's module."""
    command = [sys.executable, "-m", "jaxzero", "plan", "cli_models:real", "--mesh", "data=1024", "--json"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        command, text=True, env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE, **options
    )


def test_as_a_module(models):
    with start(stdout=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["leaves"][0]["padding"] == 1024 - 15


def test_a_reader_that_leaves_is_no_error(models):
    read, write = os.pipe()
    os.close(read)
    with start(stdout=write) as process:
        os.close(write)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
