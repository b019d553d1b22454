"""Configuration of the documentation: ``sphinx-build -W -n -b html docs docs/_build/html``."""

from importlib.metadata import version as installed_version

import kvoffload
from kvoffload._metrics import TIER_METRICS, WATCH_METRICS
from kvoffload.policies import registry

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

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "substitution"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
numpydoc_show_class_members = False
# Names of other projects: their inventories are not fetched, so that the build needs no network.
nitpick_ignore_regex = [
    ("py:.*", r"(collections|ctypes|os|np|npt|numpy|pathlib|typing)(\..*)?"),
    ("py:.*", r"Any|Callable|Collection|Iterable|Iterator|KeysView|Literal|Mapping|Sequence"),
    ("py:.*", r"kvoffload\.managers\._watching\.Watching"),  # the protocol that Watch follows
    ("py:.*", r"kvoffload\.types\.Spec_co"),  # the type of a manager's specs, a type variable
    ("py:.*", r"ABC|abc\.ABC|NDArray|Path|Structure|ImportError"),
    ("py:class", r"kvoffload\.tiers\.engine\.contract\.Pool"),  # not of users
]


def policy_table():
    """Make the table of all policies from the registry."""
    lines = ["| name | what leaves | options | simplicity |", "|---|---|---|---|"]
    for entry in map(registry.entry, registry.names()):
        options = "; ".join(
            f"`{option.name}` = {option.default} ({option.minimum} … {option.maximum}): "
            f"{option.summary}"
            for option in entry.options
        )
        simplicity = f"{entry.simplicity}: {entry.explained_by.rstrip('.')}"
        lines.append(f"| `{entry.name}` | {entry.summary} | {options} | {simplicity} |")
    return "\n".join(lines)


def policy_classes():
    """Make the reference of the policies' classes from the registry: each with what it adds."""
    lines = ["```{eval-rst}", ".. currentmodule:: kvoffload"]
    for entry in map(registry.entry, registry.names()):
        policy_class = getattr(kvoffload, entry.class_name)
        contract = dir(kvoffload.CachePolicy)
        own = [name for name in dir(policy_class) if name[0] != "_" and name not in contract]
        members = ", ".join(name for name in own if name != "cache_capacity")
        lines += ["", f".. autoclass:: {entry.class_name}"]
        lines += [f"   :members: {members}", "   :inherited-members:"] if members else []
    return "\n".join([*lines, "```"])


def metrics_table(metrics):
    """Make a table of metrics from one of the library's own."""
    lines = ["| name | kind | labels | what |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines)


myst_substitutions = {
    "policy_table": policy_table(),
    "policy_classes": policy_classes(),
    "tier_metrics": metrics_table(TIER_METRICS),
    "watch_metrics": metrics_table(WATCH_METRICS),
}

html_theme = "furo"
html_title = "kvoffload"
html_static_path = ["_static"]
html_css_files = ["house.css"]
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"
copybutton_only_copy_prompt_lines = True


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
    app.connect("missing-reference", resolve_public_name)
