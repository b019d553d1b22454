"""Configuration of the documentation: ``sphinx-build -W -n -b html docs docs/_build/html``.

The pages are plain Markdown, so that they read well where they are shown as they are, as on a code
host. `as_built` makes of them what Sphinx shows more: signatures and docstrings of the names in a
table that `.ci/make-reference.py` made, and what comments ``<!-- eval-rst`` hide, links to objects,
and the tables of contents.
"""

import enum
import importlib
import inspect
import re
from pathlib import Path

import kvoffload

project = "kvoffload"
author = "The kvoffload developers"
copyright = "2026, the kvoffload developers"
release = kvoffload.__version__
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
    ("py:class", r"kvoffload\.traces\.chaining\.ChainingCounter"),  # likewise
    ("py:class", r"kvoffload\.traces\.returns\.Returns"),  # likewise
    ("py:class", r"kvoffload\.replay\.groups\.(_Rule|ChunkIndex|Runs)"),  # likewise
    ("py:class", r"kvoffload\.replay\.arrivals\.Collector"),  # likewise
    ("py:class", r"kvoffload\.advise\.choice\.AnyCase"),  # a type variable
    ("py:class", r"tuple\[.*"),  # an annotation that is cut at its comma, with numpy 2.5
    ("py:class", r"TierKeywords|Unpack"),  # the keywords of `TierOptions`, which docstrings name
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
# Which members the reference shows, where it is not all that a class defines and documents itself.
MEMBERS = {
    "kvoffload.CPUBackend": "",  # as in its contract
    "kvoffload.CPUOffloadingManager": "reset_cache, stats, block_size, medium, policy, events, "
    "block_table",
    "kvoffload.LRUOffloadingManager": "backend, blocks",
    "kvoffload.ARCOffloadingManager": "backend, t1, t2, b1, b2, target_t1_size, cache_capacity",
    "kvoffload.testing.policies.PolicyConformance": "make_policy, make_manager, verify, observe, "
    "is_deterministic, checks_arguments, num_random_runs",
    "kvoffload.testing.tiers.TierConformance": "open_tier, reopen_tier, block_bytes, num_blocks",
    "kvoffload.testing.backends.BackendConformance": "make_backend, place_of",
    "kvoffload.tiers.Block": "",
    "kvoffload.tiers.RemoteTier": "",
    "kvoffload.tiers.TierOptions": "",
    "kvoffload.traces.TraceRecorder": "lookup, close",
    "kvoffload.traces.survey.BlockLengths": "",
}
UNSHOWN = {  # members that other parts of the library use
    "kvoffload.advise.Advice": "device_hits",
    "kvoffload.advise.Setup": "capped, configuration, replays_per_memory",
    "kvoffload.replay.arrivals.Arrivals": "has_sessions",
    "kvoffload.replay.Configuration": "check_trace, is_in_turn, prefill_ns, spec",
    "kvoffload.replay.GroupChunks": "hit_name, hit_unit, is_bounded, kept_on_device, "
    "loaded_chunks, offers_by_step, retention_multiple, slot_name",
    "kvoffload.replay.Result": "of, unit",
    "kvoffload.replay.routers.RouterSpec": "router, sees",
    "kvoffload.replay.hints.Told": "at_begin, at_finish, now_s",
    "kvoffload.replay.durations.DurationHistogram": "add",
    "kvoffload.tiers.DirectoryTier": "folder",
    "kvoffload.tiers.Region": "views_unchecked",
    "kvoffload.tiers.RemoteStore": "call, chore",
    "kvoffload.traces.PromptOptions": "blocks",
    "kvoffload.traces.chaining.Chaining": "is_broken, is_suspect",
}
TABLE = re.compile(r"<!-- made by \.ci/make-reference\.py: .*?<!-- end -->", re.DOTALL)
TITLED = re.compile(r'^\| \[`\w+`\]\([^)\s]+ "(kvoffload[\w.]*)"\)', re.MULTILINE)
HIDDEN = re.compile(r"^<!-- eval-rst\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
OBJECT = re.compile(r"\[`([^`\]]+)`\]\([^)\s]+ \"(kvoffload[\w.]*)\"\)")
PAGE = re.compile(r"\]\(([\w-]+)\.md\)")


def as_built(app, docname, source):
    """Show what comments hide, lead links to objects, and append a page's table of contents.

    A link to an object has its full name as the title: ``[`X`](page.md "kvoffload.X")``.
    """
    if docname == "changes":
        app.env.note_dependency(CHANGES)
        # Its links start at the root of the project, those of this page in the folder of pages.
        source[0] = Path(CHANGES).read_text(encoding="utf-8").replace("](docs/", "](")
        return
    text = TABLE.sub(with_docstrings, source[0])
    text = HIDDEN.sub(r"```{eval-rst}\n\1```", text)
    text = OBJECT.sub(r"{py:obj}`\1 <\2>`", text)
    folder, _, name = docname.rpartition("/")
    if docname == "index":
        pages = [f"{section}/index" for section in SECTIONS] + ["changes"]
    else:
        pages = dict.fromkeys(PAGE.findall(text)) if name == "index" and folder in SECTIONS else ()
    if pages:
        text += "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"
    source[0] = text


def with_docstrings(table):
    """Return a table of names with the directives that show its objects."""
    names = TITLED.findall(table[0])
    directives = "\n".join(directive(name) for name in names)
    return f"{table[0]}\n\n```{{eval-rst}}\n{directives}```" if names else table[0]


def directive(name):
    """Return the directive that shows the object of a full name."""
    module, _, last = name.rpartition(".")
    shown = getattr(importlib.import_module(module), last)
    if not inspect.isclass(shown):
        return f".. autofunction:: {name}\n"
    if issubclass(shown, BaseException):
        return f".. autoexception:: {name}\n"
    lines = [f".. autoclass:: {name}", *(f"   :{option}" for option in options(name, shown))]
    return "\n".join(lines) + "\n"


def options(name, shown):
    """Yield the options of the directive of a class."""
    contract = kvoffload.CachePolicy
    if name in MEMBERS:
        if MEMBERS[name]:
            yield f"members: {MEMBERS[name]}"
        if issubclass(shown, kvoffload.OffloadingManager):
            yield "inherited-members:"
    elif shown is contract:
        yield "members:"
        yield "special-members: __len__"
    elif issubclass(shown, contract):  # only what it adds
        own = sorted(set(dir(shown)) - set(dir(contract)))
        yield "members: " + ", ".join(member for member in own if member[0] != "_")
        yield "inherited-members:"
    else:
        yield "members:"
        unshown = [*getattr(shown, "_fields", ()), *filter(None, [UNSHOWN.get(name)])]
        if unshown:  # the fields of a tuple are in its docstring
            yield "exclude-members: " + ", ".join(unshown)
        if issubclass(shown, enum.Enum):
            yield "undoc-members:"


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
