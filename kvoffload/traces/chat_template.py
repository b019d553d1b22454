"""A Hugging Face chat template, rendered in a sandbox and within bounds.

A template is a program that comes with a model. Jinja's sandbox keeps it from Python's internals,
but bounds neither its time nor its memory. So each turn of a loop, each call of a macro and each
text that it makes is charged to a budget that grows with the request, and only the filters and
methods that chat templates use are available. Loops, comparisons and concatenations are rewritten
before the template is compiled, so that it cannot avoid the charge.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from types import GeneratorType
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from .errors import BadLineError, TraceError

__all__ = ["ChatTemplate"]

BUDGET = 2**19  # of steps and characters per request; some 2 s at most
BUDGET_PER_CHARACTER = 16  # of the request, in addition
MOST_BITS = 256  # of a product
MOST_INDENT = 16


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FILTERS = _names(
    "abs count d default first float int items last length list map reject rejectattr reverse safe "
    "select selectattr"
)
DEEP_FILTERS = _names(
    "capitalize dictsort e escape forceescape groupby lower max min sort string sum title trim "
    "unique upper"
)
"""Filters that compare the contents of a value, or make a text of them."""
DEEP_TESTS = _names("eq equalto == ne != lt lessthan < le <= gt greaterthan > ge >= in lower upper")
METHODS: dict[type, frozenset[str]] = {
    str: _names(
        "capitalize count endswith find index isalnum isalpha isdigit islower isspace isupper "
        "join lower lstrip partition removeprefix removesuffix replace rfind rpartition rsplit "
        "rstrip split splitlines startswith strip title upper"
    ),
    dict: _names("get items keys values"),
    list: frozenset(),
    tuple: frozenset(),
}

_OF_JINJA = ("_loop_vars", "_block_vars")  # arguments that the compiled template adds

# Templates for training mark the answer; for rendering, the mark means nothing.
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
_TIME_FORMAT = re.compile(r"(?:%-?[A-Za-z%]|[\w \-/:,.]){0,64}", re.ASCII)


class _ExceededError(Exception):
    """The budget of a request is used up."""


class _RefusedError(Exception):
    """The template refuses the messages."""


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_charged_output,
            extensions=["jinja2.ext.loopcontrols"],
        )
        self.left = self.most = 0
        shallow = {name: self._charged(self.filters[name], self.charged) for name in FILTERS}
        deep = {name: self._charged(self.filters[name], self.sized) for name in DEEP_FILTERS}
        self.filters = {**shallow, **deep}
        tests: dict[str, Any] = {**self.tests}
        compared = {name: self._charged(tests[name], self.sized) for name in DEEP_TESTS}
        self.tests = {**tests, **compared}
        self.filters["tojson"] = self._tojson
        self.filters["join"] = self._join
        self.filters["replace"] = self._replace
        self.globals = {name: self.globals[name] for name in ("range", "dict", "namespace")}

    def step(self, cost: int) -> bool:
        """Charge a step; return True, for conditions."""
        self.left -= cost
        if self.left < 0:
            raise _ExceededError
        return True

    def charged(self, value: Any) -> Any:
        """Return a value whose own size has been charged."""
        if type(value) in (str, list, tuple, dict):
            self.step(1 + (len(value) >> (6 if type(value) is str else 3)))
        return value

    def sized(self, value: Any) -> Any:
        """Return a value whose size, with its contents, has been charged; a generator as a list."""
        if isinstance(value, GeneratorType):
            value = list(value)
        if type(value) in (str, list, tuple, dict):
            found = [value]
            while found:
                each = found.pop()
                if isinstance(each, str):
                    self.step(1 + (len(each) >> 6))
                elif isinstance(each, dict):
                    self.step(1 + len(each))
                    found += each.values()
                elif isinstance(each, list | tuple):
                    self.step(1 + len(each))
                    found += each
        return value

    def concatenated(self, *values: Any) -> str:
        """Concatenate as ``~`` does."""
        return self._text("".join, [str(self.sized(value)) for value in values])

    def _text(self, make: Callable[[list[str]], str], parts: list[str], extra: int = 0) -> str:
        length = sum(map(len, parts)) + extra
        self._check_length(length)
        return make(parts)

    def _check_length(self, length: int) -> None:
        if length > self.most:
            raise _ExceededError
        self.step(1 + (length >> 6))

    def _charged(
        self, function: Callable[..., Any], charge: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        @functools.wraps(function)
        def charging(*args: Any, **kwargs: Any) -> Any:
            named = {name: charge(value) for name, value in kwargs.items()}
            return function(*map(charge, args), **named)

        return charging

    def _tojson(self, value: Any, indent: int | None = None, **options: Any) -> str:
        known = {"ensure_ascii", "separators", "sort_keys"}
        if not known.issuperset(options) or not (indent is None or 0 <= indent <= MOST_INDENT):
            raise jinja2.TemplateRuntimeError("tojson has other options")
        options.setdefault("ensure_ascii", False)
        return json.dumps(self.sized(value), indent=indent, **options)

    def _join(self, value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        values = list(value)
        if attribute is not None:
            values = [self.getitem(each, attribute) for each in values]
        texts = [str(self.sized(each)) for each in values]
        return self._text(str(d).join, texts, len(str(d)) * len(texts))

    def _replace(self, s: str, old: str, new: str, count: int | None = None) -> str:
        text, old, new = str(self.sized(s)), str(old), str(new)
        self._check_length(len(text) + (text.count(old)) * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def wrap_str_format(self, value: Any) -> None:  # noqa: ARG002 - as it is called
        """Return None: strings cannot be formatted."""
        return

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may use an attribute."""
        methods = METHODS.get(type(obj))
        if methods is not None:
            return attr in methods
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function that a template may call."""
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if owner is self:  # a function that the library put into the template
            return function(*args)
        given = {key: value for key, value in kwargs.items() if key not in _OF_JINJA}
        if type(owner) is str and name in ("replace", "join"):
            return (self._replace if name == "replace" else self._joined_by)(owner, *args, **given)
        for value in (owner, *args, *given.values()):
            self.charged(value)
        return super().call(context, function, *args, **kwargs)

    def _joined_by(self, separator: str, values: Iterable[Any]) -> str:
        return self._join(values, separator)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator whose result may become large."""
        sequences = [each for each in (left, right) if isinstance(each, str | list | tuple)]
        if operator == "+" and len(sequences) == 2:
            self._check_length(len(left) + len(right))
        elif operator == "*" and sequences:
            times = right if sequences[0] is left else left
            self._check_length(len(sequences[0]) * max(0, times))
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            bits = bits * max(1, right) if operator == "**" else bits + right.bit_length()
            if bits > MOST_BITS:
                raise _ExceededError
        elif operator == "%" and sequences:
            raise jinja2.TemplateRuntimeError("strings cannot be formatted")
        return super().call_binop(context, operator, left, right)


@pass_context
def _charged_output(context: Any, value: Any) -> Any:
    """Charge the output of an expression."""
    environment: _Environment = context.environment
    text = value if isinstance(value, str) else str(environment.sized(value))
    environment.step(1 + len(text))
    return value if isinstance(value, str) else text


class _Charging(NodeTransformer):
    """A rewriter of templates that charges for their work."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        """Charge each turn, including those that the condition skips."""
        self._charge(node)
        if node.test is not None:
            node.test = nodes.And(_call("step", nodes.Const(1)), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        """Charge each call."""
        self._charge(node)
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        """Charge each call."""
        self._charge(node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """Charge the text."""
        self.generic_visit(node)
        return _call("concatenated", *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """Charge both values: they may hold the same list many times."""
        self.generic_visit(node)
        node.expr = _call("sized", node.expr)
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        """Replace a tuple, which could be a key and hold itself many times, with a list."""
        self.generic_visit(node)
        return nodes.List(node.items) if node.ctx == "load" else node

    def _charge(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> None:
        size = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("step", nodes.Const(1 + (size >> 3)))))


def _call(name: str, *arguments: nodes.Expr) -> nodes.Call:
    """Return the call of a method of the environment, which no variable of a template hides."""
    return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)


class ChatTemplate:
    """A chat template.

    Parameters
    ----------
    origin : str
        The file, for messages.
    source : str
        The template.
    tool_source : str or None
        The template for requests with tools, if it is a separate one.
    variables : dict of str to str
        Texts of the special tokens, by name.

    Raises
    ------
    TraceError
        If it is not a Jinja template.
    """

    def __init__(
        self, origin: str, source: str, tool_source: str | None, variables: dict[str, str]
    ) -> None:
        self._environment = _Environment()
        self._variables = variables
        self._template = self._compiled(origin, source)
        self._tool_template = self._template
        if tool_source is not None:
            self._tool_template = self._compiled(origin, tool_source)

    def _compiled(self, origin: str, source: str) -> jinja2.Template:
        environment = self._environment
        try:
            tree = environment.parse(_GENERATION.sub(_without_meaning, source))
            for node in _Charging().visit(tree).find_all(nodes.Node):
                node.set_environment(environment)
            tree.set_lineno(1)
            code = environment.compile(tree)
        except jinja2.TemplateSyntaxError as error:
            rule = f"must be a Jinja chat template, got an error in line {error.lineno}"
            raise TraceError(origin, None, rule) from None
        except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError) as error:
            kind = type(error).__name__
            rule = f"must be a Jinja chat template, got {kind}"
            raise TraceError(origin, None, rule) from None
        return jinja2.Template.from_code(environment, code, environment.make_globals(None))

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, unix: float) -> str:
        """Return the text of messages, up to the start of the answer.

        `unix` is the Unix time of the request, seconds, which a template may mention. BadLineError,
        without any text of the request, if the template fails or does too much.
        """
        environment = self._environment
        size = len(str(messages)) + len(str(tools))
        environment.left = environment.most = BUDGET + BUDGET_PER_CHARACTER * size
        template = self._tool_template if tools else self._template
        try:
            text: str = template.render(
                {
                    **self._variables,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": True,
                    "raise_exception": _raise,
                    "strftime_now": functools.partial(_strftime, unix),
                }
            )
        except _ExceededError:
            raise BadLineError("the chat template must stay within its bounds, got more") from None
        except _RefusedError:
            rule = "the chat template must accept the messages, got a refusal"
            raise BadLineError(rule) from None
        except Exception as error:  # noqa: BLE001 - a template is foreign code
            kind = type(error).__name__
            raise BadLineError(f"the chat template must render messages, got {kind}") from None
        return text


def _without_meaning(match: re.Match[str]) -> str:
    return match[1] + ("endif" if match[2] else "if true") + match[3]


def _raise(_message: object) -> None:
    raise _RefusedError


def _strftime(unix: float, form: Any) -> str:
    if not isinstance(form, str) or not _TIME_FORMAT.fullmatch(form):
        raise jinja2.TemplateRuntimeError
    return datetime.fromtimestamp(unix, timezone.utc).strftime(form)
