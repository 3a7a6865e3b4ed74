"""Processes are killed at random moments; the next ones go on, on another world, from the last complete checkpoint."""

import json
import random
import signal
import time

import checkpoint_cases as cases
import helpers
import numpy as np
import pytest

import jaxzero

#: Layout, processes, devices of each.
WORLDS = [("8/3", 2, 4), ("6/2", 2, 3), ("2x4/3", 2, 4), ("4/1", 2, 2), ("2/3", 2, 1)]


def notes(directory):
    file = directory / "notes"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def training(said, moment):
    """Whether so many notes have been made since training began."""
    begun = [i for i, n in enumerate(said) if "training" in n]
    return bool(begun) and len(said) - begun[0] > moment


def kill_one(directory, world, rng):
    """Starts two processes, kills one of them at a random moment of training, then the other."""
    layout, processes, devices = world
    moment = rng.randrange(8)  # so many notes after it began, and a little later
    said = len(notes(directory))
    running = helpers.start_processes(
        "train_until_killed.py", str(directory), layout, "1000000", processes=processes, devices=devices
    )
    try:
        patience = time.monotonic() + 240
        while not training(notes(directory)[said:], moment):
            assert not any(p.poll() for p in running), running[0].communicate()[1][-3000:]
            assert time.monotonic() < patience
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.5))
        victim = rng.choice(running)
        victim.send_signal(signal.SIGKILL)
        time.sleep(0.2)
    finally:
        for p in running:
            p.kill()
        for p in running:
            p.communicate()


def check(directory, before, after):
    """What is found is whole: the digests agree, and three steps on either layout are the same run."""
    said = notes(directory)
    step = jaxzero.latest(directory / "run")
    complete = max((n["complete"] for n in said if "complete" in n), default=None)
    if step is None:
        assert complete is None
        return
    assert complete is None or step >= complete, "a complete checkpoint was lost"
    saved = {n["step"]: n["digest"] for n in said if "step" in n}
    for n in said:
        assert "restored" not in n or saved[n["restored"]] == n["digest"], "restored other bits than were saved"
    ends = []
    for layout in (before, after):
        zero = cases.make_zero(layout)
        abstract = cases.abstract(cases.make_params())
        params, state, found, _ = jaxzero.restore(directory / "run", zero, abstract, cases.INNER)
        assert found == step
        params, state, losses = cases.train(layout, params, state, step, 3)
        ends.append(cases.whole(zero, params, state) | {"losses": np.array(losses)})
    helpers.close(ends[1], ends[0], 5e-6)


def run(directory, moments, seed):
    rng = random.Random(seed)
    for i in range(moments):
        world, following = WORLDS[i % len(WORLDS)], WORLDS[(i + 1) % len(WORLDS)]
        kill_one(directory, world, rng)
        check(directory, world[0], following[0])
    layout, processes, devices = WORLDS[moments % len(WORLDS)]
    last = (jaxzero.latest(directory / "run") or 0) + 3
    helpers.run_processes(
        "train_until_killed.py", str(directory), layout, str(last), processes=processes, devices=devices
    )
    check(directory, layout, "8/3")
    assert jaxzero.latest(directory / "run") == last
    zero = cases.make_zero("8/3")
    _, _, want = cases.train("8/3", *cases.start("8/3"), 0, last)
    losses = {n["step"]: n["loss"] for n in notes(directory) if "step" in n}
    assert zero.stage == 3
    np.testing.assert_allclose([losses[i + 1] for i in range(last)], want, rtol=0.01)
    return last


@pytest.mark.slow
def test_killed_at_twenty_moments(tmp_path):
    last = run(tmp_path, 20, seed=0)
    print(f"20 kills, {last} steps")
