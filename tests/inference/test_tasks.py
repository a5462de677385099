"""Tasks of lm-evaluation-harness: the same answers as with plain maths, on any mesh, in any run."""

import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import tokenizers

from meshtrain.cli import app
from meshtrain.config.build import build_model
from meshtrain.config.parse import parse
from meshtrain.errors import ConfigError
from meshtrain.inference import suite, tasks
from meshtrain.inference.scores import Scorer
from meshtrain.inference.task_model import Scored
from meshtrain.train import train
from tests.lib import hf
from tests.lib import tasks as lib
from tests.lib.paths import ROOT


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return lib.Folders(tmp_path_factory.mktemp("tasks"))


class Plain:
    """The answers of the run's model, computed one request at a time on one device."""

    def __init__(self, folders, context=lib.SEQ_LEN):
        self.context = context
        self.encoder = tokenizers.Tokenizer.from_file(str(folders.tokenizer / "tokenizer.json"))
        self.bos = self.encoder.token_to_id("<s>")
        model = build_model(parse(folders.config))
        self.logits = jax.jit(functools.partial(hf.logits, model, folders.params))

    def encode(self, text, special=True):
        special = special and not text.startswith("<s>")
        return self.encoder.encode(text, add_special_tokens=special).ids

    def logits_of(self, ids):
        assert 0 < len(ids) <= self.context
        padded = np.zeros((1, self.context), np.int32)
        padded[0, : len(ids)] = ids
        return np.asarray(self.logits(padded), np.float64)[0, : len(ids)]

    def score(self, before, after):
        """Returns log-likelihood and greediness of the tokens `after`."""
        ids = [*before, *after][-(self.context + 1) :]
        logits = self.logits_of(ids[:-1])[-len(after) :]
        log_z = np.log(np.exp(logits).sum(-1))
        chosen = logits[np.arange(len(after)), after]
        return (chosen - log_z).sum(), bool((logits.argmax(-1) == after).all())

    def log_likelihood(self, context, continuation):
        """Where a context ends with spaces, they belong to the continuation."""
        if not context:
            return self.score([self.bos], self.encode(continuation, special=False))
        stripped = context.rstrip()
        before = self.encode(stripped)
        whole = self.encode(stripped + context[len(stripped) :] + continuation)
        return self.score(before, whole[len(before) :])

    def rolling(self, text):
        """Every token after BOS, with as much context as there is for the last of its window."""
        ids = [self.bos, *self.encode(text)]
        total = 0.0
        start = 1
        while start < len(ids):
            end = min(start + self.context, len(ids))
            total += self.score(ids[max(0, end - self.context - 1) : start], ids[start:end])[0]
            start = end
        return total

    def write(self, text, until, length):
        ids = self.encode(text)[-(self.context - length) :]
        new = []
        while len(new) < length:
            new.append(int(self.logits_of([*ids, *new])[-1].argmax()))
            if new[-1] == self.encoder.token_to_id("<|endoftext|>"):
                break
        written = self.encoder.decode(new)
        for stop in until:
            written = written.split(stop)[0]
        return written


def run_verb(*arguments, capsys):
    capsys.readouterr()
    code = app.main("evaluate", [*map(str, arguments)])
    output = capsys.readouterr()
    return code, output.out, output.err


def recorded(monkeypatch):
    """Returns the list to which the requests of the harness and their answers are added."""
    requests = []

    def record(model, real=suite._language_model):
        language_model = real(model)
        for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
            answer = getattr(language_model, name)

            def call(asked, *, name=name, answer=answer):
                answers = answer(asked)
                for one, new in zip(asked, answers, strict=True):
                    requests.append((name, one.args, new))
                return answers

            setattr(language_model, name, call)
        return language_model

    monkeypatch.setattr(suite, "_language_model", record)
    return requests


def assert_answers_of_plain_maths(requests, plain, atol=2e-5):
    for name, arguments, answer in requests:
        if name == "loglikelihood":
            logprob, is_greedy = plain.log_likelihood(*arguments)
            assert answer[0] == pytest.approx(logprob, abs=atol)
            assert answer[1] == is_greedy
        elif name == "loglikelihood_rolling":
            assert answer == pytest.approx(plain.rolling(*arguments), abs=20 * atol)
        else:
            text, settings = arguments
            length = settings["max_gen_toks"]
            assert answer == plain.write(text, settings["until"], length)


LAYOUTS = [
    ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"],
    pytest.param(["mesh.fsdp=8"], marks=pytest.mark.slow),
    pytest.param(
        ["mesh.pipeline=2", "mesh.data=2", "mesh.fsdp=2", "train.num_microbatches=2"],
        marks=pytest.mark.slow,
    ),
    pytest.param(["mesh.context=4", "mesh.data=2", "mesh.fsdp=1"], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tasks_have_the_answers_of_plain_maths(layout, folders, tmp_path, monkeypatch, capsys):
    requests = recorded(monkeypatch)
    flags = [f"--config.{one}" for one in layout]
    output = tmp_path / "results" / "one.json"
    code, out, err = run_verb(
        *folders.flags,
        *flags,
        "--tasks=all_three",
        "--batch=8",
        "--num_fewshot=1",
        f"--output={output}",
        capsys=capsys,
    )
    assert code == 0, err
    plain = Plain(folders)
    assert_answers_of_plain_maths(requests, plain)
    names = [name for name, _, _ in requests]
    assert {name: names.count(name) for name in names} == {
        "loglikelihood": 28,
        "loglikelihood_rolling": 7,
        "generate_until": 7,
    }

    # The results are what the harness makes of these answers.
    results = json.loads(output.read_text())["results"]
    documents = lib.documents()
    chosen = np.array([answer[0] for name, _, answer in requests if name == "loglikelihood"])
    labels = [one["label"] for one in documents]
    accuracy = np.mean(chosen.reshape(-1, 4).argmax(-1) == labels)
    assert results["choice"]["acc,none"] == pytest.approx(accuracy)
    bits = -sum(answer for name, _, answer in requests if name == "loglikelihood_rolling")
    bits /= math.log(2) * sum(len(one["text"]) for one in documents)
    assert results["rolling"]["bits_per_byte,none"] == pytest.approx(bits)
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["task", "metric", "value", "stderr", "questions"]
    assert ["choice", "acc", f"{accuracy:.4f}"] == rows[1][:3] and rows[1][4] == "7"
    assert ["rolling", "bits_per_byte", f"{bits:.4f}", "7"] in rows


@pytest.mark.parametrize(
    ("flags", "first"),
    [
        ([], "Q: {own}\nA:"),
        (["--num_fewshot=1"], "Q: {other}\nA: {answer}\n\nQ: {own}\nA:"),
        (
            ["--num_fewshot=1", "--apply_chat_template"],
            "[user]Q: {other}\nA:\n[assistant]{answer}\n[user]Q: {own}\nA:\n[assistant]",
        ),
        (
            ["--num_fewshot=1", "--apply_chat_template", "--no-fewshot_as_multiturn"],
            "[user]Q: {other}\nA: {answer}\n\nQ: {own}\nA:\n[assistant]",
        ),
    ],
)
def test_questions_have_examples_and_a_chat_template(flags, first, folders, monkeypatch, capsys):
    asked = []

    def answer(self, requests, name):
        return [Scored(0.0, False)] * len(requests)

    monkeypatch.setattr(tasks.TaskModel, "log_likelihoods", answer)

    def record(model, real=suite._language_model):
        language_model = real(model)

        def call(requests, answer=language_model.loglikelihood):
            asked.extend(request.args for request in requests)
            return answer(requests)

        language_model.loglikelihood = call
        return language_model

    monkeypatch.setattr(suite, "_language_model", record)
    code, _, err = run_verb(*folders.flags, "--tasks=choice", "--limit=1", *flags, capsys=capsys)
    assert code == 0, err
    documents = lib.documents()
    own = documents[0]
    pattern = re.escape(first).replace(r"\{own\}", re.escape(own["question"]))
    others = {one["question"]: one["choices"][one["label"]] for one in documents[1:]}
    pattern = pattern.replace(r"\{other\}", "(?P<other>.*)").replace(
        r"\{answer\}", "(?P<answer>.*)"
    )
    found = re.fullmatch(pattern, asked[0][0])
    assert found, asked[0][0]
    if "other" in found.groupdict():
        assert others[found["other"]].strip() == found["answer"].strip()
    spaces = "" if "--apply_chat_template" in flags else " "
    assert [after.strip() for _, after in asked] == own["choices"]
    assert asked[0][1] in (spaces + own["choices"][0], " " + own["choices"][0])


def test_files_have_the_bits_per_byte_of_plain_maths(folders, tmp_path, capsys):
    texts = [one["text"] for one in lib.documents(2)]
    texts[0] += " " + texts[1]
    files = [tmp_path / f"{number}.txt" for number in range(2)]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    flags = [f"--files={file}" for file in files]
    code, out, err = run_verb(*folders.flags[:2], *flags, "--stride=11", capsys=capsys)
    assert code == 0, err
    plain = Plain(folders)
    expected = []
    for text in texts:
        ids = [plain.bos, *plain.encode(text, special=False)]
        total = 0.0
        # Each token after the first window follows at least context - stride others.
        for number in range(1, len(ids)):
            window = max(0, -(-(number - plain.context) // 11))
            last = min(plain.context + 11 * window, len(ids) - 1)
            begin = max(0, last - plain.context)
            total += plain.score(ids[begin:number], ids[number : number + 1])[0]
        expected.append(-total / math.log(2))
    lines = out.splitlines()
    assert len(lines) == 3
    for line, file, bits, text in zip(lines, files, expected, texts, strict=False):
        assert line.startswith(str(file))
        assert float(re.search(r"([\d.]+) bits", line)[1]) == pytest.approx(
            bits / len(text), abs=1e-5
        )
    total = sum(expected) / sum(map(len, texts))
    assert float(re.search(r"([\d.]+) bits", lines[2])[1]) == pytest.approx(total, abs=1e-5)


def test_an_interrupted_evaluation_continues(folders, tmp_path, monkeypatch, capsys):
    flags = [*folders.flags, "--tasks=choice", "--batch=4", f"--cache={tmp_path / 'answers'}"]
    num_batches = []
    real = Scorer._score_batch

    def score(self, *arguments):
        if len(num_batches) == 2 and not (tmp_path / "ended").exists():
            (tmp_path / "ended").touch()
            raise KeyboardInterrupt
        num_batches.append(1)
        return real(self, *arguments)

    monkeypatch.setattr(Scorer, "_score_batch", score)
    with pytest.raises(KeyboardInterrupt):
        run_verb(*flags, capsys=capsys)
    assert len(num_batches) == 2
    code, first, _ = run_verb(*flags, capsys=capsys)
    complete = len(num_batches)
    assert code == 0
    # Nothing is computed again, and the results are the same.
    assert run_verb(*flags, capsys=capsys)[1] == first
    assert len(num_batches) == complete
    # Another model does not get these answers.
    other = lib.config(train={"seed": 1})
    train(other, workdir=tmp_path / "other")
    _, different, _ = run_verb(f"--workdir={tmp_path / 'other'}", *flags[1:], capsys=capsys)
    assert len(num_batches) > complete
    num_batches.clear()
    uncached = run_verb(f"--workdir={tmp_path / 'other'}", *flags[1:-1], capsys=capsys)[1]
    assert uncached == different


# ---- faults ----


def faulty_tasks(folder):
    """Writes tasks that would run code, which leaves a file `ran`."""
    lib.write_tasks(folder)
    code = f"open({str(folder / 'ran')!r}, 'w').close()\ndef process(docs): return docs\n"
    (folder / "code.py").write_text(code)
    choice = {"include": "choice.yaml"}
    lib.write_task(folder, "function", choice, "process_docs: !function code.process\n")
    lib.write_task(folder, "includes", {"include": "function.yaml"})
    lib.write_task(folder, "system", choice, "process_docs: !function os.system\n")
    lib.write_task(folder, "python_name", choice, "process_docs: !!python/name:os.system\n")
    (folder / "class.yaml").write_text("task: class\nclass: !function code.process\n")
    metric = [{"metric": "code", "aggregation": "mean", "higher_is_better": True}]
    lib.write_task(folder, "metric", {**choice, "metric_list": metric})
    loaded = [{"metric": "exact_match", "hf_evaluate": True}]
    lib.write_task(folder, "evaluated", {**choice, "metric_list": loaded})
    lib.write_task(folder, "script", {**choice, "dataset_path": str(folder / "code.py")})
    scripts = folder / "scripts"
    scripts.mkdir()
    (scripts / "scripts.py").write_text(code)
    lib.write_task(folder, "folder", {**choice, "dataset_path": str(scripts)})
    lib.write_task(folder, "pickle", {**choice, "dataset_path": "pandas"})
    remote = {"data_files": "x.json", "trust_remote_code": True}
    lib.write_task(folder, "remote", {**choice, "dataset_kwargs": remote})
    (folder / "grouped.yaml").write_text("group: grouped\ntask: [choice, function]\n")
    lib.write_task(folder, "tagged", {**choice, "tag": "some"}, "process_docs: !function code.f\n")
    inline = "group: inline\ntask:\n- task: choice\n  process_docs: !function code.process\n"
    (folder / "inline.yaml").write_text(inline)
    escape = "{{ cycler.__init__.__globals__.os.system('touch %s') }}" % (folder / "ran")
    lib.write_task(folder, "template", {**choice, "doc_to_text": escape})
    return folder


CODE = {
    "function": "function.yaml: line 3: !function code.process: is code; read the code, then add",
    "includes": "function.yaml: line 3: !function code.process: is code",
    "system": "system.yaml: line 3: !function os.system: is code",
    "python_name": "python_name.yaml: cannot be read as YAML: could not determine a constructor",
    "class": "class.yaml: line 2: !function code.process: is code",
    "metric": "metric.yaml: metric code is none of the harness",
    "evaluated": "evaluated.yaml: metric exact_match is none of the harness",
    "script": "script.yaml: dataset_path .*code.py is a script",
    "folder": "folder.yaml: dataset_path .*scripts is a script",
    "pickle": "pickle.yaml: dataset_path pandas is none of json, csv",
    "remote": "remote.yaml: dataset_kwargs has trust_remote_code",
    "grouped": "function.yaml: line 3: !function code.process: is code",
    "some": "tagged.yaml: line 4: !function code.f: is code",
    "inline": "inline.yaml: line 4: !function code.process: is code",
    "template": "--tasks=template: cannot be loaded: SecurityError",
    "choice,func*": "function.yaml: line 3: !function code.process: is code",
    "FOLDER/function.yaml": "function.yaml: line 3: !function code.process: is code",
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory, folders):
    return faulty_tasks(tmp_path_factory.mktemp("faulty") / "tasks")


@pytest.mark.parametrize("names", CODE)
def test_code_of_a_task_does_not_run_unless_it_is_trusted(names, faulty, folders, capsys):
    tasks = names.replace("FOLDER", str(faulty))
    flags = [*folders.flags[:2], f"--include_path={faulty}", f"--tasks={tasks}"]
    code, out, err = run_verb(*flags, capsys=capsys)
    assert (code, out) == (2, "")
    assert re.search(CODE[names], err) and "Traceback" not in err
    assert not (faulty / "ran").exists()


def test_trusted_code_of_a_task_runs(folders, tmp_path, capsys):
    faulty = faulty_tasks(tmp_path / "tasks")
    flags = [*folders.flags[:2], f"--include_path={faulty}", "--tasks=function", "--limit=1"]
    code, out, err = run_verb(*flags, "--trust_code", capsys=capsys)
    assert code == 0, err
    assert "function" in out and (faulty / "ran").exists()


def test_tasks_of_the_harness_are_no_code_of_others(folders):
    """Those of hellaswag are functions in the installed package."""
    import lm_eval.tasks

    folder = os.path.dirname(lm_eval.tasks.__file__)
    manager = lm_eval.tasks.TaskManager(include_path=f"{folder}/hellaswag", include_defaults=False)
    from meshtrain.inference import task_files

    (file,) = task_files._files_of(["hellaswag"], manager.task_index).values()
    assert file.config["process_docs"] == "utils.process_docs"
    assert task_files._code_faults(file) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tasks=choicce"], "--tasks=choicce: is no task (did you mean"),
        (["--tasks=choice,,"], "has an empty name"),
        (["--tasks=choice", "--limit=0"], "--limit=0: use a number of questions"),
        (["--tasks=choice", "--limit=1.5"], "--limit=1.5: use an integer"),
        (["--tasks=choice", "--num_fewshot=-1"], "--num_fewshot=-1: use 0 or more"),
        (["--tasks=choice", "--include_path=nowhere"], "--include_path=nowhere: is no folder"),
        (["--tasks=choice", "--context=0"], "--context=0"),
        (["--files=nowhere.txt"], "--files=nowhere.txt: cannot be read as UTF-8 text: No such"),
        (["--files=README.md", "--stride=65"], "--stride=65: is more than the 64 tokens"),
        (["--files=README.md", "--stride=0"], "--stride=0"),
        (["--files=README.md", "--output=/proc/x"], "--output=/proc/x"),
        (["--tasks=choice", "--output=docs"], "--output=docs: is a folder; use a file"),
        (["--files=README.md", "--cache=docs"], "--cache=docs: is a folder; use a file"),
    ],
)
def test_a_fault_is_one_line(flags, message, folders, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tasks, "restore_params", None)  # nothing is restored before
    given = folders.flags if flags[0].startswith("--tasks") else folders.flags[:2]
    code, out, err = run_verb(*given, *flags, capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_what_a_generation_config_sets_is_followed_or_named(folders, tmp_path, monkeypatch, capsys):
    workdir = tmp_path / "run"
    shutil.copytree(folders.workdir, workdir)
    file = workdir / "generation_config.json"
    flags = [f"--workdir={workdir}", *folders.flags[1:], "--limit=3"]
    requests = recorded(monkeypatch)
    # The task asks for 9 tokens.
    for length in (2, 12):
        file.write_text(json.dumps({"max_new_tokens": length, "min_new_tokens": 6}))
        code, _, err = run_verb(*flags, "--tasks=writing", capsys=capsys)
        assert code == 0, err
        notes = [line for line in err.splitlines() if line.startswith(str(file))]
        assert notes == [
            f"{file}: min_new_tokens=6: is not supported, ignored",
            f"{file}: max_new_tokens={length}: replaces max_gen_toks of tasks, as in transformers",
        ]
        plain = Plain(folders)
        for _, (text, settings), answer in requests:
            assert answer == plain.write(text, settings["until"], length)
        assert len(requests) == 3
        requests.clear()
    # A task without texts has nothing to do with them.
    assert str(file) not in run_verb(*flags, "--tasks=choice", capsys=capsys)[2]


UNUSED = {
    "": [
        "--limit=2",
        "--limit=0",
        "--num_fewshot=1",
        "--num_fewshot=0",
        "--include_path=docs",
        "--apply_chat_template",
        "--no-bos",
        "--cache=x",
        "--context=8",
    ],
    "--files=README.md": [
        "--num_fewshot=0",
        "--limit=1",
        "--include_path=docs",
        "--apply_chat_template",
        "--bos",
        "--split=heldout",
        "--max_batches=0",
    ],
    "--tasks=choice": [
        "--stride=8",
        "--split=all",
        "--max_batches=2",
        "--no-fewshot_as_multiturn",
        "--fewshot_as_multiturn",
    ],
}


@pytest.mark.parametrize(
    ("evaluated", "flag"), [(one, flag) for one, flags in UNUSED.items() for flag in flags]
)
def test_a_flag_without_effect_is_one_line(evaluated, flag, folders, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    given = [folders.flags[0], *filter(None, [evaluated]), flag]
    code, out, err = run_verb(*given, capsys=capsys)
    name = flag.partition("=")[0].replace("--no-", "--")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{name}: " in err


def test_texts_of_tasks_and_files_share_a_command(folders, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    flags = ["--tasks=choice", "--files=LICENSE", "--stride=64", "--limit=1", "--no-bos"]
    code, out, err = run_verb(*folders.flags, *flags, capsys=capsys)
    assert code == 0, err
    assert "LICENSE" in out and "choice" in out


def test_a_file_that_cannot_be_read_is_named(folders, tmp_path, capsys):
    (tmp_path / "broken.yaml").write_text("task: [broken\n")
    flags = [*folders.flags[:2], f"--include_path={tmp_path}", "--tasks=broken"]
    code, _, err = run_verb(*flags, capsys=capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert f"{tmp_path / 'broken.yaml'}: cannot be read as YAML" in err
    (tmp_path / "other.yaml").write_text("task: [within\n")
    code, _, err = run_verb(*flags[:-1], "--tasks=within", capsys=capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert f"{tmp_path / 'other.yaml'}: cannot be read as YAML" in err
    # They have nothing to do with another name.
    code, _, err = run_verb(*flags[:-1], "--tasks=nothere", capsys=capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert "--tasks=nothere: is no task" in err


def test_without_the_extra_a_line_names_it(folders, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, _, err = run_verb(*folders.flags, "--tasks=choice", capsys=capsys)
    assert code == 2
    assert "the package lm_eval is missing" in err and "setup.sh evals" in err


def test_a_prompt_needs_room(folders, capsys):
    flags = [*folders.flags, "--tasks=writing", "--context=9"]
    code, _, err = run_verb(*flags, capsys=capsys)
    assert code == 2 and err.count("\n") == 1
    assert "max_gen_toks=9 leaves no room for a prompt in the 9 tokens" in err


# ---- during training ----


def training(folders, tmp_path, **evaluation):
    """Returns the config of a run whose text has the tokenizer, and that evaluates tasks."""
    prepared = tmp_path / "prepared"
    if not prepared.exists():
        (tmp_path / "text.txt").write_text(" ".join(one["text"] for one in lib.documents(60)))
        arguments = [
            tmp_path / "text.txt",
            f"--output={prepared}",
            f"--tokenizer={folders.tokenizer}",
        ]
        assert app.main("prepare", [*map(str, arguments)]) == 0
    c = lib.config(
        train={"steps": 4, "global_batch": 8},
        data={"build": "meshtrain.data.tokens:build", "path": str(prepared)},
        eval={"tasks": "choice,writing", "tasks_path": str(folders.tasks), **evaluation},
    )
    c.optim.learning_rate = 1e-2
    return c


def test_a_run_evaluates_tasks(folders, tmp_path, capsys):
    c = training(folders, tmp_path, every=1, batches=1, tasks_every=2, tasks_limit=5.0)
    rows = []
    train(c, workdir=tmp_path / "run", on_metrics=rows.append)
    out = capsys.readouterr().out
    names = {"eval/choice/acc", "eval/choice/acc_norm", "eval/writing/exact_match"}
    evaluated = {row["step"]: row for row in rows if names & row.keys()}
    assert [*evaluated] == [2, 4]
    assert [row["step"] for row in rows if "eval_loss" in row] == [1, 2, 3, 4]
    assert all(names <= row.keys() for row in evaluated.values())
    written = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in written] == json.loads(json.dumps(rows))
    assert "tasks       step 4: choice acc 0." in out
    # The verb says the same of the last checkpoint.
    flags = [f"--workdir={tmp_path / 'run'}", *folders.flags[2:], "--tasks=choice,writing"]
    output = tmp_path / "results.json"
    code, _, err = run_verb(*flags, "--limit=5", f"--output={output}", capsys=capsys)
    assert code == 0, err
    results = json.loads(output.read_text())["results"]
    for name in names:
        _, task, metric = name.split("/")
        assert evaluated[4][name] == pytest.approx(results[task][f"{metric},none"])
    from meshtrain.tools.report.read import Metrics

    metrics = Metrics()
    metrics.add([{**row, "skipped": 1.0} for row in rows])
    steps, values = metrics.columns()["eval/choice/acc"]
    assert steps.tolist() == [2, 4]
    assert values.tolist() == [evaluated[step]["eval/choice/acc"] for step in (2, 4)]


def test_a_run_stops_within_the_evaluation_of_tasks(folders, tmp_path):
    c = training(folders, tmp_path)
    asked = []

    def stop_requested():
        asked.append(1)
        return True

    from meshtrain.config.build import RunParts, optimizer_builder
    from meshtrain.program import assemble

    c.train.global_batch = 8
    c.eval.tasks = "choice"
    cfg = parse(c, num_devices=8)
    model = build_model(cfg)
    program = assemble(cfg, RunParts(model, optimizer_builder(cfg, model)))
    measure = tasks.make_task_metrics(cfg, program, None, stop_requested=stop_requested)
    assert measure(program.initial_state(0)) is None
    assert asked == [1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": "choicce"}, "eval.tasks=choicce: is no task"),
        ({"tasks": "choice,"}, "eval.tasks=choice,: use names, with commas between"),
        ({"tasks_path": "nowhere"}, "eval.tasks_path=.*nowhere: is no folder"),
        ({"tasks": "", "tasks_every": 5}, "eval.tasks_every=5: there are no tasks"),
        ({"tasks": ""}, "eval.tasks_path=.*: there are no tasks"),
        (
            {"tasks": "", "tasks_path": "", "tasks_limit": 2.0},
            "eval.tasks_limit=2.0: there are no tasks; set eval.tasks=NAMES",
        ),
        ({"tasks": "", "tasks_path": "", "tasks_fewshot": 0}, "eval.tasks_fewshot=0: there are no"),
        (
            {"tasks": "", "tasks_path": "", "tasks_chat_template": True},
            "eval.tasks_chat_template=True: there are no tasks",
        ),
        ({"tasks_fewshot": -2}, "eval.tasks_fewshot=-2"),
    ],
)
def test_a_fault_of_the_tasks_is_reported_before_the_run_begins(
    settings, message, folders, tmp_path
):
    c = training(folders, tmp_path, **settings)
    with pytest.raises(ConfigError, match=message):
        train(c, workdir=tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_run_trusts_code_if_its_caller_does(folders, tmp_path):
    faulty = faulty_tasks(tmp_path / "tasks")
    c = training(folders, tmp_path, tasks="function", tasks_path=str(faulty), tasks_limit=1.0)
    c.train.steps = 0
    with pytest.raises(ConfigError, match="function.yaml: line 3: !function code.process: is code"):
        train(c)
    assert not (faulty / "ran").exists()
    train(c, trust_code=True)
    assert (faulty / "ran").exists()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_print_the_same_as_one(folders, capsys):
    flags = [*folders.flags, "--tasks=all_three", "--batch=8", "--config.mesh.tensor=2"]
    command = [sys.executable, "-m", "meshtrain", "launch", "--nproc=2", "--simulate_devices=2"]
    done = subprocess.run(
        [*command, "--", "evaluate", *flags],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [line[4:] for line in done.stdout.splitlines() if line.startswith("[0] ")]
    alone = run_verb(*flags, capsys=capsys)[1].splitlines()
    assert alone == [line for line in printed if line in alone]
