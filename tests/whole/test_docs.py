"""The documentation builds without warnings, and what it names exists."""

import ast
import dataclasses
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import jaxzero

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PUBLIC = [name for name, x in vars(jaxzero).items() if not name.startswith("_") and not inspect.ismodule(x)]
METHODS = ("value_and_grad", "forward", "optimizer")
OPTIONS = {f.name for f in dataclasses.fields(jaxzero.Zero)}
OPTIONS |= {name for method in METHODS for name in inspect.signature(getattr(jaxzero.Zero, method)).parameters}


def unknown(names, owner):
    return {name for name in names if not hasattr(owner, name)}


def test_site_builds_without_warnings(tmp_path):
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", ".", str(tmp_path)]
    result = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    api = (tmp_path / "docs/api.html").read_text()
    methods = [f"Zero.{name}" for name, x in inspect.getmembers(jaxzero.Zero) if callable(x) and name[0] != "_"]
    assert [name for name in (*PUBLIC, *methods) if f'id="jaxzero.{name}"' not in api] == []
    assert "Zero(mesh=None, *, stage=2, " in re.sub(r"<[^>]+>", "", api).replace("\n", " ")
    assert 'href="../_modules/jaxzero/' in api  # source links
    assert "url=docs/index.html" in (tmp_path / "index.html").read_text()
    index = (tmp_path / "docs/index.html").read_text()
    assert f"version {jaxzero.__version__}" in re.sub(r"<[^>]+>", "", index)
    assert "genindex.html" in index
    assert "visualize_array_sharding" in (tmp_path / "notebooks/01_stages.html").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_exist(page):
    """`jaxzero.name`, `zero.name(`, `Zero(name=`, `value_and_grad(name=`."""
    text = page.read_text()
    modules = {path.stem for path in (ROOT / "jaxzero").glob("*.py")}
    assert unknown(re.findall(r"`jaxzero\.(\w+)", text), jaxzero) - modules == set()
    assert unknown(re.findall(r"\bzero\.([a-z_]+)\(", text), jaxzero.Zero) == set()
    assert set(re.findall(r"(?:Zero\((?:mesh, )?|value_and_grad\()(\w+)=", text)) <= OPTIONS


def test_options_in_the_tables_of_other_systems_exist():
    """In a row's last column, code that looks like an option: `name`, `name=` or `name="value"`."""
    rows = re.findall(r"^\| .* \| (.*) \|$", (ROOT / "docs/coming_from.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z]+_[a-z_]+)(?:=[^`]*)?`", row)}
    assert named >= {"bucket_bytes", "reduce_dtype", "replica_axis", "persist_bytes"}
    assert named - OPTIONS <= {"shard_param_frac", "mu_dtype", "psum_scatter"}  # theirs


def test_pictures_are_drawn(tmp_path, monkeypatch):
    """The script makes those that the page shows, and they are committed."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    import draw

    shown = re.findall(r"pictures/(\w+)\.svg", (ROOT / "docs/how_it_works.md").read_text())
    assert shown == list(draw.PICTURES)
    draw.main(tmp_path)
    for name in shown:
        text = (ROOT / f"docs/pictures/{name}.svg").read_text()
        assert (tmp_path / f"{name}.svg").read_text().count("<path") == text.count("<path") > 0


def messages():
    """All text of the package's strings; what a message fills in is left out."""
    text = []
    for path in sorted((ROOT / "jaxzero").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                text.append("".join(x.value if isinstance(x, ast.Constant) else "..." for x in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text.append(node.value)
    return "\n".join(text)


def test_explained_errors_are_raised():
    """Of each message that the page quotes, the longest run of fixed words stands in the code."""
    page = re.sub(r"```.*?```|`[^`]*`", "", (ROOT / "docs/errors.md").read_text(), flags=re.DOTALL)
    quoted = re.findall(r"(?<![*`\w])\*([^*]{8,}?)\*(?!\*)", page.replace("\n", " "))
    assert len(quoted) > 30
    code = messages()
    fixed = [
        max(re.split(r"\.\.\.|'[^']*'|\[[^\]]*\]|\([^)]*\)|\w+=\S+|\w*\d+\w*|[:;]|\.(?= |$)", q), key=len).strip()
        for q in quoted
    ]
    assert [words for words in fixed if words not in code] == []


def test_map_of_the_code_names_files_that_exist():
    named = set(re.findall(r"`(\w+\.py)`", (ROOT / "CONTRIBUTING.md").read_text()))
    there = {path.name for path in (ROOT / "jaxzero").rglob("*.py")}
    assert len(named) > 30
    assert named - there == set()


def test_vocabulary_names_files_that_exist_and_each_term_once():
    text = (ROOT / "docs/vocabulary.md").read_text()
    named = set(re.findall(r"`(\w+/\w+\.py)`", text))
    assert len(named) > 25
    assert [name for name in named if not (ROOT / "jaxzero/_src" / name).exists()] == []
    terms = [term for row in re.findall(r"^\| (.*?) \|", text, re.MULTILINE) for term in row.split(", ")]
    terms = [term for term in terms if term != "term"]
    assert len(terms) > 50
    assert sorted(set(terms)) == sorted(terms)
