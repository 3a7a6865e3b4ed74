"""Train on several processes, each with its own devices: here two processes with four CPU devices each, on one machine.

    python examples/multi_process.py
    python examples/multi_process.py --processes 4 --devices 2 --checkpoint-dir runs/multi_process

On a cluster one process runs on every node, and JAX finds the others by itself. Call `jax.distributed.initialize()`
there in place of `join`; nothing else changes.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from typing import Any, Literal, NoReturn

os.environ.setdefault("NPROC", "32")  # several devices on fewer CPU cores need more threads than cores

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero

WIDTH = 61  # a prime: it does not divide by any number of devices


@dataclasses.dataclass(frozen=True)
class Options:
    """Train a small network on several processes."""

    processes: int = 2
    """How many processes."""
    devices: int = 4
    """CPU devices of each process."""
    stage: Literal[1, 2, 3] = 3
    """ZeRO stage."""
    steps: int = 20
    """Training steps."""
    checkpoint_dir: pathlib.Path | None = None
    """Folder for a checkpoint every 10 steps; training continues from the latest one there."""
    coordinator: str = ""
    """Address of process 0; default: a free port of this machine."""
    process: int | None = None
    """Number of this process; default: this program starts the processes."""
    timeout: int = 60
    """Seconds to wait for the other processes."""


def fail(message: str) -> NoReturn:
    """End the program with one line."""
    print(f"multi_process: {message}", file=sys.stderr)
    sys.exit(2)


def check(options: Options) -> None:
    """Refuse options that cannot work, in one line, before a process starts."""
    for name in ("processes", "devices", "steps", "timeout"):
        if getattr(options, name) < 1:
            fail(f"--{name} {getattr(options, name)}: expected 1 or more")
    if options.process is not None and not 0 <= options.process < options.processes:
        fail(f"--process {options.process}: expected 0 to {options.processes - 1}")
    if options.process is not None and not options.coordinator:
        fail(f"--process {options.process}: the processes meet where? Give --coordinator too")
    if options.checkpoint_dir is not None:
        try:
            options.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail(f"--checkpoint-dir {options.checkpoint_dir}: {error.strerror}")


def start(options: Any) -> int:
    """Start all processes of this program and wait for them; if one fails, end the others.

    The first Ctrl-C is forwarded to each process; the second one ends them.
    """
    coordinator = options.coordinator or f"localhost:{free_port()}"
    same = [sys.executable, *sys.argv, "--coordinator", coordinator]
    # in separate process groups, so that the terminal does not send Ctrl-C to them too
    running = [subprocess.Popen([*same, "--process", str(i)], process_group=0) for i in range(options.processes)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while any(p.poll() is None for p in running) and not any(p.returncode for p in running):
            wait(running)
    except KeyboardInterrupt:
        for p in running:
            p.send_signal(signal.SIGINT)
        with contextlib.suppress(KeyboardInterrupt):
            while any(p.poll() is None for p in running):
                wait(running)
        return 130
    finally:
        for p in running:
            if p.poll() is None:
                p.kill()
    return max((abs(p.wait()) for p in running if p.returncode != -9), default=1)


def wait(running: list[subprocess.Popen[bytes]]) -> None:
    """Wait a tenth of a second for each process."""
    for p in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            p.wait(0.1)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


def join(options: Any) -> None:
    """Connect this process to the others. On SLURM and TPU pods `jax.distributed.initialize()` needs no arguments."""
    jax.config.update("jax_num_cpu_devices", options.devices)
    watch = threading.Timer(options.timeout, give_up, [options])  # JAX would abort with a stack trace
    watch.start()
    jax.distributed.initialize(
        options.coordinator, options.processes, options.process, initialization_timeout=options.timeout + 30
    )
    watch.cancel()


def give_up(options: Any) -> None:
    print(
        f"multi_process: process {options.process} waited {options.timeout} s for {options.processes} processes to "
        f"meet at {options.coordinator}. Is each running, and does it reach that address?",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def init_fn(key: jax.Array) -> Any:
    first, second = jax.random.split(key)
    return {
        "in": jax.random.normal(first, (WIDTH, 256)) / 8,
        "bias": jnp.zeros(256),
        "out": jax.random.normal(second, (256, 1)) / 16,
    }


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(x @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


def examples_of(process: int, step: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The examples of one process in one step: each process reads its own part of the data."""
    rng = np.random.default_rng([process, step])
    x = rng.normal(size=(count, WIDTH)).astype(np.float32)
    return x, np.sin(x[:, :1]) + x[:, 1:2]


def train(options: Options) -> None:
    """Train. Every process runs this program."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    zero = jaxzero.Zero(mesh, stage=options.stage)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
    tx = zero.optimizer(inner)
    grad_fn = zero.value_and_grad(loss_fn)

    @jax.jit
    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array, jax.Array]:
        loss, grads = grad_fn(params, x, y)
        norm = optax.tree.norm(grads)  # padding is zero, so this is the norm of the gradient
        params, state = zero.apply(tx, grads, state, params)
        return params, state, loss, norm

    first = 0
    if options.checkpoint_dir is not None and jaxzero.latest(options.checkpoint_dir) is not None:
        abstract = jax.eval_shape(init_fn, jax.random.key(0))
        params, state, first, _ = jaxzero.restore(options.checkpoint_dir, zero, abstract, inner)
    else:
        params = zero.init(init_fn, jax.random.key(0))
        state = jax.jit(tx.init)(params)

    if jax.process_index() == 0 and first < options.steps:
        print(f"compiling step {first + 1}", flush=True)
    by_example = NamedSharding(mesh, P("data"))
    for i in range(first, options.steps):
        mine = examples_of(jax.process_index(), i, 8 * jax.local_device_count())
        batch = [jax.make_array_from_process_local_data(by_example, x) for x in mine]
        params, state, loss, norm = step(params, state, *batch)
        if jax.process_index() == 0:  # loss and norm are whole on every device, so any process can read them
            print(f"step {i + 1:3d}  loss {float(loss):.6f}  gradient norm {float(norm):.4f}", flush=True)
        if options.checkpoint_dir is not None and (i + 1) % 10 == 0:
            jaxzero.save(options.checkpoint_dir, i + 1, zero, params, state).wait()

    whole = zero.gather(params)  # plain arrays, whole on every device
    norm = optax.tree.norm(jax.tree.map(lambda x: x.addressable_data(0), whole))
    print(
        f"process {jax.process_index()} of {jax.process_count()}: {jax.local_device_count()} of {jax.device_count()} "
        f"devices, parameters of norm {float(norm):.6f}",
        flush=True,
    )


def main(options: Options) -> None:
    """Start the processes, or run as one of them."""
    check(options)
    if options.process is None:
        sys.exit(start(options))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C prints no traceback of each process
    join(options)
    train(options)


if __name__ == "__main__":
    main(tyro.cli(Options))
