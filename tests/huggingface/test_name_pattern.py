"""Patterns of PEFT match as in PEFT, and in a time that nobody can make long."""

import itertools
import re

import pytest

from meshtrain.huggingface import name_pattern

NAMES = [
    f"{stem}.{number}.{leaf}"
    for stem in ("model.layers", "transformer.h", "h")
    for number in (0, 3, 12)
    for leaf in ("self_attn.q_proj", "self_attn.kv_b_proj", "mlp.experts.gate_up_proj", "mlp.gate")
] + ["", "q_proj", "aaab", "aab.aab"]
PATTERNS = [
    "q_proj",
    "mlp.gate",
    r"mlp\.gate",
    "",
    r".*\.(q_proj|kv_b_proj)",
    r"layers\.(0|12)\..*",
    r"^model.layers.3.self_attn.q_proj",
    r"^h\.\d+\.mlp\.gate$",
    r"(model\.layers|transformer\.h)\.[0-3]\.(self_attn\.)?.*proj",
    r"(?:layers|h)\.\d{2}\.[^m]*",
    r"(.*_)+proj",
    "(a*)*b",
    "(a|aa)+b",
    r"(\w+\.)*gate",
    r"h\.\d{2,}\.mlp.*",
    r"h\.\d{0,1}\.mlp.*",
    "layers|gate",
    "()|q_proj",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_as_in_peft(pattern):
    found = [name for name in NAMES if name_pattern.matches(pattern, name)]
    assert found == [name for name in NAMES if re.match(rf"(.*\.)?({pattern})$", name)]


def test_short_patterns_of_all_kinds_match_as_in_python():
    pieces = ("a", "b", "(a|b)", "(ab)", ".", "[^a]")
    ends = ("", "*", "+", "?", "{2}", "{1,2}")
    parts = [piece + end for piece, end in itertools.product(pieces, ends)]
    names = ["".join(name) for size in range(5) for name in itertools.product("ab", repeat=size)]
    for pattern in map("".join, itertools.product(parts, repeat=2)):
        compiled = re.compile(rf"(.*\.)?({pattern})$")
        for name in names[::3]:
            expected = compiled.match(name) is not None
            assert name_pattern.matches(pattern, name) == expected, (pattern, name)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a*)*b",
        "(a|a)" * 60 + "b",
        "(a?){50}" * 10 + "b",
        "a*" * 200,
        "((((){999}){999}){999}){999}b",
        "((a{999}){999}){999}",
    ],
)
def test_patterns_that_take_exponential_time_in_python_end(pattern):
    assert not name_pattern.matches(pattern, "a" * 80 + "c")


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        (r"(a)\1", r"has '\\\\'"),
        ("a(?=b)", "has '?'|repeats nothing"),
        ("*a", "repeats nothing"),
        ("a**", "repeats nothing"),
        ("(a", "not closed"),
        ("a)", "not open"),
        ("a$b", r"has '\$'"),
        ("a" * 1001, "too long"),
    ],
)
def test_other_syntax_is_an_error(pattern, fault):
    with pytest.raises(ValueError, match=fault):
        name_pattern.matches(pattern, "a")
