"""Facts about the tree as a whole. Each check is a function of a folder, shown to fail on a bad one."""

import ast
import graphlib
import importlib.metadata
import pathlib
import re
import tomllib
from collections.abc import Iterator

import pytest

import jaxzero

ROOT = pathlib.Path(__file__).parents[2]
LONGEST = 600
#: How many `Any` stand in annotations: what optimizers, losses and trees of parameters are, only their users know.
MOST_ANY = 410
#: Folders and files of the package, top to bottom: each imports only what stands below it.
LAYERS = (
    *(
        "__main__",
        "cli",
        "export",
        "nnx",
        "__init__",
        "flax_nnx",
        "optax_wrappers",
        "fit",
        "zero",
        "analysis",
        "checkpoint",
        "gradients",
        "optimizer",
        "fsdp",
    ),
    *(
        "partition",
        "comm",
        "jaxpr",
        "sharding",
        "_table",
        "_dtypes",
        "_positions",
        "_text",
        "_types",
        "_optional",
        "_version",
    ),
)


def sources(package: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Each module's path below the package's parent, and its text."""
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package.parent).as_posix(), path.read_text()


def private_jax(package):
    return [name for name, text in sources(package) if "jax._src" in text and not name.endswith("/compat.py")]


def long_files(package):
    return [name for name, text in sources(package) if text.count("\n") > LONGEST]


def unchecked_regions(package):
    """Where a `check_vma` is given that is not plainly True."""
    return [
        f"{name}:{node.value.lineno}"
        for name, text in sources(package)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.keyword) and node.arg == "check_vma" and ast.unparse(node.value) != "True"
    ]


def hidden_imports(package):
    """Files whose imports depend on who reads them, which hides a cycle."""
    return [name for name, text in sources(package) if "TYPE_CHECKING" in text]


def _annotations(node: ast.AST) -> list[ast.expr | None]:
    if isinstance(node, ast.AnnAssign):
        return [node.annotation]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    a = node.args
    arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
    return [x.annotation for x in arguments if x] + [node.returns]


def any_count(package):
    """How many `Any` stand in the annotations of arguments, results and attributes."""
    return sum(
        isinstance(name, ast.Name) and name.id == "Any"
        for _, text in sources(package)
        for node in ast.walk(ast.parse(text))
        for annotation in _annotations(node)
        if annotation is not None
        for name in ast.walk(annotation)
    )


def _imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports, those inside functions too."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def import_graph(package):
    """Module -> the modules of the package that it imports."""
    texts = {re.sub(r"(/__init__)?\.py$", "", name).replace("/", "."): (name, text) for name, text in sources(package)}
    graph: dict[str, set[str]] = {}
    for module, (name, text) in texts.items():
        here = module if name.endswith("__init__.py") else module.rpartition(".")[0]
        found: set[str] = set()
        for node in _imports(ast.parse(text)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
                continue
            base = ".".join(here.split(".")[: len(here.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in texts else base for a in node.names}
        graph[module] = (found & texts.keys()) - {module}
    return graph


def cycle(package):
    try:
        graphlib.TopologicalSorter(import_graph(package)).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def _layer(module: str) -> str:
    """Folder or file, below `_src` where there is one; the package itself is `__init__`."""
    parts = [part for part in module.split(".")[1:] if part != "_src"]
    return parts[0] if parts else "__init__"


def upward_imports(package):
    """Imports from one layer to another that do not go down `LAYERS`; layers that it does not name."""
    graph = import_graph(package)
    rank = {name: i for i, name in enumerate(LAYERS)}
    empty = {f"{package.name}._src"}
    unknown = sorted({_layer(m) for m in graph if m not in empty} - rank.keys())
    pairs = [(a, b) for a, targets in graph.items() for b in sorted(targets - empty)]
    return unknown or [f"{a} -> {b}" for a, b in pairs if rank[_layer(a)] > rank[_layer(b)]]


PACKAGE = ROOT / "jaxzero"


def test_version_is_the_same_everywhere():
    """`_version.py` is the place; the others are read by people or by tools that build nothing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"]
    assert jaxzero.__version__ == importlib.metadata.version("jaxzero")
    assert f"## {jaxzero.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {jaxzero.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_extras_are_installed_from_the_folder():
    """No page, message or comment names an extra of a package index where jaxzero is not."""
    files = [p for p in ROOT.iterdir() if p.suffix in (".md", ".cff")]
    folders = ("jaxzero", "tests", "examples", "notebooks", "docs", "benchmarks", ".ci", ".github")
    files += [p for d in folders for p in (ROOT / d).rglob("*") if p.suffix in (".py", ".md", ".ipynb", ".yml")]
    wrong = re.compile(r"pip install \W*jaxzero(?![\w.-]*\.whl)")
    assert len(files) > 200
    assert [p.name for p in files if wrong.search(p.read_text())] == []


def test_package_is_typed():
    assert (PACKAGE / "py.typed").exists()


def test_only_public_jax():
    assert private_jax(PACKAGE) == []


def test_no_long_files():
    assert long_files(PACKAGE) == []


def test_replica_check_is_off_in_one_region():
    """The region of a loss; and the nested ones, unchecked only inside of it."""
    found = [where.partition(":")[0] for where in unchecked_regions(PACKAGE)]
    assert found == ["jaxzero/_src/gradients/call.py", "jaxzero/_src/sharding/regions.py"]


def test_import_graph_has_no_cycle():
    assert len(import_graph(PACKAGE)) == len(list(sources(PACKAGE)))
    assert cycle(PACKAGE) is None


def test_imports_go_down_the_layers():
    assert upward_imports(PACKAGE) == []
    assert hidden_imports(PACKAGE) == []


def test_signatures_have_types():
    assert any_count(PACKAGE) <= MOST_ANY


def test_no_registry_host_and_no_machine_path():
    files = [p for p in ROOT.iterdir() if p.is_file() and p.name != ".git"] + [
        p
        for d in ("jaxzero", "tests", "examples", "notebooks", "docs", "benchmarks", ".ci")
        for p in (ROOT / d).rglob("*")
        if p.is_file() and p.suffix != ".pyc"
    ]
    words = ["py" + "pi.org", "pythonhosted" + ".org", "npm" + "js.org", "/work" + "/", "/ro" + "ot/", "/tmp" + "/"]
    found = [(p.name, w) for p in files for w in words if w.encode() in p.read_bytes()]
    assert found == []


@pytest.mark.parametrize(
    ("check", "files", "expected"),
    [
        (private_jax, {"a.py": "from jax._src import core", "compat.py": "import jax._src"}, ["bad/a.py"]),
        (long_files, {"a.py": "x = 1\n" * (LONGEST + 1), "b.py": "x = 1\n" * LONGEST}, ["bad/a.py"]),
        (
            unchecked_regions,
            {"a.py": "f(check_vma=False)\nf(check_vma=True)", "b.py": "\nf(check_vma=flag)"},
            ["bad/a.py:1", "bad/b.py:2"],
        ),
        (cycle, {"__init__.py": "from .a import x", "a.py": "from . import b", "b.py": "from .a import x"}, True),
        (cycle, {"__init__.py": "", "a.py": "def f():\n    import bad.b", "b.py": "from bad.a import x"}, True),
        (
            cycle,
            {"__init__.py": "", "a.py": "from .sub.c import x", "sub/__init__.py": "", "sub/c.py": "from ..a import x"},
            True,
        ),
        (cycle, {"__init__.py": "from .a import x", "a.py": "from . import b", "b.py": "import jax"}, None),
        (cycle, {"a.py": "if TYPE_CHECKING:\n    from .b import x", "b.py": "from .a import x"}, True),
        (hidden_imports, {"a.py": "from typing import TYPE_CHECKING", "b.py": "import jax"}, ["bad/a.py"]),
        (any_count, {"a.py": "def f(x: Any, *y: list[Any]) -> int:\n    z: Any = x", "b.py": "x = Any"}, 3),
        (
            upward_imports,
            {
                "__init__.py": "from ._src.zero import x",
                "_src/__init__.py": "",
                "_src/zero.py": "from .comm import a\nfrom . import comm",
                "_src/comm/a.py": "def f():\n    from ..zero import x",
                "_src/comm/b.py": "from . import a\nfrom ..sharding import c",
                "_src/sharding/c.py": "import bad",
            },
            ["bad._src.comm.a -> bad._src.zero", "bad._src.sharding.c -> bad"],
        ),
        (upward_imports, {"_src/new/a.py": "", "_src/zero.py": ""}, ["new"]),
    ],
)
def test_checks_can_fail(tmp_path, check, files, expected):
    for name, text in files.items():
        path = tmp_path / "bad" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    result = check(tmp_path / "bad")
    assert bool(result) is expected if expected is True else result == expected
