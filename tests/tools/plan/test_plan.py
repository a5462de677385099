"""`meshtrain plan`: what the command prints and writes."""

import itertools
import json
import re
from xml.etree import ElementTree

import pytest

from meshtrain.config.schema import SyncConfig
from meshtrain.tools.plan.layout import Layout, name_of
from tests.lib.plans import run


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    output = tmp_path / "plan.json"
    flags = ["--device=h200", "--devices=64", "--tokens=1e12", "--price=2"]
    assert run(*flags, f"--output={output}") == 0
    printed = capsys.readouterr().out
    assert "tokens take" in printed and "--config.mesh.fsdp=" in printed and "MFU" in printed
    record = json.loads(output.read_text())
    first = record["layouts"][0]
    assert first["overrides"]["mesh.fsdp"] == first["mesh"]["fsdp"]
    assert first["step_seconds"] == pytest.approx(sum(first["seconds"].values()))
    assert 0.2 < first["mfu"] < 0.7 and first["compiled_memory_bytes"] is None
    assert first["memory_bytes"] == pytest.approx(sum(first["memory"].values()))
    assert {"limited_by", "tokens_per_second", "step_seconds_range"} <= first.keys()


@pytest.mark.parametrize(
    "flags, fault",
    [
        (["--device=h999", "--devices=8"], "--device=h999: unknown"),
        (["--device=h200", "--devices=0"], "--devices=0: use 1 or more"),
        (["--device=h200", "--devices=12"], "not divisible by --devices_per_host=8"),
        (["--device=h200", "--devices=8", "--memory=2"], "--memory=2: use a part"),
        (["--device=h200", "--devices=8", "--fix=mesh.tensr=2"], "did you mean"),
        (["--device=h200", "--devices=8", "--fix=mesh.tensor=x"], "use a number from 1"),
        (
            ["--device=h200", "--devices=8", "--fix=mesh.data=3"],
            "--fix=mesh.data=3: 8 devices are not divisible by it; use 2 or 4, or other sizes",
        ),
        (
            ["--device=h200", "--devices=8", "--fix=mesh.data=3", "--explain=mesh.fsdp=2"],
            "--fix=mesh.data=3 --explain=mesh.fsdp=2: 8 devices",
        ),
        (["--device=h200", "--devices=8", "--fix=train.remat=foll"], "use one of none, dots, full"),
        (["--device=h200", "--devices=8", "--fix=mesh.expert=2"], "the model has no experts"),
        (
            ["--device=h200", "--devices=16", "--fix=mesh.tensor=16"],
            "16 is more than the 8 devices",
        ),
        (["--device=h200", "--devices=8", "--output=/"], "use a file in a folder"),
        (["--device=h200", "--devices=8", "--svg=a.svg"], "use --explain as well"),
        (
            ["--device=h200", "--devices=8", "--explain=mesh.tensr=2"],
            "--explain=mesh.tensr=2: unknown",
        ),
        (["--device=h200", "--devices=8", "--tokens=-1"], "--tokens=-1: use 0 or more"),
        (["--device=v5p", "--devices=8", "--compile=1"], "pip install"),
        (["--device=l4", "--devices=2"], "2 l4: no layout fits 22 GB on each; the nearest needs"),
        (["--device=h200", "--devices=8", "--measured=/nowhere"], "cannot be read"),
    ],
)
def test_a_mistake_is_one_line(flags, fault, capsys):
    assert run(*flags) == 2
    error = capsys.readouterr().err
    assert fault in error and error.count("\n") == 1


def test_a_layout_is_taken_apart(tmp_path, capsys):
    drawing = tmp_path / "step.svg"
    keys = "mesh.pipeline=2,mesh.tensor=2,train.num_microbatches=8"
    assert run("--device=h200", "--devices=16", f"--explain={keys}", f"--svg={drawing}") == 0
    output = capsys.readouterr().out
    assert output.startswith("pipeline 2 x ") and "8 x " in output.partition("\n")[0]
    rows = {line.split()[0]: line.split() for line in output.splitlines() if line}
    assert rows["tensor"][1:3] == ["2", "link"] and rows["pipeline"][1:3] == ["2", "network"]
    bars = [line for line in output.splitlines() if "█" in line]
    spans = [(line.index("█"), line.rindex("█") + 1) for line in bars]
    memory = next(n for n, line in enumerate(bars) if "parameters" in line)
    for group in (spans[:memory], spans[memory:]):
        for (_, end), (start, _) in itertools.pairwise(group):
            assert end - 1 <= start <= end  # a short bar still has one column
    root = ElementTree.parse(drawing).getroot()
    assert len(root.findall("{*}rect")) == len(bars) + 1


def test_the_largest_batch_replaces_that_of_the_config(tmp_path, capsys):
    flags = ["--device=h100", "--devices=8", "--largest_batch", "--fix", "train.remat=none"]
    assert run(*flags, f"--output={tmp_path / 'plan.json'}", config="gpt2") == 0
    first = capsys.readouterr().out.splitlines()[0]
    found = re.match(r"train.global_batch=(\d+) is the largest .*: ([\d,]+) rows per device", first)
    num_rows = int(found[2].replace(",", ""))
    assert int(found[1]) == 8 * num_rows and num_rows > 8
    layouts = json.loads((tmp_path / "plan.json").read_text())["layouts"]
    assert {one["overrides"]["train.num_microbatches"] for one in layouts} == {1}


@pytest.mark.parametrize(
    ("batch", "words"), [(1, "1 x 1 rows · remat none"), (8, "1 x 8 rows · remat full")]
)
def test_rows_and_remat_of_a_config_are_chosen_for_another_batch(batch, words, capsys):
    """The config has 8 micro-batches, which the plan replaces; the times are those of the audit."""
    keys = {"data.seq_len": 4096, "optim.moment_dtype": "bfloat16"}
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    assert run("--device=h200", "--devices=1", *flags, batch=batch) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[3].endswith(words)
    expected = {1: 0.372, 8: 2.988}[batch]  # of the compiled step, by measured factors of kernels
    assert float(rows[3].split()[0]) == pytest.approx(expected, rel=0.04)


def test_a_layout_in_words():
    layout = Layout(pipeline=2, fsdp=4, num_microbatches=4, schedule="interleaved", num_chunks=2)
    words = (
        "pipeline 2 x fsdp 4 · zero 3 · 4 x 1 rows · interleaved of 2 chunks, residuals kept · "
        "remat none"
    )
    assert name_of(layout) == words
    narrow = SyncConfig(dtype="int8", pattern="hierarchical")
    words = "data 8 · zero 3 · 1 x 1 rows · remat none · gradients in int8, hierarchical"
    assert name_of(Layout(data=8, sync=narrow)) == words
    assert "gradients" not in name_of(Layout(fsdp=8, sync=narrow))
