"""Planted bugs (tests/mutants): every patch applies, the table lists all, and a sample is found."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.mutants import run

MUTANTS = {mutant.name: mutant for mutant in run.load()}
SAMPLE = """
attention_query_heads_strided collectives_half_added_in_half executor_idle_stages_not_masked
losses_padding_of_chunks_counts optim_decay_of_every_parameter sharding_last_rule_wins
sync_first_shard_only tokens_same_order_every_epoch
""".split()


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    run.copy_repository(folder)
    return folder


@pytest.mark.parametrize("name", MUTANTS)
def test_a_patch_applies_to_python_files_of_the_package_and_its_header_names_files(name, copy):
    mutant = MUTANTS[name]
    changed = [line[6:] for line in mutant.patch.splitlines() if line.startswith("+++ b/")]
    before = {file: (copy / file).read_text() for file in changed}
    run.plant(mutant.patch, copy)
    after = {file: (copy / file).read_text() for file in changed}
    run.plant(mutant.patch, copy, "--reverse")
    assert changed and before != after
    for file, text in after.items():
        assert file.startswith("meshtrain/") and compile(text, file, "exec")
    assert mutant.bug and mutant.tests
    for file, _, test in (name.partition("::") for name in mutant.tests):
        assert f"\ndef {test}" in (run.ROOT / file).read_text()
    if mutant.config != run.NONE:
        assert (run.ROOT / mutant.config.split()[0].removeprefix("--config=")).is_file()


def test_a_patch_that_does_not_apply_is_an_error(copy, capfd):
    for patch in ("", MUTANTS["sync_first_shard_only"].patch.replace("leaf.sum(0)", "leaf.sum(1)")):
        with pytest.raises(subprocess.CalledProcessError):
            run.plant(patch, copy)
    assert "patch does not apply" in capfd.readouterr().err


def test_a_patch_without_a_known_kind_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    for kind in ("", "Kind: sums\n"):
        (tmp_path / "a.patch").write_text(f"Bug: wrong\n{kind}Tests: tests/test_docs.py\n\n")
        with pytest.raises(ValueError, match=r"^a.patch: Kind: '(sums)?' is none of formula, mask"):
            run.load()


def test_each_kind_has_bugs_and_a_real_bug_names_planted_ones_of_its_kind():
    assert {mutant.kind for mutant in MUTANTS.values()} == {*run.KINDS}
    bugs = run.load_real_bugs()
    assert len({bug["link"] for bug in bugs}) == len(bugs) >= 30
    for bug in bugs:
        assert re.fullmatch(r"https://github.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", bug["link"])
        assert bug["state"] in ("open", "closed", "merged") and bug["kind"] in run.KINDS
        kinds = {MUTANTS[name].kind for name in bug["planted"]}
        assert bug["kind"] in kinds if kinds else bug["why"], bug["link"]


def test_the_page_has_the_tables_of_the_patches_and_results():
    page = run.PROOF.read_text()
    assert page == run.proof(run.load(), run.read_results()), (
        "write it with: python tests/mutants/run.py --stages="
    )
    outdated = page.replace("| planted |", "| planted before |")
    assert outdated != run.with_tables(outdated, {"kinds": "a"}) != page
    with pytest.raises(ValueError):
        run.with_tables(page, {"unknown": "a table"})


def test_the_table_is_that_of_the_patches_and_results():
    assert run.TABLE.read_text() == run.table(run.load(), run.read_results()), (
        "write it with: python tests/mutants/run.py --stages="
    )
    assert all(f"| `{name}` |" in run.TABLE.read_text() for name in MUTANTS)


@pytest.mark.parametrize("page", ["README.md", "docs/guides/verify.md", "docs/proof.md"])
def test_the_documentation_has_their_number(page):
    assert re.search(rf"\b{len(MUTANTS)} (planted )?bugs", (run.ROOT / page).read_text())


LAYOUT_LINE = "6.8e-13  4.2 s  data 8 · zero 3  "


@pytest.mark.parametrize(
    ("stage", "program", "outcome", "by"),
    [
        ("quick", f"print('{LAYOUT_LINE}ok')", "survived", ""),
        (
            "quick",
            f"print('{LAYOUT_LINE}FAILED loss: 1 here, 2 on one device'); time.sleep(600)",
            "killed",
            "data 8 · zero 3  FAILED loss: 1 here, 2 on one device",
        ),
        ("full", "print('FAILED JaxRuntimeError: INTERNAL')", "crashed", "FAILED JaxRuntimeError"),
        ("full", "raise SystemExit('config.x=1: use 2')", "crashed", "config.x=1: use 2"),
        ("tests", "print('FAILED tests/a.py::b - ValueError')", "killed", "FAILED tests/a.py::b"),
        ("tests", "print('FAILED on one device')", "survived", ""),
        ("tests", "print('ERROR tests/a.py'); raise SystemExit(2)", "crashed", "ERROR tests/a.py"),
        ("tests", "print('started'); time.sleep(600)", "timeout", "started"),
    ],
)
def test_a_stage_ends_with_its_first_finding_and_a_crash_is_none(
    stage, program, outcome, by, tmp_path
):
    command = [sys.executable, "-c", f"import time; {program}"]
    result = run.observe(command, stage, tmp_path, 5.0 if outcome == "timeout" else 60.0)
    assert (
        result["outcome"] == outcome
        and result["by"].startswith(by)
        and bool(result["by"]) == bool(by)
    )


def test_stages_run_until_one_finds_the_bug_and_results_are_not_computed_again(monkeypatch):
    mutant, ran = MUTANTS["sync_first_shard_only"], []
    outcomes = {"quick": "survived", "full": "crashed", "tests": "killed"}
    monkeypatch.setattr(run, "copy_repository", lambda folder: (folder / "copy").touch())
    monkeypatch.setattr(run, "plant", lambda patch, folder: None)
    monkeypatch.setattr(
        run, "observe", lambda _, stage, *__: {"outcome": outcomes[stage], "by": ""}
    )
    known = {(mutant.name, "quick", mutant.digest): {"outcome": "survived"}}
    args = SimpleNamespace(stages=run.STAGES, timeout=1.0)
    assert run.examine(mutant, args, known, ran.append) == {"survived", "crashed", "killed"}
    assert [result["stage"] for result in ran] == ["full", "tests"]
    outcomes["quick"] = "killed"
    assert run.examine(mutant, args, {}, ran.append) == {"killed"}
    assert run.examine(mutant._replace(config=run.NONE), args, {}, ran.append) == {"killed"}
    assert [result["stage"] for result in ran[2:]] == ["quick", "tests"]


def test_results_are_those_of_the_newest_patch(tmp_path):
    mutant = MUTANTS["sync_first_shard_only"]
    result = {"mutant": mutant.name, "stage": "quick", "outcome": "killed", "by": "a | b"}
    result["seconds"] = 7
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(result | {"digest": "of an older patch"}) + "\n")
    assert "1 not run" in run.table([mutant], run.read_results(path))
    path.write_text(json.dumps(result | {"digest": mutant.digest}) + "\n")
    text = run.table([mutant], run.read_results(path))
    assert "1 bugs: 1 found by `verify --quick`" in text and f"\n## {mutant.kind}\n" in text
    kinds = run.table_of_kinds([mutant], run.read_results(path))
    row = f"| [{mutant.kind}](../tests/mutants/README.md#{mutant.kind}) | {run.KINDS[mutant.kind]}"
    assert f"{row} | 1 | 1 | 0 | 0 | 0 | 0 | 7 of 1 |" in kinds
    assert f"| `{mutant.name}` | {mutant.bug} | killed |  |  | 7 | `a \\| b` |" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_planted_bug_is_found_by_the_stage_that_is_recorded_to_find_it(name, tmp_path):
    mutant, results = MUTANTS[name], run.read_results()
    found = {stage: results.get((name, stage, mutant.digest), {}) for stage in run.STAGES}
    stage = next((stage for stage in found if found[stage].get("outcome") == "killed"), None)
    assert stage, f"no stage is recorded to find it: python tests/mutants/run.py {name}"
    run.copy_repository(tmp_path)
    run.plant(mutant.patch, tmp_path)
    result = run.observe(run.command_of(mutant, stage), stage, tmp_path, 1200)
    assert result["outcome"] == "killed", result["by"]
