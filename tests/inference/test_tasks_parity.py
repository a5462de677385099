"""Tasks have the results of lm-evaluation-harness's own backend for transformers."""

import json

import numpy as np
import pytest
import yaml

from meshtrain.cli import app
from meshtrain.inference import suite
from tests.lib import hf
from tests.lib import tasks as lib


def imports():
    torch = pytest.importorskip("torch", reason="needs torch, which no extra installs")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="needs accelerate, for the harness's backend")
    pytest.importorskip("lm_eval", reason="needs the extra `evals`")
    return torch, transformers


def write_model(folder, family, tokenizer):
    """Writes a random model with the files of a tokenizer."""
    torch, transformers = imports()
    torch.manual_seed(1)
    size = {"vocab_size": lib.VOCAB_SIZE, "initializer_range": 0.2}
    if family == "gpt2":
        layers = {"n_positions": lib.SEQ_LEN, "n_embd": 32, "n_layer": 2, "n_head": 4}
        config = transformers.GPT2Config(**size, **layers, eos_token_id=0, bos_token_id=0)
        model = transformers.GPT2LMHeadModel(config)
    else:
        layers = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": lib.SEQ_LEN,
        }
        config = transformers.LlamaConfig(**size, **layers, eos_token_id=0, bos_token_id=1)
        model = transformers.LlamaForCausalLM(config)
    # Penalties of the file apply to greedy texts too.
    model.generation_config.repetition_penalty = 1.1
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((tokenizer / name).read_text())


def record(language_model):
    """Returns the list to which requests and answers of the harness are added."""
    requests = []
    for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        answer = getattr(language_model, name)

        def call(asked, *, name=name, answer=answer, **options):
            answers = answer(asked, **options)
            for one, new in zip(asked, answers, strict=True):
                requests.append((name, one.args, new))
            return answers

        setattr(language_model, name, call)
    return requests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("llama", []),
        ("llama", ["--num_fewshot=3"]),  # longer than the context
        ("llama", ["--num_fewshot=1", "--apply_chat_template"]),
        ("gpt2", ["--num_fewshot=1", "--batch=5"]),
    ],
)
def test_results_equal_those_of_the_backend_for_transformers(
    family, flags, tmp_path, monkeypatch, capsys
):
    imports()
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tokenizer = lib.tokenizer(tmp_path / "tokenizer")
    tasks = lib.write_tasks(tmp_path / "tasks")
    folder = tmp_path / "model"
    write_model(folder, family, tokenizer)
    theirs_lm = HFLM(pretrained=str(folder), device="cpu", batch_size=3, dtype="float32")
    # Contexts that end with spaces, are empty, or begin within a word.
    for name, changed in {
        "spaces": {"doc_to_text": "{{question}}  ", "target_delimiter": ""},
        "empty": {"doc_to_text": "", "target_delimiter": ""},
        "inside": {"doc_to_text": "{{question}}", "target_delimiter": ""},
    }.items():
        task = {"include": "choice.yaml", "task": name, **changed}
        (tasks / f"{name}.yaml").write_text(yaml.safe_dump(task))
    names = ["choice", "rolling", "writing", "spaces", "empty", "inside"]

    theirs = record(theirs_lm)
    fewshot = [int(flag.partition("=")[2]) for flag in flags if flag.startswith("--num_fewshot")]
    expected = evaluator.simple_evaluate(
        model=theirs_lm,
        tasks=names,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        num_fewshot=fewshot[0] if fewshot else None,
        apply_chat_template="--apply_chat_template" in flags,
        fewshot_as_multiturn=True,
    )["results"]

    hf.run(folder, tmp_path / "run")
    ours = []

    def recorded(model, real=suite._language_model):
        language_model = real(model)
        ours.append(record(language_model))
        return language_model

    monkeypatch.setattr(suite, "_language_model", recorded)
    output = tmp_path / "results.json"
    arguments = [
        f"--workdir={tmp_path / 'run'}",
        f"--include_path={tasks}",
        f"--tasks={','.join(names)}",
        f"--output={output}",
        *flags,
    ]
    assert app.main("evaluate", arguments) == 0, capsys.readouterr().err
    found = json.loads(output.read_text())["results"]

    (requests,) = ours
    assert len(requests) == len(theirs)
    for (name, asked, answer), (their_name, their_asked, their_answer) in zip(
        requests, theirs, strict=True
    ):
        assert (name, asked) == (their_name, their_asked)
        if name == "loglikelihood":
            np.testing.assert_allclose(answer[0], their_answer[0], atol=1e-4)
            assert answer[1] == their_answer[1]
        elif name == "loglikelihood_rolling":
            # They add up float32 numbers.
            np.testing.assert_allclose(answer, their_answer, rtol=1e-6, atol=1e-4)
        else:
            assert answer == their_answer
    for task in names:
        for metric, value in expected[task].items():
            if isinstance(value, float):
                assert found[task][metric] == pytest.approx(value, rel=1e-5), (task, metric)
