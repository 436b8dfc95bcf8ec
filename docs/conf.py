"""The documentation site; `python3 dev.py docs` builds it, offline, and any warning is an error.

The pages are ordered by the list at the end of index.md, so that readers of the repository and of the
site see the same one. Pages of the API are written from `__all__` and the docstrings.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from pygments.lexers.special import TextLexer

import distribute_jax
from distribute_jax.cli import main

DOCS = Path(__file__).parent
API = DOCS / "api"

project, author, release = "distribute_jax", "its contributors", distribute_jax.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
extensions += ["sphinx_copybutton", "sphinx_llms_txt"]
root_doc = "index"
html_theme = "furo"
html_title = f"{project} {release}"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = (
    "off"  # a test runs them; `dev.py docs -D nb_execution_mode=force` shows outputs
)
nb_execution_raise_on_error, nb_execution_timeout = True, 600
autosummary_generate = False
llms_txt_summary = "TensorFlow's tf.distribute, natively on JAX, for Flax models."
llms_txt_uri_template = "_sources/{docname}{suffix}{sourcelink_suffix}"
autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def modules(name: str, package: ModuleType) -> dict[str, ModuleType]:
    """Returns the package, the public modules that it lists, and theirs, by their public names."""
    found = {name: package}
    for key in package.__all__:
        if inspect.ismodule(value := getattr(package, key)):
            found |= modules(f"{name}.{key}", value)
    return found


MODULES = modules(project, distribute_jax)
PUBLIC = [getattr(module, name) for module in MODULES.values() for name in module.__all__]


def documented(name: str, value: Any) -> str:
    """Returns the directive that shows a public object and its members."""
    if not inspect.isclass(value):
        return f".. auto{'function' if callable(value) else 'data'}:: {name}"
    # Of the bases, only private ones of the library: others have their pages, or are not ours.
    bases = [c for c in value.__mro__[1:] if c in PUBLIC or c.__module__.split(".")[0] != project]
    shown = f":inherited-members: {', '.join(base.__name__ for base in bases)}"
    return f".. autoclass:: {name}\n   :members:\n   :show-inheritance:\n   {shown}"


def write(name: str, text: str) -> None:
    """Writes a page, unless it is that already, so that only what changed is read again."""
    path, title = API / f"{name}.rst", name.removeprefix(f"{project}.")
    text = f":orphan:\n\n{title}\n{'=' * len(title)}\n\n{text}\n"
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")


def write_api() -> None:
    """Writes a page for each module and for each of its classes, and the changelog.

    The sidebar has the modules only: with all classes in it, the site takes three times as long.
    """
    API.mkdir(exist_ok=True)
    (API / "changelog.md").write_text((DOCS.parent / "CHANGELOG.md").read_text("utf-8"), "utf-8")
    for module, value in MODULES.items():
        names = [name for name in value.__all__ if f"{module}.{name}" not in MODULES]
        table = textwrap.indent("\n".join(names), "   ")
        parts = [f".. module:: {module}\n\n{inspect.getdoc(value)}"]
        parts += [f".. autosummary::\n   :nosignatures:\n\n{table}"]
        for name in names:
            shown = getattr(value, name)
            if inspect.isclass(shown) and not issubclass(shown, Exception):
                write(f"{module}.{name}", documented(f"{module}.{name}", shown))
            else:
                parts.append(documented(f"{module}.{name}", shown))
        write(module, "\n\n".join(parts))


def help_of(command: str) -> str:
    """Returns what a command of `distribute-jax` prints with `--help`."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([command, "--help"])
    return f"## distribute-jax {command}\n\n```text\n{printed.getvalue()}```\n"


def toctree(pages: list[str], caption: str = "") -> str:
    """Returns a toctree, which the sidebar shows."""
    return "\n".join(
        [":::{toctree}", ":hidden:", f":caption: {caption}" * bool(caption), "", *pages, ":::", ""]
    )


def complete(app: Any, docname: str, source: list[str]) -> None:
    """Adds to a page what is written from the code, or from the page itself."""
    # These are not on the site.
    source[0] = re.sub(
        r"\[([^]]*)\]\(\.\./((?:benchmarks/|[A-Z]+\.md)[^)]*)\)", r"\1 (`\2`)", source[0]
    )
    if docname == "index":
        listed = source[0].partition("## All pages")[2]
        for section in re.split(r"^- ", listed, flags=re.MULTILINE)[1:]:
            pages, caption = re.findall(r"\]\(([\w/.]+)\)", section), section.partition(":")[0]
            source[0] += "\n" + toctree(pages + ["api/changelog"] * (caption == "About"), caption)
    elif docname == "reference":
        source[0] += "\n" + toctree([f"api/{name}" for name in MODULES])
    elif docname == "command_line":
        source[0] += "\n" + "\n".join(map(help_of, ("launch", "plan", "doctor", "explain", "demo")))


def setup(app: Any) -> None:
    """Connects the above to Sphinx, whose search for pages comes later."""
    write_api()
    app.add_lexer("mermaid", TextLexer)
    app.connect("source-read", complete)
