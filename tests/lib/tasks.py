"""A run without training, its tokenizer, and tasks of lm-evaluation-harness in YAML files."""

import json

import jax
import numpy as np
import pytest
import yaml

from meshtrain.train import train
from tests.lib.configs import tiny_config
from tests.lib.prepare import hugging_face

SEQ_LEN = 64
VOCAB_SIZE = 384
WORDS = "the of and a sun moon water fire stone river green blue old new".split()
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] | trim }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def config(**sections):
    """Returns the config of a tiny model whose tokens are random, with a seed of its own."""
    c = tiny_config()
    c.train.steps = 0
    c.train.global_batch = 8
    c.model.vocab_size = VOCAB_SIZE
    c.data.seq_len = SEQ_LEN
    c.eval.batches = 0
    for name, values in sections.items():
        c[name].update(values)
    return c


def tokenizer(folder):
    """Writes a tokenizer whose texts begin with <s>, and a chat template; returns the folder."""
    folder.mkdir()
    file = hugging_face(folder)
    content = json.loads(file.read_text())
    number = 1 + max(content["model"]["vocab"].values())
    mark = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"].append({"id": number, "content": "<s>", "special": True, **mark})
    first = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [number], "tokens": ["<s>"]}},
    }
    file.write_text(json.dumps(content))
    settings = {"bos_token": "<s>", "eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def documents(count=7):
    """Returns questions with four choices each, of one or more tokens."""
    random = np.random.default_rng(0)

    def words(low, high):
        return " ".join(random.choice(WORDS, random.integers(low, high)))

    return [
        {
            "question": words(2, 9),
            "choices": [words(1, 2), words(3, 5), "a", "b"],
            "label": number % 4,
            "text": words(20, 90),
        }
        for number in range(count)
    ]


def write_tasks(folder):
    """Writes the tasks `choice`, `rolling`, `writing` and the group `all_three`."""
    folder.mkdir()
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in documents()))
    base = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(data)}},
        "validation_split": "validation",
        "fewshot_split": "validation",
        "doc_to_text": "Q: {{question}}\nA:",
        "doc_to_target": "{{label}}",
    }
    mean = {"aggregation": "mean", "higher_is_better": True}
    write_task(folder, "base", base)
    write_task(
        folder,
        "choice",
        {
            "include": "base.yaml",
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "metric_list": [{"metric": "acc", **mean}, {"metric": "acc_norm", **mean}],
        },
    )
    write_task(
        folder,
        "rolling",
        {
            "include": "base.yaml",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "bits_per_byte"}, {"metric": "byte_perplexity"}],
        },
    )
    write_task(
        folder,
        "writing",
        {
            "include": "base.yaml",
            "output_type": "generate_until",
            "doc_to_target": "{{choices[1]}}",
            "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 9},
            "metric_list": [{"metric": "exact_match", **mean}],
        },
    )
    group = {"group": "all_three", "task": ["choice", "rolling", "writing"]}
    (folder / "all_three.yaml").write_text(yaml.safe_dump(group))
    return folder


def write_task(folder, name, content, text=""):
    """Writes a task; `text` are further lines of its file."""
    task = {} if name == "base" else {"task": name}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({**task, **content}) + text)


class Folders:
    """The folders of a run, of its tokenizer and of tasks; `flags` are those of the verb."""

    def __init__(self, root):
        pytest.importorskip("lm_eval", reason="needs the extra `evals`")
        self.root = root
        self.workdir = root / "run"
        self.tokenizer = tokenizer(root / "tokenizer")
        self.tasks = write_tasks(root / "tasks")
        self.config = config()
        self.params = jax.device_get(train(self.config, workdir=self.workdir).state.params)
        self.flags = [
            f"--workdir={self.workdir}",
            f"--tokenizer={self.tokenizer}",
            f"--include_path={self.tasks}",
        ]
