"""Train a small GPT on real text, its training state sharded over all devices.

    python examples/train_gpt.py
    python examples/train_gpt.py --optimizer muon --stage 1 --mesh 2x4 --data book.txt

By default the text is the source of Python's standard library, as bytes. Without accelerators the program makes eight
virtual CPU devices. All calls of jaxzero are in `main`, between the two lines of dashes.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import json
import math
import os
import pathlib
import shlex
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NoReturn

if __name__ == "__main__":  # until training starts, Ctrl-C ends the program without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
os.environ.setdefault("NPROC", "32")  # eight devices on fewer CPU cores need more threads than cores

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib as mpl
import multi_process
import numpy as np
import optax
import rich.console
import rich.progress
import rich.table
import tyro
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero.cli.optimizers import known, needs

HEAD_WIDTH = 32
DROPOUT = 0.1
MOST_TEXT = 4_000_000  # bytes of the standard library: enough for any run of this size


@dataclasses.dataclass(frozen=True)
class Options:
    """Train a small GPT with the state of any Optax optimizer sharded over a mesh of devices."""

    stage: Literal[1, 2, 3] = 2
    """ZeRO stage: 1 shards the optimizer state, 2 the gradients too, 3 the parameters too."""
    mesh: str = ""
    """Devices: "8", or "2x4" for 2 groups of 4. Default: all devices."""
    replica: bool = True
    """With two groups: repeat the state in each (MiCS); otherwise split it over both and gather it in two hops."""
    accumulate: int = 1
    """Micro-batches per step, whose gradients are added."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of parameters and computation; with bf16 the optimizer keeps a float32 copy of the parameters."""
    offload: bool = False
    """Store optimizer state, and at stage 3 parameters, in the host's memory."""
    optimizer: str = "adamw"
    """Any alias of optax or optax.contrib."""
    learning_rate: float | None = None
    """Default: the optimizer's own, or else 0.003."""
    clip: float = 1.0
    """Largest global norm of the gradient; 0 for no clipping."""
    steps: int = 400
    """Training steps."""
    batch: int = 16
    """Examples per step, over all devices."""
    length: int = 64
    """Bytes per example."""
    width: int = 128
    """Width of the model, a multiple of 32."""
    layers: int = 2
    """Transformer blocks."""
    seed: int = 0
    """Seed of parameters, batches, dropout and sample."""
    checkpoint_dir: pathlib.Path | None = None
    """Folder for ten checkpoints of the run."""
    resume: bool = False
    """Continue from the latest checkpoint there, on any mesh, stage and number of processes."""
    processes: int = 1
    """CPU processes, which share the eight devices."""
    process: int | None = None
    """Number of this process. Default: this program starts the processes."""
    coordinator: str = ""
    """Address of process 0. Default: a free port of this machine."""
    data: pathlib.Path | None = None
    """A file to learn. Default: the standard library's source text."""
    out: pathlib.Path = pathlib.Path("runs/train_gpt")
    """Folder for loss.png, metrics.json and sample.txt."""

    @property
    def devices(self) -> int:
        """Virtual devices of each process."""
        return 8 // self.processes

    @property
    def timeout(self) -> int:
        """Seconds that processes wait for each other."""
        return 60


def fail(message: str, status: int = 2) -> NoReturn:
    """End the program with one line."""
    print(f"train_gpt: {message}", file=sys.stderr)
    sys.exit(status)


# ---- the text


def read_text(path: pathlib.Path | None) -> bytes:
    if path is not None:
        try:
            return path.read_bytes()
        except OSError as error:
            fail(f"--data {path}: {error.strerror}")
    text = b""
    for file in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += file.read_bytes()
        if len(text) > MOST_TEXT:
            break
    return text or fail("no source text of the standard library here: give a file with --data")


def unigram_entropy(tokens: np.ndarray) -> float:
    """The loss, in nats, of the best guess that ignores all context."""
    counts = np.bincount(tokens)
    share = counts[counts > 0] / tokens.size
    return float(-np.sum(share * np.log(share)))


def crops(tokens: np.ndarray, seed: tuple[int, ...], batch: int, length: int) -> np.ndarray:
    """Random pieces of `length + 1` tokens, the same for the same seed."""
    starts = np.random.default_rng(seed).integers(0, tokens.size - length, batch)
    return tokens[starts[:, None] + np.arange(length + 1)]


# ---- the model: written for one device


class Block(nn.Module):
    """Attention and a two-layer network, each added to the stream."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Mix the positions, then the features."""
        mask = nn.make_causal_mask(x[..., 0])
        dropout = functools.partial(nn.Dropout, DROPOUT, deterministic=not train)
        attention = nn.MultiHeadDotProductAttention(self.width // HEAD_WIDTH)
        x = x + dropout()(attention(nn.LayerNorm()(x), mask=mask))
        hidden = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + dropout()(nn.Dense(self.width)(hidden))


class GPT(nn.Module):
    """From bytes to scores of the next byte; the embedding is also the output matrix."""

    vocabulary: int
    width: int
    layers: int
    length: int

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        """Scores `[batch, length, vocabulary]` of the byte that follows each position."""
        embed = nn.Embed(self.vocabulary, self.width, embedding_init=nn.initializers.normal(0.02))
        position = self.param("position", nn.initializers.normal(0.02), (self.length, self.width))
        x = embed(tokens) + position
        for _ in range(self.layers):
            x = Block(self.width)(x, train)
        return embed.attend(nn.LayerNorm()(x))


def predict(model: GPT, params: Any, tokens: jax.Array, **options: Any) -> jax.Array:
    scores: Any = model.apply(params, tokens, **options)
    return scores


def mean_loss(scores: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(scores.astype(jnp.float32), targets).mean()


def sample(model: GPT, params: Any, start: jax.Array, key: jax.Array, count: int) -> jax.Array:
    """Continue `start`, a full window of tokens, by `count` tokens."""

    def next_token(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = predict(model, params, window[None])[0, -1]
        token = jax.random.categorical(key, scores / 0.8).astype(window.dtype)
        return jnp.append(window[1:], token), token

    return jax.lax.scan(next_token, start, jax.random.split(key, count))[1]


# ---- the optimizer, by name


def make_optimizer(options: Options) -> optax.GradientTransformation:
    """The optimizer of the options, after clipping."""
    name = options.optimizer
    if problem := needs(name):
        fail(f"--optimizer {name}: {problem}")
    if name not in known():
        near = difflib.get_close_matches(name, known(), 1, 0) + ["adamw"]
        fail(f'--optimizer {name}: optax has no such optimizer; did you mean "{near[0]}"?')
    factory = known()[name]
    rate = options.learning_rate
    if rate is None:
        default = inspect.signature(factory).parameters["learning_rate"].default
        rate = default if isinstance(default, float) else 3e-3
    inner = factory(learning_rate=rate)
    try:  # some also need the value of the loss, or the loss function
        tiny = {"w": jnp.ones((2, 2))}
        jax.eval_shape(lambda p: inner.update(p, inner.init(p), p), tiny)
    except (TypeError, ValueError) as error:
        fail(f"--optimizer {name}: it needs more than the gradients ({str(error).splitlines()[0]})")
    inner = optax.chain(optax.clip_by_global_norm(options.clip), inner) if options.clip else inner
    return inner if options.dtype == "fp32" else jaxzero.master_weights(inner)


# ---- devices


def make_mesh(text: str) -> Mesh:
    """A mesh with one axis of devices, or with groups of devices."""
    devices = jax.devices()
    parts = (text or str(len(devices))).lower().split("x")
    if len(parts) > 2 or not all(p.isdecimal() and int(p) > 0 for p in parts):
        fail(f'--mesh {text}: expected a number of devices such as "8", or groups x devices such as "2x4"')
    sizes = [int(p) for p in parts]
    if math.prod(sizes) > len(devices):
        fail(f"--mesh {text}: needs {math.prod(sizes)} devices, {len(devices)} are here ({devices[0].platform})")
    names = ("group", "data")[-len(sizes) :]
    return Mesh(np.array(devices[: math.prod(sizes)]).reshape(sizes), names)


def nbytes(tree: Any, shape_here: Callable[[Any], tuple[int, ...]]) -> int:
    return sum(math.prod(shape_here(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def memory(
    zero: jaxzero.Zero,
    mesh: Mesh,
    inner: optax.GradientTransformation,
    abstract: Any,
    params: Any,
    grads: Any,
    state: Any,
) -> dict[str, Any]:
    """Bytes on each device, and the bytes there in a run without sharding."""
    if zero.stage == 1:  # whole on every device
        grads_here = nbytes(grads, lambda x: x.shape)
    else:
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), zero.specs(grads))
        split = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), grads, shardings)
        grads_here = nbytes(split, lambda x: x.sharding.shard_shape(x.shape))
    whole = nbytes(abstract, lambda x: x.shape)
    whole_state = nbytes(jax.eval_shape(inner.init, abstract), lambda x: x.shape)
    here = functools.partial(nbytes, shape_here=lambda x: x.sharding.shard_shape(x.shape))
    place = lambda what: "host" if what in zero.offload else "device"
    return {
        "parameters": {"per_device": here(params), "unsharded": whole, "where": place("params")},
        "gradients": {"per_device": grads_here, "unsharded": whole, "where": "device"},
        "optimizer state": {"per_device": here(state), "unsharded": whole_state, "where": place("state")},
    }


def memory_table(rows: dict[str, Any], title: str) -> rich.table.Table:
    table = rich.table.Table("MB per device", "here", "unsharded", "part", "in", title=title, title_justify="left")
    for column in table.columns[1:4]:
        column.justify = "right"
    total = {key: sum(row[key] for row in rows.values()) for key in ("per_device", "unsharded")}
    for name, row in {**rows, "together": total}.items():
        part = row["per_device"] / max(row["unsharded"], 1)
        figures = f"{row['per_device'] / 1e6:.3f}", f"{row['unsharded'] / 1e6:.3f}", f"{part:.1%}"
        table.add_row(name, *figures, row.get("where", ""))
    return table


# ---- progress


class Meter:
    """The progress bar: the current activity, the elapsed time, and the figures after the first step."""

    def __init__(self, options: Options, console: rich.console.Console, begin: int) -> None:
        self.tokens = options.batch * options.length
        self.begin = self.done = begin
        self.speed = 0.0
        columns = (
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.fields[figures]}"),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TimeRemainingColumn(),
        )
        finished = begin >= options.steps
        self.bar = rich.progress.Progress(*columns, console=console, disable=finished)
        what = f"compiling, then step {begin + 1}"
        self.task = self.bar.add_task(what, total=options.steps, completed=begin, figures="")
        if finished:
            console.print(f"nothing to train: {begin} of {options.steps} steps are done")

    def __enter__(self) -> "Meter":
        self.bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()

    def show(self, loss: float, line: bool) -> None:
        """Count one more step; with `line` also print a line that stays."""
        self.done += 1
        if self.done == self.begin + 1:
            self.clock = time.perf_counter()  # the first step compiles
        else:
            self.speed = (self.done - self.begin - 1) * self.tokens / (time.perf_counter() - self.clock)
        speed = f"{self.speed:10,.0f} tokens/s" if self.speed else ""
        figures = f"loss {loss:.3f}  {speed.strip()}"
        self.bar.update(self.task, advance=1, description="training", figures=figures)
        if line:
            self.bar.console.print(f"step {self.done:5d}  loss {loss:.3f}  {speed}".rstrip())


# ---- files of the run


def draw(losses: list[float], entropy: float, held_out: float, path: pathlib.Path) -> None:
    """The loss curve, with the unigram entropy and the held-out loss for comparison."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, label="training")
    axes.axhline(entropy, color="gray", linestyle="--", label=f"unigram entropy {entropy:.2f}")
    axes.plot([len(losses)], [held_out], "o", color="black", label=f"held out {held_out:.2f}")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend()
    figure.savefig(path, dpi=120)


def check(options: Options, mesh: Mesh, text: np.ndarray) -> None:
    """Refuse options that cannot work, in one line."""
    for name in ("steps", "batch", "length", "width", "layers", "accumulate", "processes"):
        if getattr(options, name) < 1:
            fail(f"--{name} {getattr(options, name)}: expected 1 or more")
    if options.batch % (mesh.size * options.accumulate):
        fail(f"--batch {options.batch}: does not divide over {mesh.size} devices x {options.accumulate} microbatches")
    if options.resume and options.checkpoint_dir is None:
        fail("--resume: from where? Give --checkpoint-dir too")
    if options.width % HEAD_WIDTH:
        fail(f"--width {options.width}: expected a multiple of {HEAD_WIDTH}")
    if not options.clip >= 0:
        fail(f"--clip {options.clip}: expected 0 or more")
    if options.learning_rate is not None and not 0 < options.learning_rate < math.inf:
        fail(f"--learning-rate {options.learning_rate}: expected more than 0")
    if not 0 <= options.seed < 2**32:
        fail(f"--seed {options.seed}: expected 0 or more, below 2**32")
    if text.size < 20 * (options.length + 1):
        fail(
            f"--data: {text.size} bytes are too few for --length {options.length}; {20 * (options.length + 1)} will do"
        )
    check_writable("--out", options.out)
    if options.checkpoint_dir is not None and not options.resume:
        check_writable("--checkpoint-dir", options.checkpoint_dir)


def check_writable(option: str, folder: pathlib.Path) -> None:
    """Make a folder; refuse it if no file can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        fail(f"{option} {folder}: {error.strerror}")


# ---- a run that stops and continues

#: Options that determine the shapes, the optimizer and the meaning of the parameters.
MODEL = ("optimizer", "dtype", "width", "layers", "length")


def check_same_model(options: Options, vocabulary: np.ndarray, resume: bool) -> None:
    """Write a description of the model next to the checkpoints, or refuse to continue with another model."""
    assert options.checkpoint_dir is not None
    path = options.checkpoint_dir / "model.json"
    model = {name: getattr(options, name) for name in MODEL}
    if not resume:
        if jax.process_index() == 0:
            path.write_text(json.dumps(model | {"vocabulary": vocabulary.tolist()}) + "\n")
        return
    if not path.exists():  # `restore` compares the leaves
        return
    before = json.loads(path.read_text())
    for name, value in model.items():
        if value != before[name]:
            fail(f"--resume: the run in {options.checkpoint_dir} has --{name} {before[name]}, not {value}")
    if before["vocabulary"] != vocabulary.tolist():
        fail(f"--resume: the run in {options.checkpoint_dir} has another text, with other kinds of byte: --data")


def begin_at(options: Options, vocabulary: np.ndarray) -> int | None:
    """The step to continue from; `None` for a new run."""
    if options.checkpoint_dir is None:
        return None
    try:
        saved = jaxzero.latest(options.checkpoint_dir)
    except ValueError as error:
        fail(f"--checkpoint-dir {options.checkpoint_dir}: {error}")
    if options.resume and saved is None:
        fail(f"--resume: there is no checkpoint in {options.checkpoint_dir}")
    if not options.resume and saved is not None:
        fail(f"--checkpoint-dir {options.checkpoint_dir}: it has step {saved}; go on from there with --resume")
    check_same_model(options, vocabulary, options.resume)
    if options.resume:
        check_writable("--checkpoint-dir", options.checkpoint_dir)
    return saved


class Stop:
    """Records Ctrl-C, which ends the program after the current step; a second Ctrl-C ends it at once."""

    asked = False

    def __call__(self, *_: Any) -> None:
        """Handle the signal."""
        if self.asked:
            rich.console.Console().show_cursor()
            os._exit(130)
        self.asked = True
        print("\nstopping after this step; Ctrl-C again stops at once", file=sys.stderr, flush=True)

    def agreed(self) -> bool:
        """Whether any process received Ctrl-C: all processes stop after the same step."""
        if jax.process_count() == 1:
            return self.asked
        return bool(multihost_utils.process_allgather(np.array(self.asked)).any())


@contextlib.contextmanager
def stoppable() -> Iterator[Stop]:
    """A context in which Ctrl-C is only recorded; the loop reads the record between two steps."""
    stop = Stop()
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def same_command() -> str:
    """The command that continues this run."""
    words = list(sys.argv)
    for name in ("--process", "--coordinator"):  # options that `multi_process.start` added
        if name in words:
            del words[words.index(name) : words.index(name) + 2]
    return shlex.join(["python", *words, *(["--resume"] if "--resume" not in words else [])])


def say_stopped(options: Options, step: int) -> NoReturn:
    """End the program with status 130, which shells use for Ctrl-C."""
    if jax.process_index() == 0:
        saved = options.checkpoint_dir is not None
        print(
            f"stopped after step {step} and saved it. To go on:\n  {same_command()}"
            if saved
            else f"stopped after step {step}. Nothing is saved without --checkpoint-dir.",
            flush=True,
        )
    sys.exit(130)


def main(options: Options) -> None:
    """Train, and write a sample, a curve and the figures to the output folder."""
    started = time.perf_counter()
    if 8 % options.processes:
        fail(f"--processes {options.processes}: does not divide 8 devices")
    if options.processes > 1 and options.process is None:
        sys.exit(multi_process.start(options))
    if options.processes > 1:
        multi_process.join(options)
    jax.config.update("jax_num_cpu_devices", options.devices)
    first = jax.process_index() == 0
    console = rich.console.Console(highlight=False, quiet=not first)
    mesh = make_mesh(options.mesh)
    inner = make_optimizer(options)
    vocabulary, tokens = np.unique(np.frombuffer(read_text(options.data), np.uint8), return_inverse=True)
    tokens = tokens.astype(np.int32)
    check(options, mesh, tokens)
    training, held_out = np.split(tokens, [tokens.size * 9 // 10])
    entropy = unigram_entropy(tokens)

    model = GPT(vocabulary.size, options.width, options.layers, options.length)
    init_key, dropout_key, sample_key = jax.random.split(jax.random.key(options.seed), 3)
    by_example = NamedSharding(mesh, P(mesh.axis_names))

    def init(key: jax.Array) -> Any:
        params = model.init(key, jnp.zeros((1, options.length), jnp.int32))
        return params if options.dtype == "fp32" else jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    def batch_of(text: np.ndarray, number: int) -> jax.Array:
        whole = crops(text, (options.seed, text.size, number), options.batch, options.length)
        mine = np.split(whole, jax.process_count())[jax.process_index()]
        return jax.make_array_from_process_local_data(by_example, mine)

    def loss_fn(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        scores = predict(model, params, tokens[:, :-1], train=True, rngs={"dropout": key})
        return mean_loss(scores, tokens[:, 1:])

    # ------------------------------------------------------------------ jaxzero begins
    groups = len(mesh.axis_names) == 2
    axes = (
        dict(shard_axis="data", replica_axis="group")
        if groups and options.replica
        else dict(shard_axis=mesh.axis_names)
    )
    on_host = () if not options.offload else ("state",) if options.stage < 3 else ("state", "params")
    zero = jaxzero.Zero(mesh, stage=options.stage, offload=on_host, **axes)
    tx = zero.optimizer(inner)
    abstract = jax.eval_shape(init, init_key)
    losses: list[float] = []
    if options.checkpoint_dir is not None and begin_at(options, vocabulary) is not None:
        try:
            params, state, begin, losses = jaxzero.restore(options.checkpoint_dir, zero, abstract, inner)
        except ValueError as error:  # the checkpoint is of another model, or damaged
            fail(f"--resume: {' '.join(str(error).split())}")
        console.print(f"going on from step {begin}")
    else:
        params = zero.init(init, init_key)
        state = jax.jit(tx.init)(params)
    grad_fn = zero.value_and_grad(loss_fn, accumulate=options.accumulate)

    @functools.partial(jax.jit, donate_argnums=(0, 1), compiler_options=zero.compiler_options())
    def train_step(params: Any, state: Any, tokens: jax.Array, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = grad_fn(params, tokens, key)  # `key` is folded with the device's index
        params, state = zero.apply(tx, grads, state, params)
        return params, state, loss

    # ------------------------------------------------------------------ jaxzero ends

    _, grads = jax.eval_shape(grad_fn, params, batch_of(training, 0), dropout_key)
    figures = memory(zero, mesh, inner, abstract, params, grads, state)
    count = sum(x.size for x in jax.tree.leaves(abstract))
    shape = " x ".join(f"{n} ({axis})" for axis, n in mesh.shape.items())
    console.print(
        f"{tokens.size:,} bytes of text, {vocabulary.size} kinds of byte; {count:,} parameters; {options.optimizer}; "
        f"mesh {shape} of {mesh.devices.flat[0].platform}"
    )
    saving: Any = None
    stopping = False
    every = max(options.steps // 10, 1)
    meter = Meter(options, console, len(losses))
    with stoppable() as stop, meter:
        console.print(memory_table(figures, f"What lives where, stage {options.stage}"))
        for i in range(len(losses), options.steps):
            key = jax.random.fold_in(dropout_key, i)
            params, state, loss = train_step(params, state, batch_of(training, i), key)
            losses.append(float(loss))
            if not math.isfinite(losses[-1]):
                fail(f"the loss is {losses[-1]} at step {i + 1}; a smaller --learning-rate may help", 1)
            meter.show(losses[-1], (i + 1) % every == 0)
            stopping = stop.agreed()
            # in the background; one loss per batch, so their number is the position
            if options.checkpoint_dir and ((i + 1) % every == 0 or i + 1 == options.steps or stopping):
                saving = jaxzero.save(options.checkpoint_dir, i + 1, zero, params, state, inner, extra=losses)
            if stopping:
                break
        if saving:
            saving.wait()
    if stopping:
        say_stopped(options, len(losses))

    def score(params: Any, tokens: jax.Array) -> jax.Array:
        return mean_loss(predict(model, params, tokens[:, :-1]), tokens[:, 1:])

    evaluate = zero.forward(score)  # the mean over devices; the parameters do not change
    held_out_loss = float(np.mean([evaluate(params, batch_of(held_out, i)) for i in range(8)]))
    params = zero.gather(params)  # whole; at stages 1 and 2 they are whole already
    if not first:
        return

    one = jax.local_devices()[0]
    params = jax.tree.map(lambda x: x.addressable_data(0), params)
    start = jnp.asarray(held_out[: options.length])
    draw_tokens = jax.jit(functools.partial(sample, model, count=300))
    drawn = draw_tokens(*jax.device_put((params, start, sample_key), one))
    written = bytes(vocabulary[np.asarray(drawn)]).decode(errors="replace")
    console.rule("a sample")
    console.print(written, markup=False)
    console.rule()

    verdict = "below" if held_out_loss < entropy else "not below"
    console.print(
        f"held-out loss {held_out_loss:.3f} nats per byte, {verdict} the text's unigram entropy {entropy:.3f}"
    )
    metrics = {
        "options": {k: str(v) if isinstance(v, pathlib.Path) else v for k, v in dataclasses.asdict(options).items()},
        "processes": jax.process_count(),
        "platform": mesh.devices.flat[0].platform,
        "mesh": dict(mesh.shape),
        "parameters": count,
        "memory": figures,
        "unigram_entropy": entropy,
        "held_out_loss": held_out_loss,
        "tokens_per_second": meter.speed,
        "seconds": time.perf_counter() - started,
        "losses": losses,
    }
    draw(losses, entropy, held_out_loss, options.out / "loss.png")
    (options.out / "sample.txt").write_text(written)
    (options.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    console.print(f"loss.png, metrics.json and sample.txt are in {options.out}")


if __name__ == "__main__":
    main(tyro.cli(Options))
