"""The examples as a user runs them: a short run that learns, and one line for each bad option."""

import importlib
import io
import json
import math
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys

import jax
import models
import pytest
import rich.console
import train_gpt
import tyro

ROOT = pathlib.Path(__file__).parents[2]
TINY = ["--length", "16", "--width", "32", "--layers", "1"]


def run_train_gpt(*arguments, timeout=300):
    """Run the program on 8 CPU devices; a warning, such as that of a buffer that could not be donated, is an error."""
    return subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples/train_gpt.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "100"},
    )


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat and the dog sat on the log\n" * 100)
    return str(path)


@pytest.mark.grid(5)
@pytest.mark.parametrize(
    "options",
    [
        ["--stage", "3", "--mesh", "2x4", "--optimizer", "lamb", "--learning-rate", "0.03", "--accumulate", "2"],
        ["--optimizer", "adamw", "--learning-rate", "0.01"],
        ["--stage", "1", "--mesh", "2x2", "--optimizer", "muon", "--learning-rate", "0.03", "--clip", "0"],
        ["--stage", "3", "--mesh", "2x2", "--no-replica", "--learning-rate", "0.01", "--dtype", "bf16", "--offload"],
        ["--mesh", "1", "--optimizer", "schedule_free_adamw", "--learning-rate", "0.03"],
    ],
    ids=lambda options: "_".join(options),
)
def test_train_gpt_learns(tmp_path, text, options):
    out = tmp_path / "out"
    run = run_train_gpt(*TINY, "--steps", "30", "--data", text, "--out", str(out), *options)
    assert run.returncode == 0, run.stderr
    metrics = json.loads((out / "metrics.json").read_text())
    losses = metrics["losses"]
    assert len(losses) == 30
    assert sum(losses[-5:]) / 5 < losses[0] - 0.3
    assert metrics["held_out_loss"] < losses[0] - 0.3
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "sample.txt").read_text()) == 300
    for words in ("What lives where", "optimizer state", "tokens/s", "held-out loss", "unigram entropy"):
        assert words in run.stdout
    shards = metrics["mesh"]["data"]
    if not metrics["options"]["replica"]:
        shards *= metrics["mesh"]["group"]
    for name, stage in (("optimizer state", 1), ("gradients", 2), ("parameters", 3)):
        row = metrics["memory"][name]
        split = shards if metrics["options"]["stage"] >= stage else 1
        assert row["unsharded"] / split <= row["per_device"] <= row["unsharded"] / split * 1.05 + 64, name


@pytest.mark.slow
def test_train_gpt_bf16_learns_as_fp32_does(tmp_path):
    """200 steps on the default text: the loss of the last ten within 1 % of float32's."""
    found = {}
    for dtype in ("fp32", "bf16"):
        run = run_train_gpt("--steps", "200", "--dtype", dtype, "--out", str(tmp_path / dtype), timeout=1500)
        assert run.returncode == 0, run.stderr
        found[dtype] = sum(json.loads((tmp_path / dtype / "metrics.json").read_text())["losses"][-10:])
    assert abs(found["bf16"] / found["fp32"] - 1) < 0.01


@pytest.mark.slow
def test_train_gpt_repeats(tmp_path, text, capsys):
    """The same seed gives the same losses, so the dropout keys are a function of it."""
    losses = []
    for name in ("a", "b"):
        options = [*TINY, "--mesh", "2", "--steps", "4", "--data", text, "--out", str(tmp_path / name)]
        train_gpt.main(tyro.cli(train_gpt.Options, args=options))
        losses.append(json.loads((tmp_path / name / "metrics.json").read_text())["losses"])
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_train_gpt_goes_on_elsewhere(tmp_path, text):
    """Two processes, then one, on another mesh and stage; the losses before are kept."""
    options = [*TINY, "--data", text, "--checkpoint-dir", str(tmp_path / "run")]
    first = run_train_gpt(*options, "--steps", "10", "--stage", "3", "--processes", "2", "--out", str(tmp_path / "a"))
    assert first.returncode == 0, first.stderr
    before = json.loads((tmp_path / "a" / "metrics.json").read_text())
    assert before["processes"] == 2
    again = run_train_gpt(*options, "--steps", "14", "--mesh", "2x2", "--resume", "--out", str(tmp_path / "b"))
    assert again.returncode == 0, again.stderr
    assert "going on from step 10" in again.stdout
    after = json.loads((tmp_path / "b" / "metrics.json").read_text())
    assert after["losses"][:10] == before["losses"]
    assert len(after["losses"]) == 14
    assert max(after["losses"][10:]) < before["losses"][0]
    refused = run_train_gpt(*options, "--steps", "20", "--out", str(tmp_path / "c"))
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "it has step 14; go on from there with --resume" in refused.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--optimizer adammw", '--optimizer adammw: optax has no such optimizer; did you mean "adamw"?'),
        ("--optimizer momo", "--optimizer momo: it needs more than the gradients (momo."),
        (
            "--optimizer sam",
            "sam: it is in optax.contrib and needs more than a learning rate: optimizer, adv_optimizer.",
        ),
        ("--optimizer lookahead", "it is in optax and needs more than a learning rate: fast_optimizer, sync_period"),
        ("--optimizer scale_by_adam", "it is in optax, but makes no optimizer from a learning rate alone."),
        ("--optimizer lbfgs", "--optimizer lbfgs: it needs more than the gradients ("),
        ("--learning-rate -1", "--learning-rate -1.0: expected more than 0"),
        ("--learning-rate nan", "--learning-rate nan: expected more than 0"),
        ("--learning-rate 0", "--learning-rate 0.0: expected more than 0"),
        ("--seed -1", "--seed -1: expected 0 or more"),
        ("--mesh 16", "--mesh 16: needs 16 devices, 8 are here (cpu)"),
        ("--mesh 2by4", '--mesh 2by4: expected a number of devices such as "8"'),
        ("--data no_such_file.txt", "--data no_such_file.txt: No such file or directory"),
        ("--data LICENSE --length 100000", "are too few for --length 100000"),
        ("--batch 12", "--batch 12: does not divide over 8 devices"),
        ("--width 100", "--width 100: expected a multiple of 32"),
        ("--steps 0", "--steps 0: expected 1 or more"),
        ("--processes 3", "--processes 3: does not divide 8 devices"),
        ("--resume", "--resume: from where? Give --checkpoint-dir too"),
        ("--resume --checkpoint-dir no_such_folder", "--resume: there is no checkpoint in no_such_folder"),
        ("--out LICENSE/below", "--out LICENSE/below: Not a directory"),
        ("--out LICENSE", "--out LICENSE: File exists"),
        ("--out /proc", "--out /proc: "),
        ("--checkpoint-dir LICENSE/below", "--checkpoint-dir LICENSE/below: Not a directory"),
        ("--checkpoint-dir LICENSE", "--checkpoint-dir LICENSE: File exists"),
        ("--checkpoint-dir /proc", "--checkpoint-dir /proc: "),
    ],
)
def test_train_gpt_bad_option(options, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stop:
        train_gpt.main(tyro.cli(train_gpt.Options, args=options.split()))
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("train_gpt: ")
    assert error.count("\n") == 1
    assert message in error


def test_train_gpt_resumes_the_same_model_only(tmp_path, text, capsys):
    """With `model.json`, in its words; without, in those of `restore`; the same model goes on."""

    def run(*changed, steps="25"):
        options = [*TINY, "--mesh", "1", "--data", text, "--out", str(tmp_path / "out"), "--steps", steps]
        train_gpt.main(
            tyro.cli(train_gpt.Options, args=[*options, "--checkpoint-dir", str(tmp_path / "run"), *changed])
        )
        return capsys.readouterr().out

    run()
    assert train_gpt.jaxzero.latest(tmp_path / "run") == 25  # no multiple of 25 // 10
    other = tmp_path / "other.txt"
    other.write_text("zebra " * 100)
    changes = {
        "--optimizer lion": "has --optimizer adamw, not lion",
        "--optimizer adam": "has --optimizer adamw, not adam",  # of the same state
        "--width 64": "has --width 32, not 64",
        "--dtype bf16": "has --dtype fp32, not bf16",
        "--layers 2": "has --layers 1, not 2",
        "--length 32": "has --length 16, not 32",
        f"--data {other}": "has another text, with other kinds of byte",
        "--clip 0": "is not a checkpoint of these parameters and this optimizer",
    }
    for known in (True, False):
        if not known:
            (tmp_path / "run/model.json").unlink()
            changes = {change: "is not a checkpoint of" for change in changes if change != "--optimizer adam"}
        for change, message in changes.items():
            with pytest.raises(SystemExit) as stop:
                run("--resume", *change.split())
            error = capsys.readouterr().err
            assert stop.value.code == 2, change
            assert error.count("\n") == 1, change
            assert message in error, change
    finished = run("--resume")
    assert "nothing to train: 25 of 25 steps are done" in finished
    assert "training" not in finished
    assert "compiling" not in finished
    run("--resume", steps="26")
    losses = json.loads((tmp_path / "out/metrics.json").read_text())["losses"]
    assert len(losses) == 26


# With two processes on a loaded machine one may leave before the other's last step: Gloo then ends that with an error.
@pytest.mark.parametrize(("processes", "times"), [(1, 1), (1, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_train_gpt_stops_at_ctrl_c(tmp_path, text, processes, times):
    command = [sys.executable, "-W", "error", str(ROOT / "examples/train_gpt.py"), *TINY, "--data", text]
    command += ["--steps", "100000", "--checkpoint-dir", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "100", "PYTHONUNBUFFERED": "1"}
    more = ["--processes", str(processes)]
    with subprocess.Popen([*command, *more], env=env, text=True, stdout=-1, stderr=subprocess.STDOUT) as run:
        seen = []
        for line in run.stdout:
            seen.append(line)
            if "What lives where" in line:  # compiling
                run.send_signal(signal.SIGINT)
                if times == 1:
                    break
            if "Ctrl-C again stops at once" in line:
                run.send_signal(signal.SIGINT)
        output = "".join(seen) + run.stdout.read()
        assert run.wait() == 130, output
    assert "Traceback" not in output
    if times == 2:
        assert "saved" not in output
        return
    assert output.count("and saved it") == 1
    step = int(re.search(r"stopped after step (\d+) and saved it. To go on:", output)[1])
    assert train_gpt.jaxzero.latest(tmp_path / "run") == step
    again = shlex.split(output.splitlines()[-1])
    assert again == ["python", *command[3:], *more, "--resume"]
    assert "--coordinator" not in again


def test_train_gpt_says_that_it_compiles():
    """What the bar shows before there are figures: what is done, and seconds; nothing that is not known."""
    console = rich.console.Console(file=io.StringIO(), force_terminal=True, width=110)
    with train_gpt.Meter(train_gpt.Options(steps=4), console, 1) as meter:
        meter.bar.refresh()
        first = console.file.getvalue()
        meter.show(3.25, True)
        meter.show(3.125, True)
        meter.bar.refresh()
    assert "compiling, then step 2" in first
    assert "0:00:00" in first
    assert not re.search("nan|loss|tokens", first)
    after = console.file.getvalue()[len(first) :]
    assert "loss 3.125" in after
    assert "nan" not in after
    assert "3/4" in after


@pytest.mark.parametrize(("flags", "status", "words"), [("--stage 7", 2, "--stage"), ("--help", 0, "ZeRO stage")])
def test_train_gpt_unknown_flag_and_help(flags, status, words, capsys):
    with pytest.raises(SystemExit) as stop:
        tyro.cli(train_gpt.Options, args=flags.split())
    assert stop.value.code == status
    shown = capsys.readouterr()
    assert words in (shown.err if status else shown.out)


def test_train_gpt_says_that_it_diverged(tmp_path, text, capsys):
    options = ["--steps", "5", "--optimizer", "sgd", "--clip", "0", "--learning-rate", "1e30"]
    with pytest.raises(SystemExit) as stop:
        train_gpt.main(tyro.cli(train_gpt.Options, args=[*TINY, *options, "--data", text, "--out", str(tmp_path)]))
    assert stop.value.code == 1
    assert "a smaller --learning-rate may help" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama_8b", "gpt_3b"])
def test_shapes_have_a_loss(name):
    """What stands in `models.py` traces, with a gradient for every parameter."""
    params, loss, batch = getattr(models, name)()
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    assert count / 1e9 == pytest.approx({"llama_8b": 8.03, "gpt_3b": 3.35}[name], abs=0.01)
    value, grads = jax.eval_shape(jax.value_and_grad(loss), params, batch)
    assert value.shape == ()
    assert jax.tree.map(lambda x: x.shape, grads) == jax.tree.map(lambda x: x.shape, params)


# --- the shorter programs ------------------------------------------------------------------------


def output(name, *arguments):
    """What a program prints; a warning is an error."""
    run = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def figure(pattern, text):
    """The number that a pattern finds."""
    found = re.search(pattern, text)
    assert found, text
    return float(found[1].replace(",", ""))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("nnx_vit.py --steps 0", "nnx_vit: --steps 0: expected 1 or more"),
        ("multi_process.py --processes 0", "multi_process: --processes 0: expected 1 or more"),
        ("multi_process.py --devices -1", "multi_process: --devices -1: expected 1 or more"),
        ("multi_process.py --process 2 --coordinator localhost:1", "multi_process: --process 2: expected 0 to 1"),
        ("multi_process.py --process 0", "multi_process: --process 0: the processes meet where? Give --coordinator"),
        ("multi_process.py --checkpoint-dir LICENSE", "multi_process: --checkpoint-dir LICENSE: File exists"),
    ],
)
def test_a_wrong_option_is_one_line(command, message, monkeypatch, capsys):
    name, *arguments = command.split()
    monkeypatch.chdir(ROOT)
    module = importlib.import_module(name.removesuffix(".py"))
    options = {"nnx_vit": module.main, "multi_process": getattr(module, "Options", None)}[module.__name__]
    run = lambda: module.main(tyro.cli(options, args=arguments))
    with pytest.raises(SystemExit) as stop:
        run()
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_shard_map_by_hand():
    text = output("shard_map_by_hand.py")
    assert figure(r"agree to (\S+) of", text) < 5e-6
    assert figure(r"global view +loss \S+ to (\S+)", text) < figure(r"global view +loss (\S+)", text) / 3
    assert "of the 1056 numbers of a moment each device holds 132" in text


def test_mics():
    text = output("mics.py")
    flat, groups = re.findall(r"each device sends (\S+) B per step", text)
    assert int(flat.replace(",", "")) > 2 * int(groups.replace(",", ""))
    assert figure(r"curves differ by (\S+)", text) < 1e-5
    assert figure(r"MiCS: loss \S+ to (\S+),", text) < 0.1


def test_tensor_parallel():
    text = output("tensor_parallel.py")
    rows = re.findall(r"^[23] +(?:clip, adamw|muon) +(\S+) +(\S+) +(\S+)$", text, re.M)
    assert len(rows) == 2
    assert all(mine == one and float(far) < 1e-5 for mine, one, far in rows)
    assert "parameter P('model', None), its moment P('model', 'data')" in text
    assert "not cut, since other axes shard every dimension: in/b" in text
    assert figure(r"(\d+) collectives over other mesh axes", text) > 0


@pytest.mark.slow
def test_any_optimizer():
    text = output("any_optimizer.py")
    assert figure(r"agree to (\S+) of", text) < 1e-5
    for name in ("AdamW", "LAMB", "Muon", "Adafactor", "Prodigy"):
        here, there = re.search(rf"{name}.* (\S+) B, (\S+) B", text).groups()
        assert int(here.replace(",", "")) < int(there.replace(",", "")) / 2, name


@pytest.mark.slow
def test_finetune_lora():
    text = output("finetune_lora.py")
    assert figure(r"with adapters: (\S+)% of turned", text) > 80 > 30 > figure(r"digits, (\S+)% of turned", text)
    assert "the base is bit for bit what it was" in text


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["1", "3"])
def test_nnx_vit(stage):
    text = output("nnx_vit.py", "--stage", stage)
    assert figure(r"not trained on: (\S+)%", text) > 90
    assert figure(r"and (\S+) numbers of state", text) < 26_474 * 2 / 8 * 1.1
