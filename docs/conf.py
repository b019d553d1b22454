"""Configuration of the documentation: ``sphinx-build -W -n -b html docs docs/_build/html``.

The pages are plain Markdown, so that they read well where they are shown as they are, as on a code
host. `as_built` makes of them what Sphinx shows more: signatures and docstrings, for which comments
``<!-- eval-rst`` have the directives, links to objects, and the tables of contents.
"""

import re
from importlib.metadata import version as installed_version
from pathlib import Path

project = "kvoffload"
author = "The kvoffload developers"
copyright = "2026, the kvoffload developers"
release = installed_version("kvoffload")
version = release

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx_click",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
nitpicky = True

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
numpydoc_show_class_members = False
# Names of other projects: their inventories are not fetched, so that the build needs no network.
nitpick_ignore_regex = [
    ("py:.*", r"(collections|concurrent|ctypes|os|np|npt|numpy|pathlib|typing)(\..*)?"),
    ("py:.*", r"Any|Callable|Collection|Iterable|Iterator|KeysView|Literal|Mapping|Sequence"),
    ("py:.*", r"kvoffload\.managers\._watching\.Watching"),  # the protocol that Watch follows
    ("py:.*", r"kvoffload\.types\.Spec_co"),  # the type of a manager's specs, a type variable
    ("py:.*", r"ABC|abc\.ABC|NDArray|Path|Structure|ImportError"),
    ("py:class", r"kvoffload\.tiers\.engine\.contract\.Pool"),  # not of users
    ("py:class", r"kvoffload\.traces\.chaining\.ChainingCounter"),  # likewise
    ("py:class", r"kvoffload\.replay\.groups\.(_Rule|ChunkIndex|Runs)"),  # likewise
    ("py:class", r"kvoffload\.tiers\.engine\.native\.Twin"),  # likewise
]

html_theme = "furo"
html_title = "kvoffload"
html_static_path = ["_static"]
html_css_files = ["house.css"]
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"
copybutton_only_copy_prompt_lines = True


CHANGES = str(Path(__file__).parents[1] / "CHANGES.md")
SECTIONS = ["tutorial", "how-to", "reference", "explanation", "development"]
HIDDEN = re.compile(r"^<!-- eval-rst\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
OBJECT = re.compile(r"\[`([^`\]]+)`\]\([^)\s]+ \"(kvoffload[\w.]*)\"\)")
PAGE = re.compile(r"\]\(([\w-]+)\.md\)")


def as_built(app, docname, source):
    """Show what comments hide, lead links to objects, and append a page's table of contents.

    A link to an object has its full name as the title: ``[`X`](page.md "kvoffload.X")``.
    """
    if docname == "changes":
        app.env.note_dependency(CHANGES)
        source[0] = Path(CHANGES).read_text(encoding="utf-8")
        return
    text = HIDDEN.sub(r"```{eval-rst}\n\1```", source[0])
    text = OBJECT.sub(r"{py:obj}`\1 <\2>`", text)
    folder, _, name = docname.rpartition("/")
    if docname == "index":
        pages = [f"{section}/index" for section in SECTIONS] + ["changes"]
    else:
        pages = dict.fromkeys(PAGE.findall(text)) if name == "index" and folder in SECTIONS else ()
    if pages:
        text += "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"
    source[0] = text


def resolve_public_name(app, env, node, contnode):
    """Find what annotations name by its defining module under its public name."""
    target = node.get("reftarget", "")
    if not target.startswith("kvoffload."):
        return None
    name = f"kvoffload.{target.rpartition('.')[2]}"
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, contnode)


def setup(app):
    """Register what this file adds to Sphinx."""
    app.connect("source-read", as_built)
    app.connect("missing-reference", resolve_public_name)
