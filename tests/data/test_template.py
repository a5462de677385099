"""Templates that join fields of a row to a text."""

import pytest

from meshtrain.data import template
from meshtrain.errors import ConfigError

ROW = {"q": "why", "a": {"text": "so", "score": 0.5}, "n": 3, "my column": "x", "a.b": "dotted"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"{q}\n{a.text}", "why\nso"),
        (r"\t{n}\\n{q}", "\t3\\nwhy"),
        ("{{{q}}} {a.score}", "{why} 0.5"),
        ("{my column}{q}{q}", "xwhywhy"),
        ("{a.b}", "dotted"),
        ("a\nb {n}", "a\nb 3"),
    ],
)
def test_a_template_joins_fields(text, expected):
    assert template.parse(text).render(ROW) == expected


def test_the_fields_are_named_once_and_in_order():
    assert template.parse("{q}{a.text}{q}").fields == ("q", "a.text")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "names no field"),
        ("no field {{q}}", "names no field"),
        ("{q", "has a { without"),
        ("{q}}", "has a } without"),
        ("{}", "has {}, which names no field"),
        ("{a..b}", "which names no field"),
        (r"{q}\d", r"has \d, which is no escape"),
        ("{q}\\", "which is no escape"),
    ],
)
def test_what_is_no_template_is_an_error(text, fault):
    with pytest.raises(ConfigError) as error:
        template.parse(text)
    assert fault in str(error.value)


@pytest.mark.parametrize(
    ("text", "row", "fault"),
    [
        ("{q}", {"p": 1}, "no field 'q' among 'p'"),
        ("{q.r}", {"q": "text"}, "no field 'q.r'"),
        ("{q}", {"q": None}, "q is NoneType, not a text or a number"),
        ("{q}", {"q": ["a"]}, "q is list"),
        ("{q}", {"q": {"a": 1}}, "q is dict"),
    ],
)
def test_a_row_that_does_not_fit_is_a_fault(text, row, fault):
    with pytest.raises(ValueError, match=fault):
        template.parse(text).render(row)


def test_numbers_are_texts_and_booleans_are_those_of_json():
    assert template.parse("{a} {b} {c}").render({"a": 1, "b": 2.5, "c": True}) == "1 2.5 true"
