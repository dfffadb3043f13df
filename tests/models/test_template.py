"""What a template makes of a row: its values, whatever they are called; never a method's name or a null as text."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import jinja2
import pyarrow as pa
import pytest

import gristmill as gm
from gristmill.errors import BadModel
from gristmill.models.template import Template

ORDER = {"order": {"items": [1, 2], "keys": None, "city": "Rome"}}
SAYS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a field named as a method": ("{{ order.items }} {{ order['items'] }}", ORDER, "[1, 2] [1, 2]"),
    "a column named as a method": ("{{ row.items }}{{ row.get }}", {"items": 5, "get": 6}, "56"),
    "a method": ("{{ order.items() | length }} {{ order.city.upper() }}", ORDER, "3 ROME"),
    "by attribute": ("{{ rows | map(attribute='items') | list }}", {"rows": [{"items": 3}]}, "[3]"),
    "an attribute": ("{{ when.year }}", {"when": datetime.date(2020, 1, 2)}, "2020"),
    "a null with another": ("{{ x or 'u' }}{{ x | default('d') }}{{ row.get('x') or 'g' }}", {"x": None}, "udg"),
    "a null told apart": ("{% if x is none %}a{% endif %}{% if x == none %}b{% endif %}", {"x": None}, "ab"),
    "nulls left out": ("{% for x in xs if x is not none %}{{ x }}{% endfor %}", {"xs": [1, None, 2]}, "12"),
    "an item of a list": ("{{ xs[0] }}{{ xs[1] or '-' }}", {"xs": [1, None]}, "1-"),
    "JSON": ("{{ row | tojson }}", {"a": None, "b": [None, {"c": None}]}, '{"a": null, "b": [null, {"c": null}]}'),
    "JSON as it is read": (
        "{{ row | tojson }}",
        {"b": "<é & 'ü' 東>", "a": datetime.date(2020, 1, 2), "n": decimal.Decimal("1.10")},
        """{"b": "<é & 'ü' 東>", "a": "2020-01-02", "n": "1.10"}""",
    ),
    "a field by a filter": (
        "{{ order | attr('items') }}{{ order | pprint }}",
        {"order": {"items": 3}},
        "3{'items': 3}",
    ),
    "all of a row": ("{{ row }}", {"a": None, "b": 1}, "{'a': None, 'b': 1}"),
    "names of Jinja's": ("{{ row['none'] }}{{ row['row'] }}{{ row['self'] }}", {"none": 1, "row": 2, "self": 3}, "123"),
    "columns named as its functions": ("{{ range }}{{ loop }}", {"range": 1, "loop": 2}, "12"),
}


@pytest.mark.parametrize("case", SAYS.values(), ids=SAYS)
def test_a_template_says(case: tuple[str, dict[str, Any], str]) -> None:
    """The row's own values."""
    text, row, expected = case
    assert Template(text, "prompt").of(row) == expected


@pytest.mark.parametrize(
    "text",
    ["{{ x }}", "{{ row.x }}", "{{ row.get('x') }}", "{{ x | upper }}", "{{ 'a' ~ x }}", "{{ o.x }}", "{{ o.x.y }}",
     "{{ xs | join }}", "{% for x in xs %}{{ x }}{% endfor %}", "{{ xs[0] | string }}", "{{ row.get('none') }}",
     "{{ o.items }}", "{{ o.keys | string }}", "{{ 'a'.upper }}", "{{ x + 1 }}", "{% for y in x %}{{ y }}{% endfor %}",
     "{{ o | attr('items') }}", "{{ 'a' | attr('upper') }}", "{{ x | pprint }}", "{{ xs[0] | pprint }}"],
)  # fmt: skip
def test_no_text_of_a_null_or_a_method(text: str) -> None:
    """Wherever it stands, and whatever is done with it."""
    with pytest.raises((jinja2.UndefinedError, TypeError)):
        Template(text, "prompt").of({"x": None, "xs": [None], "o": {"x": None}})


def test_names_that_are_jinja_s_too() -> None:
    """A column of such a name is not mixed up with what Jinja means by it: it is asked for by row['name']."""
    where = {"model": "m", "base_url": "http://127.0.0.1:9/v1"}
    for name, prompt in (("none", "{{ none }}"), ("True", "{{ True }}"), ("row", "{{ row.a }}")):
        with pytest.raises(BadModel, match=rf"'{name}' in the prompt.*row\['{name}'\]"):
            gm.prompt(pa.table({name: ["a"], "a": ["b"]}), prompt=prompt, **where)
    with pytest.raises(BadModel, match=r"`self` is Jinja's own.*row\['self'\]"):
        gm.prompt(pa.table({"self": ["a"]}), prompt="{{ self }}", **where)
    with pytest.raises(BadModel, match=r"examples have one that cannot be put into the prompt: .*null"):
        gm.prompt(pa.table({"a": ["b"]}), prompt="{{ a }}", examples=[{"a": None, "answer": "x"}], **where)
