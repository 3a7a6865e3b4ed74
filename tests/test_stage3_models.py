"""Gradients of stage 3 equal the unsharded ones, for models and losses of every kind, on every kind of mesh."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stage3_models as models

CASES, MESHES, OPTIONS = list(models.CASES), list(models.MESHES), list(models.OPTIONS)

#: For every case one mesh and one way to plan, in turn; the rest of the grid is marked slow.
QUICK = {(case, MESHES[1 + i % 3], OPTIONS[i % 2]) for i, case in enumerate(CASES)}
QUICK |= {("gpt", "1", "default"), ("gpt, scan, remat", "8", "chunks"), ("cnn", "MiCS", "default")}
GRID = [
    pytest.param(*cell, marks=[] if cell in QUICK else pytest.mark.slow)
    for case in CASES
    for mesh in MESHES
    for options in OPTIONS
    for cell in [(case, mesh, options)]
]


@pytest.mark.parametrize(("case", "mesh", "options"), GRID)
def test_gradients_equal_the_unsharded_ones(case, mesh, options):
    models.compare(case, mesh, options)
