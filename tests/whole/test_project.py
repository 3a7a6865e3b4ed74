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


def _for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports, those inside functions too; not those for types only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not _for_types_only(node):
            yield from _imports(node)


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


PACKAGE = ROOT / "jaxzero"


def test_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert jaxzero.__version__ == project["version"] == importlib.metadata.version("jaxzero")
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()


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
        (cycle, {"a.py": "if TYPE_CHECKING:\n    from .b import x", "b.py": "from .a import x"}, None),
    ],
)
def test_checks_can_fail(tmp_path, check, files, expected):
    for name, text in files.items():
        path = tmp_path / "bad" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    result = check(tmp_path / "bad")
    assert bool(result) is expected if expected is True else result == expected
