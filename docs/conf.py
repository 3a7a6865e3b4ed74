"""The web site: `make docs`. The root of the sources is the repository, so that links are right there and here."""

import importlib.metadata
import inspect
import pathlib

ROOT = pathlib.Path(__file__).parent.parent

project = "jaxzero"
release = version = importlib.metadata.version(project)
author = "The jaxzero authors"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/*.md",
    "examples/README.md",
    "benchmarks/RESULTS.md",
    "notebooks/*.ipynb",
]
exclude_patterns = [".*", "jaxzero", "tests", "benchmarks/measured", "runs", "dist", "build"]

nb_execution_mode = "off"  # outputs are committed; the tests execute the notebooks
nb_merge_streams = True
myst_heading_anchors = 3
myst_enable_extensions = ["substitution"]
myst_substitutions = {"version": version}

default_role = "code"  # docstrings mark code with single backticks
autodoc_typehints = "none"  # the docstrings say shapes, which types do not
autodoc_member_order = "bysource"
add_module_names = False
python_display_short_literal_types = True

html_theme = "furo"
html_title = f"jaxzero {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path = ["_templates"]
html_additional_pages = {"index": "to_index.html"}  # the sources begin at the repository, so the pages are in docs/


def _signature_of_zero(app, what, name, obj, options, signature, return_annotation):
    """The options of `Zero` in place of the `*args, **options` of its `__new__`."""
    if name != "jaxzero.Zero":
        return None
    parameters = list(inspect.signature(obj.__init__).parameters.values())[1:]
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(plain)), return_annotation


def setup(app):
    """Connects the hook to Sphinx."""
    app.connect("autodoc-process-signature", _signature_of_zero)
