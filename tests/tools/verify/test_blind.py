"""The blind measure (tests/blind): how mutants are drawn, which tests they meet, how they count."""

import ast
import collections
import gzip
import json
from pathlib import Path

import pytest

from tests.blind import contexts, mutate, run
from tests.mutants import run as planted

ROOT = Path(__file__).resolve().parents[3]
FILE = "meshtrain/step.py"


def mutants_of(source):
    """Returns kind, old and new text of all mutants of a source."""
    text = source.encode()
    found = []
    for statement in mutate.statements(ast.parse(text)):
        found += mutate.mutants_of(statement, "step", FILE, text)
    return {(one.kind, one.before, one.after) for one in found}


@pytest.mark.parametrize(
    "source, mutant",
    [
        ("y = a + b", ("operator", "a + b", "(a - b)")),
        ("y = a * b", ("operator", "a * b", "a")),
        ("y = -a", ("operator", "-a", "a")),
        ("y = a and b", ("operator", "a and b", "(a or b)")),
        ("y += 1", ("operator", "y += 1", "y -= 1")),
        ("y = a < b", ("comparison", "a < b", "(a <= b)")),
        ("y = a is None", ("comparison", "a is None", "(a is not None)")),
        ("if a:\n    f()", ("comparison", "a", "(not (a))")),
        ("y = 3", ("constant", "3", "4")),
        ("y = 0.5", ("constant", "0.5", "1.0")),
        ("def f(a=True): pass", ("constant", "True", "False")),
        ("f(a)", ("call", "f(a)", "pass")),
        ("y = f(a, b)", ("call", "f(a, b)", "a")),
        ("y = x.copy()", ("call", "x.copy()", "x")),
        ("y = f(a, b)", ("arguments", "f(a, b)", "f(b, a)")),
        ("y = f(a, keep=b)", ("arguments", "f(a, keep=b)", "f(a)")),
        ("y = x.argsort(axis=0)", ("axis", "0", "1")),
        ("y = x.shape[1]", ("axis", "1", "0")),
        ("y = 'fsdp'", ("axis", "'fsdp'", "'data'")),
        ("y = x.astype(d)", ("dtype", "x.astype(d)", "x")),
        ("y = jnp.float32", ("dtype", "jnp.float32", "jnp.bfloat16")),
        ("y = f(a, dtype=d)", ("dtype", "f(a, dtype=d)", "f(a)")),
        ("y = x.sum(0)", ("reduction", "x.sum(0)", "x.mean(0)")),
        ("import jax\ny = jax.lax.psum(x, n)", ("reduction", "jax.lax.psum(x, n)", "x")),
    ],
)
def test_each_kind_of_change_is_made(source, mutant):
    assert mutant in mutants_of(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""At most 3."""',
        "import a.b as c",
        "def f(a: 'list[3]') -> 3:\n    '''Takes 3.'''",
        "Kind = dict[str, int] | None",
        "raise ValueError(f'{a + 1} of ' + str(3))",
        "log(f'{a + 1}', 3)",
        "console.say('done' + str(a + 1))",
        "text = f'{a + 1} of {b.sum()}'",
        "text = 'of ' + a",
        "class A:\n    def __repr__(self):\n        return self.a + self.b",
        "assert a < 3",
        "@f(3)\nclass A(B[3]):\n    pass",
    ],
)
def test_texts_types_and_assertions_are_left_alone(source):
    assert mutants_of(source) == set()


@pytest.mark.slow
def test_a_seed_draws_the_same_sample_and_every_area_has_its_share():
    mutants = mutate.draw(ROOT, seed=5, num=36)
    assert mutate.draw(ROOT, seed=5, num=18) == mutants[:18] != mutate.draw(ROOT, 6, 18)
    assert collections.Counter(one.area for one in mutants) == dict.fromkeys(contexts.AREAS, 3)
    assert len({(one.file, one.line, one.start) for one in mutants}) == len(mutants)
    for one in mutants:
        source = (ROOT / one.file).read_bytes()
        assert source[one.start : one.end].decode() == one.before
        compile(one.apply(source), one.file, "exec")


def store(folder, *, root, lines, commit="old"):
    """Writes contexts of one test file: {test: lines of FILE that it reaches}."""
    file = "tests/test_it.py"
    (root / "tests").mkdir(parents=True)
    (root / file).write_text("")
    folder.mkdir()
    names = [f"{file}::{name}" for name in lines]
    reached = {str(number): found for number, found in enumerate(lines.values())}
    content = {"commit": commit, "tests": names, "seconds": [1.0] * len(names)}
    content["lines"] = {FILE: reached}
    target = contexts.stored_file(folder, root, file)
    target.write_bytes(gzip.compress(json.dumps(content).encode()))


def test_lines_that_moved_keep_their_tests(tmp_path):
    root = tmp_path / "root"
    store(tmp_path / "store", root=root, lines={"test_a": [1, 2], "test_b": [3]})
    (root / "meshtrain").mkdir()
    (root / FILE).write_text("new\na\nc\n")
    known = contexts.Contexts(root, tmp_path / "store", lambda commit, file: "a\nb\nc\n")
    assert known.reached[FILE] == {2: {"tests/test_it.py::test_a"}, 3: {"tests/test_it.py::test_b"}}


@pytest.mark.parametrize(
    "lines, reach, num",
    [
        ({"a": [5], "b": [5], "c": [5], "d": [4]}, "line", 3),
        ({"a": [5], "b": [4], "c": [3], "d": [1]}, "function", 3),
        ({"a": [5], "b": [1], "c": [9]}, "file", 3),
        ({"a": [5], "slow": [5], "c": [5], "d": [5]}, "line", 3),
    ],
)
def test_a_line_that_few_tests_reach_meets_those_of_its_function_and_file(lines, reach, num):
    known = contexts.Contexts(ROOT, Path("nowhere"), None)
    seconds = {"slow": run.SECONDS_OF_A_MUTANT}
    known.tests = {name: contexts.Test(name, seconds.get(name, 1.0)) for name in lines}
    known.reached = {FILE: collections.defaultdict(set)}
    for name, reached in lines.items():
        for line in reached:
            known.reached[FILE][line].add(name)
    mutant = mutate.Mutant("step", FILE, 5, 5, (3, 6), "constant", "1", "2", 0, 1)
    chosen, how_near = run.choose(mutant, known)
    assert (len(chosen), how_near) == (num, reach)
    assert "slow" not in [test.name for test in chosen]


def test_a_constant_meets_the_tests_of_the_lines_that_name_it(tmp_path):
    (tmp_path / "meshtrain").mkdir()
    (tmp_path / FILE).write_text("LIMIT = 3\ndef f(): return LIMIT\ndef g(): return LIMITS\n")
    for name in "abcde":
        (tmp_path / name).write_text("assert LIMIT" if name in "be" else "assert LIMITS")
    known = contexts.Contexts(tmp_path, Path("nowhere"), None)
    known.tests = {name: contexts.Test(name, 1.0) for name in "abcde"}
    known.reached = {FILE: {2: {"a", "b", "c"}, 3: {"d", "e"}}}
    mutant = mutate.Mutant("step", FILE, 1, 1, (0, 0), "constant", "3", "4", 8, 9)
    chosen, how_near = run.choose(mutant, known)
    names = [test.name for test in chosen]
    assert ({*names}, how_near) == ({"a", "b", "c", "e"}, "use")
    assert {*names[:2]} == {"b", "e"}  # their files name the constant


def test_equivalent_mutants_do_not_count_and_later_stages_can_still_find_survivors(tmp_path):
    def line(number, stage, outcome, is_final=True):
        return {
            "number": number,
            "stage": stage,
            "area": "step",
            "file": FILE,
            "line": 1,
            "kind": "constant",
            "before": "1",
            "after": "2",
            "outcome": outcome,
            "by": "",
            "is_final": is_final,
        }

    lines = [{"seed": 7, "num": 7, "commit": "0123456789", "date": "2026-01-01"}]
    lines += [line(0, "tests", "failed"), line(1, "tests", "timeout"), line(2, "tests", "survived")]
    lines += [
        line(3, "tests", "survived"),
        line(4, "tests", "survived"),
        line(2, "verify", "failed"),
    ]
    lines += [line(3, "verify", "survived"), line(4, "verify", "crashed")]
    lines += [line(3, "slow", "survived"), line(5, "tests", "survived"), line(5, "slow", "failed")]
    (tmp_path / "seed_7.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    classes = {(7, 3): {"class": "equivalent", "reason": "no reader"}}
    text = run.table(tmp_path, classes)
    assert "| 7 | 01234567 | 6 of 7 | 2 | 1 | 1 | 1 | 1, 1 not classified | 80 % |" in text
    assert "| constant | 4 of 5 |" in text
    with open(tmp_path / "seed_7.jsonl", "a") as file:
        file.write(json.dumps(line(6, "tests", "survived", is_final=False)) + "\n")
    assert "contexts not complete" in run.table(tmp_path, classes)
    assert "| 7.3 |" in text and "no reader" in text and "| 7.2 |" not in text


def test_the_table_lists_the_results_and_every_class_has_a_reason():
    classes = run.read_classes(run.CLASSES)
    assert run.TABLE.read_text() == run.table(run.RESULTS, classes)
    for (seed, number), one in classes.items():
        _, results = run.read_seed(run.RESULTS / f"seed_{seed}.jsonl")
        assert run.last_results(results)[number]["outcome"] not in run.FINDS
        assert one["class"] in ("equivalent", "hole") and one["reason"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_sample_of_five_is_examined_and_most_are_found(tmp_path):
    root = tmp_path / "repository"
    planted.copy_repository(root)
    run.compile_by_hash(root)
    mutants = []
    for one in mutate.draw(root, seed=0, num=120):
        own_file = run.own_test_file(one.file)
        # Of the data, whose tests compile little.
        if one.area == "data" and (root / own_file).exists():
            mutants.append((one, {own_file: {}}))  # without contexts: all tests of the module
    worker = run.Worker(root)
    results = [run.examine(one, chosen, worker) for one, chosen in mutants[:5]]
    worker.close()
    assert all(result["num_run"] for result in results)
    assert sum(result["outcome"] in run.FINDS for result in results) >= 3, results
