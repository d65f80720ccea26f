"""Strategy for chat templates: programs of the template language, and what takes time or memory when it is rendered."""

from __future__ import annotations

from fuzz_seeds import CHAT_TEMPLATE
from fuzz_values import damaged
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy


def _templates() -> SearchStrategy[bytes]:
    """Programs of the template language, and valid templates that were damaged."""
    expressions = st.recursive(
        st.sampled_from(_ATOMS),
        lambda inner: st.one_of(
            st.tuples(inner, st.sampled_from(_OPERATORS), inner).map(lambda parts: "(" + "".join(parts) + ")"),
            st.tuples(inner, st.sampled_from(_FILTERS)).map(lambda parts: f"{parts[0]}|{parts[1]}"),
            st.tuples(inner, st.sampled_from(_METHODS)).map(lambda parts: f"({parts[0]}){parts[1]}"),
            st.lists(inner, max_size=3).map(lambda items: "[" + ",".join(items) + "]"),
        ),
        max_leaves=6,
    )

    def block(form: str, inner: SearchStrategy[str]) -> SearchStrategy[str]:
        return st.tuples(expressions, inner).map(lambda parts: form.replace("E", parts[0]).replace("B", parts[1]))

    bodies = st.recursive(
        expressions.map(lambda text: "{{ " + text + " }}") | st.sampled_from(_TEXT),
        lambda inner: st.one_of(
            *(block(form, inner) for form in _BLOCKS), st.lists(inner, min_size=2, max_size=3).map("".join)
        ),
        max_leaves=6,
    )
    programs = bodies.map(lambda text: text.encode("utf-8", "replace"))
    return st.one_of(programs, programs, damaged(CHAT_TEMPLATE.encode()), st.sampled_from(_BOMBS))


_ATOMS = (
    "messages", "m", "m.role", "m['content']", "loop", "ns", "ns.n", "range(9)", "range(99999)", "9", "10**9", "0.5",
    "'a'", "'%99999999d'", "none", "true", "[]", "{}", "bos_token", "namespace(n=0)", "cycler(1,2)", "joiner()",
    "lipsum", "dict(a=1)", "self", "caller", "raise_exception", "strftime_now('%d')", "undefined",
)  # fmt: skip
_OPERATORS = ("+", "-", "*", "**", "//", "%", "~", " in ", " and ", "==", "<")
_TEXT = ("x", "<|im_end|>", "{% break %}", "{#", "{%")
_BLOCKS = (
    "{% for m in E %}B{% endfor %}",
    "{% if E %}B{% else %}-{% endif %}",
    "{% set ns = E %}B",
    "{% set ns = namespace(n=1) %}{% set ns.n = E %}B",
    "{% macro f(m) %}B{{ f(m) }}{% endmacro %}{{ f(1) }}",
    "{% filter upper %}B{% endfilter %}{{ E }}",
)
_FILTERS = (
    "tojson", "tojson(indent=99)", "length", "list", "join", "upper", "trim", "center(99999999)", "indent(9999999)",
    "format(1)", "replace('a','a'*9999)", "batch(2)|list", "sum", "sort", "reverse|list", "string", "int", "first",
    "attr('__class__')", "map('upper')|list", "default('x')", "items|list", "safe", "pprint", "wordwrap(1)", "xmlattr",
    "round(9)", "filesizeformat", "urlize", "striptags", "groupby('role')", "dictsort", "unique|list", "slice(3)|list",
)  # fmt: skip
_METHODS = (
    ".__class__", ".format(1)", "[0]", "[-1:]", ".split()", ".append(1)", ".n", ".items()", "()", ".strip()",
    ".upper()", ".zfill(99999999)", ".ljust(99999999)", ".encode()", ".replace('','x')", ".join(['a','b'])",
    ".__init__.__globals__",
)  # fmt: skip
_RANGE = b"in range(9999) %}"
_BOMBS = (
    b"{{ 9**(9**9) }}",
    b"{{ 'a' * 10**10 }}",
    b"{% for a " + _RANGE + b"{% for b " + _RANGE + b"{% for c " + _RANGE + b"x" + 3 * b"{% endfor %}",
    b"{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    b"{{ [messages]*99999999 }}",
    b"{{ '%0999999999d' % 1 }}",
)
templates = _templates()
