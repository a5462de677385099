"""Conversations: texts and tokens as transformers has them, and rows of complete ones.

Weights are on what the assistant says.

chat/ has what transformers computes; make_chat_golden.py wrote it.
"""

import datetime
import io
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from meshtrain.cli import app
from meshtrain.data import chat, chat_template, conversations
from meshtrain.data import tokenizer as tokenizers
from meshtrain.errors import ConfigError
from meshtrain.inference import chat as chat_prompts
from meshtrain.train import train
from tests.lib.configs import tiny_config

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")
GOLDEN = Path(__file__).parent / "chat"
FOUND = json.loads((GOLDEN / "golden.json").read_text())
CONVERSATIONS = [
    conversations.Conversation(one["messages"], 0, one.get("tools"))
    for one in FOUND["conversations"]
]
NAMES = sorted(FOUND["templates"])


def put(folder, template, **settings):
    """Writes a tokenizer's folder with a chat template."""
    folder.mkdir(exist_ok=True)
    shutil.copy(GOLDEN / "tokenizer.json", folder)
    found = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**found, "chat_template": template, **settings})
    )
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: put(root / name, FOUND["templates"][name]) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_text_and_tokens_are_those_of_transformers(name, folders):
    template = chat_template.load(folders[name])
    encode = conversations.reply_encoder(folders[name] / "tokenizer.json")
    for one, texts, ids in zip(
        CONVERSATIONS, FOUND["texts"][name], FOUND["ids"][name], strict=True
    ):
        if texts is None:
            with pytest.raises(ValueError, match="the chat template rejects it: "):
                template.render(one.messages, one.tools)
            continue
        rendered = [template.render(one.messages, one.tools, flag).text for flag in (False, True)]
        assert rendered == texts
        assert encode(rendered[:1])[0][0].tolist() == ids


def conversations_in(path):
    lines = path.read_bytes().splitlines()
    return [conversations.parse(line) for line in lines if line.strip()]


def learned(folder, one):
    """Returns the learned parts of a conversation's text, and whether each token is learned."""
    text, spans = conversations.render(chat_template.load(folder), one)
    ((_, offsets),) = conversations.reply_encoder(folder / "tokenizer.json")([text])
    return [text[first:last] for first, last in spans], conversations.is_inside(
        offsets, spans
    ).astype(int)


def test_what_generation_blocks_mark_is_learned_as_in_transformers(folders):
    masks = 0
    for one, mask in zip(CONVERSATIONS, FOUND["masks"], strict=True):
        if any(mask):
            assert learned(folders["marked"], one)[1].tolist() == mask
            masks += 1
    assert masks == 5


def test_without_such_blocks_the_replies_and_their_ends_are_learned(folders):
    two = CONVERSATIONS[2]
    assert learned(folders["chatml"], two)[0] == ["Hello<|im_end|>\n", "See you<|im_end|>\n"]
    assert learned(folders["llama3"], two)[0] == ["Hello<|eot_id|>", "See you<|eot_id|>"]
    user = two._replace(messages=two.messages[1:])
    assert learned(folders["gemma"], user)[0] == ["Hello<end_of_turn>\n", "See you<end_of_turn>\n"]
    assert learned(folders["mistral"], user)[0] == [" Hello</s>", " See you</s>"]
    call, reply = learned(folders["chatml"], CONVERSATIONS[5])[0]
    assert call.startswith("<tool_call>") and reply == "4 m²<|im_end|>\n"


@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_replies_in_a_prompt_are_not_learned(name, folders):
    one = CONVERSATIONS[2]._replace(first_reply=4)
    end = "\n" if name == "chatml" else ""
    assert learned(folders[name], one)[0] == [f"See you<|im_end|>{end}"]


@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_a_message_of_weight_0_is_not_learned(name, folders, tmp_path):
    roles = ["user", "assistant"] * 3
    messages = [{"role": role, "content": f"{n}"} for n, role in enumerate(roles)]
    messages[1]["weight"], messages[3]["weight"], messages[4]["weight"] = 1, 0, 0
    end = "\n" if name == "chatml" else ""
    line = {"messages": messages, "tools": None, "id": None}
    path = write(tmp_path / "a.jsonl", [json.dumps(line)])
    (one,) = conversations_in(path)
    assert learned(folders[name], one)[0] == [f"{n}<|im_end|>{end}" for n in (1, 5)]
    source = build(path, folders[name], heldout=0.0)
    without = [{key: m[key] for key in ("role", "content")} for m in messages]
    all_learned = build(
        write(tmp_path / "b.jsonl", [json.dumps({"messages": without})]), folders[name], heldout=0.0
    )
    index = np.arange(1)
    assert source.read(index).tokens.tolist() == all_learned.read(index).tokens.tolist()
    shares = [batch.weights.sum() for batch in (source.read(index), all_learned.read(index))]
    assert shares[0] * 3 == shares[1] * 2


def test_an_empty_list_of_tools_is_what_the_template_gets(tmp_path):
    line = {"messages": CONVERSATIONS[2].messages, "tools": []}
    one = conversations.parse(json.dumps(line).encode())
    text = "{{ 'none' if tools is none else tools | length }}{% for m in messages %}{% endfor %}"
    template = chat_template.load(put(tmp_path / "t", text))
    assert template.render(one.messages, one.tools).text == "0"
    assert template.render(one.messages).text == "none"


def test_a_template_may_make_dicts(tmp_path):
    text = "{{ dict.fromkeys(['a', 'b'], 1) | tojson }} {{ dict(a=1) | tojson }}"
    template = chat_template.load(put(tmp_path / "t", text))
    assert template.render([]).text == '{"a": 1, "b": 1} {"a": 1}'


def test_a_template_that_rewrites_earlier_replies_is_rejected(tmp_path):
    text = "{% for m in messages %}{{ m.role }}{{ '!' if loop.last else m.content }}{% endfor %}"
    template = chat_template.load(put(tmp_path / "t", text))
    with pytest.raises(ValueError, match="first 2 messages differently if more follow"):
        conversations.render(template, CONVERSATIONS[2])


# As the templates of DeepSeek-R1, Phi-3 and Qwen3 write replies: <think> is in the prompt alone; a
# text ends with a token that is not there if more follow; reasoning is left out if more follow.
R1 = """{{ bos_token }}{% for m in messages -%}
{% if m.role == 'user' %}[U]{{ m.content }}{% endif -%}
{% if m.role == 'assistant' %}[A]{{ m.content.split('</think>')[-1] }}</s>{% endif %}{% endfor -%}
{% if add_generation_prompt %}[A]<think>
{% endif %}"""
PHI = """{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% else %}</s>{% endif %}"""
QWEN = """{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' -%}
{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages -%}
<|im_start|>{{ m.role }}
{% set said = m.content.split('</think>')[-1].lstrip() -%}
{% set reasoning = m.reasoning_content or m.content.split('</think>')[0].split('<think>')[-1] -%}
{% set reasoning = reasoning.strip() if reasoning != said else '' -%}
{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or reasoning) -%}
<think>
{{ reasoning }}
</think>

{% endif %}{{ said }}{% for call in m.tool_calls or [] %}({{ call.function.name }}){% endfor -%}
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


QWEN_CALL = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    },
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "it is 5"},
]


def dialogue(*texts):
    roles = ["user", "assistant"] * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


@pytest.mark.parametrize(
    ("template", "texts", "expected"),
    [
        (R1, ["one", "1", "two", "2"], ["1</s>", "2</s>"]),
        # What begins as the prompt does is no part of what is learned, since it is given.
        (R1, ["one", "<them", "two", "2"], ["em</s>", "2</s>"]),
        (PHI, ["one", "1", "two", "2"], ["1<|im_end|>\n", "2<|im_end|>\n</s>"]),
        (
            QWEN,
            ["one", "1", "two", "2"],
            ["1<|im_end|>\n", "<think>\n\n</think>\n\n2<|im_end|>\n"],
        ),
        (QWEN, ["one", "i", "two", ""], ["i<|im_end|>\n", "<think>\n\n</think>\n\n<|im_end|>\n"]),
        (PHI, ["one", "", "two", "d"], ["<|im_end|>\n", "d<|im_end|>\n</s>"]),
        (
            QWEN,  # also if the answer has the same words
            ["one", "<think>4</think>it is 4", "two", "2"],
            ["<think>\n\n</think>\n\n2<|im_end|>\n"],
        ),
        (
            QWEN,  # the first reply is context, since its reasoning is not in the text
            ["one", "<think>so</think>1", "two", "<think>then</think>2"],
            ["<think>\nthen\n</think>\n\n2<|im_end|>\n"],
        ),
    ],
)
def test_replies_are_found_in_templates_that_rewrite_them(template, texts, expected, tmp_path):
    folder = put(tmp_path / "t", template)
    one = conversations.Conversation(dialogue(*texts))
    assert learned(folder, one)[0] == expected


def test_a_call_without_a_text_is_found_in_a_template_that_rewrites_replies(tmp_path):
    folder = put(tmp_path / "t", QWEN)
    expected = ["(f)<|im_end|>\n", "<think>\n\n</think>\n\nit is 5<|im_end|>\n"]
    assert learned(folder, conversations.Conversation(QWEN_CALL))[0] == expected


@pytest.mark.parametrize(("name", "end"), [("chatml", "<|im_end|>\n"), ("llama3", "<|eot_id|>")])
def test_a_conversation_may_begin_with_the_assistant(name, end, folders):
    messages = [{"role": "assistant", "content": "hello"}, *dialogue("hi", "yo")]
    found, marks = learned(folders[name], conversations.Conversation(messages))
    assert found == [f"hello{end}", f"yo{end}"] and 0 < marks.sum() < len(marks)


def test_reasoning_that_the_template_never_writes_is_an_error(tmp_path):
    folder = put(tmp_path / "t", R1)
    one = conversations.Conversation(dialogue("one", "<think>so</think>1"))
    with pytest.raises(ValueError, match="leaves out the reasoning of all replies"):
        learned(folder, one)


def test_the_last_reply_or_all_of_the_text_is_learned(tmp_path, folders):
    path = write(tmp_path / "a.jsonl", [json.dumps({"messages": CONVERSATIONS[2].messages})])
    template = chat_template.load(folders["chatml"])
    text, spans = conversations.render(template, CONVERSATIONS[2], learned="last_reply")
    assert [text[first:end] for first, end in spans] == ["See you<|im_end|>\n"]
    marked = chat_template.load(folders["marked"])
    text, spans = conversations.render(marked, CONVERSATIONS[2], learned="last_reply")
    assert [text[first:end] for first, end in spans] == ["See you<|im_end|>"]
    weights = {}
    for what in conversations.LEARNED:
        source = build(path, folders["chatml"], heldout=0.0, learned=what)
        batch = source.read(np.arange(1))
        weights[what] = batch.weights
        assert (batch.tokens == build(path, folders["chatml"], heldout=0.0).read([0]).tokens).all()
    assert 0 < weights["last_reply"].sum() < weights["replies"].sum() < weights["all"].sum()
    assert (weights["last_reply"] <= weights["replies"]).all()
    num_tokens = sum(weights["all"].shape) - 1
    assert weights["all"].sum() <= num_tokens
    with pytest.raises(ConfigError, match="data.learned='none'"):
        build(path, folders["chatml"], learned="none")


@pytest.mark.parametrize(
    ("line", "messages"),
    [
        (
            {
                "id": "a",
                "system": "s",
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "gpt", "value": "a", "weight": 1},
                ],
            },
            [("system", "s"), ("user", "q"), ("assistant", "a")],
        ),
        (
            {"conversations": [{"role": "user", "content": "q"}, {"from": "gpt", "value": "a"}]},
            [("user", "q"), ("assistant", "a")],
        ),
        (
            {"conversations": [{"from": "function_call", "value": '{"name": "f"}'}]},
            [("assistant", "")],
        ),
        ({"instruction": "", "input": "x", "output": "o"}, [("user", "x"), ("assistant", "o")]),
        (
            {"instruction": "i", "input": "x", "output": "o", "text": "all"},
            [("user", "i\nx"), ("assistant", "o")],
        ),
        (
            {"instruction": "i", "input": "", "output": "o", "history": [["q", "a"]]},
            [("user", "q"), ("assistant", "a"), ("user", "i"), ("assistant", "o")],
        ),
    ],
)
def test_sharegpt_and_alpaca_are_recognised_by_their_keys(line, messages):
    one = conversations.parse(json.dumps(line).encode())
    assert [(m["role"], m["content"]) for m in one.messages] == messages


def test_of_a_row_only_the_columns_of_its_form_are_read():
    row = {"messages": dialogue("q", "a"), "system": "s", "input": "x", "output": "o", "tools": []}
    assert conversations.of_row(row) == {"messages": row["messages"], "tools": []}
    pair = {"messages": None, "prompt": "q", "completion": "a", "system": "s"}
    assert conversations.of_row(pair) == {"prompt": "q", "completion": "a"}
    assert conversations.of_row({"system": "s", "messages": None}) == {"system": "s"}


def test_documents_are_what_the_template_gets(tmp_path):
    line = {"messages": dialogue("q", "a"), "documents": [{"title": "t", "text": "x"}]}
    one = conversations.parse(json.dumps(line).encode())
    template = "{% for d in documents %}({{ d.title }}){% endfor %}{% for m in messages -%}"
    template += "{{ m.content }}{% endfor %}"
    text, _ = conversations.render(chat_template.load(put(tmp_path / "t", template)), one)
    assert text == "(t)qa"
    named = {"documents": [{"title": "n"}]}
    render = chat_template.load(tmp_path / "t").render
    assert render(one.messages, arguments=named).text == "(n)qa"
    assert render(one.messages, arguments=named, documents=one.documents).text == "(t)qa"
    without = chat_template.load(put(tmp_path / "u", "{% for m in messages %}{% endfor %}"))
    with pytest.raises(ValueError, match="has documents, which the chat template does not read"):
        conversations.check_keys(without, one)


def test_templates_come_from_a_file_a_list_or_the_settings(tmp_path):
    folder = put(
        tmp_path / "t",
        [
            {"name": "default", "template": "{{ bos_token }}a"},
            {"name": "tool_use", "template": "b"},
        ],
    )
    render = chat_template.load(folder).render
    assert (render([]).text, render([], [{}]).text) == ("<s>a", "b")
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}\n")
    template = chat_template.load(folder, now=datetime.datetime(2001, 2, 3))
    assert template.render([]).text == "03 Feb 2001" and template.reads_clock
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match="not valid Jinja: line 1"):
        chat_template.load(folder)
    with pytest.raises(ConfigError, match="only the chat templates rag; put"):
        chat_template.load(put(tmp_path / "u", [{"name": "rag", "template": ""}]))


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__class__=1) }}",
        "{{ strftime_now.__globals__.os }}",
        "{{ dict.__subclasses__() }}",
        "{{ dict.setdefault(messages[0], 'a', 1) }}",
        "{{ dict.fromkeys.__globals__.os }}",
        "{{ dict.fromkeys.__self__.x }}",
        "{{ range(10**9) }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(text, tmp_path):
    template = chat_template.load(put(tmp_path / "t", text))
    with pytest.raises(ValueError, match="rejects it"):
        template.render([])


DOUBLED = "{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}{% for i in range(60) %}{% set ns.x = "
LOOPS = "{% for i in range(10**5) %}" * 4
BOMBS = {
    "a text that is multiplied": ("{{ 'a' * 10**10 }}", "more than 1,073,741,824 bytes"),
    "padding": ("{{ 'a'.center(10**10) }}", "more than 1,073,741,824 bytes"),
    "doubling": (DOUBLED + "ns.x ~ ns.x %}{% endfor %}", "more than 1,073,741,824 bytes"),
    "a long text": (
        f"{LOOPS}{'a' * 1000}{'{% endfor %}' * 4}",
        "writes more than 16,777,216 characters",
    ),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "nested brackets": ("{{" + "(" * 10**5, "recursion"),
}
SLOW = {
    "loops": f"{LOOPS}{'{% endfor %}' * 4}",
    "a power": "{{ 9**(9**9) }}",
    "a loop that prints nothing": "{% for i in range(10**5) %}{% if (range(10**5)|sum) == 1 %}a"
    "{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("case", BOMBS)
def test_a_template_has_bounds_of_memory_and_size(case, tmp_path):
    text, fault = BOMBS[case]
    with pytest.raises(ValueError, match=fault) as caught:
        chat_template.load(put(tmp_path / "t", text)).render([])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case == "loops" else pytest.mark.slow) for case in SLOW],
)
def test_a_template_has_a_limit_of_time(case, tmp_path, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.5)
    folder = put(tmp_path / "t", "{{ 'a' }}" + SLOW[case])
    with pytest.raises(ConfigError, match=f"{folder}: its chat template takes more than "):
        template = chat_template.load(folder)
        template.render([])
    (tmp_path / "a.jsonl").write_text(LINES[0])
    with pytest.raises(ConfigError, match="its chat template takes more than ") as caught:
        build(tmp_path / "a.jsonl", folder)
    assert "a.jsonl" not in str(caught.value)  # it is not the line's fault


@pytest.mark.parametrize("settings", [1, ["a"], [{}], [{"name": ["a"], "template": 1}], {"a": 1}])
def test_settings_without_a_template_are_errors(settings, tmp_path):
    with pytest.raises(ConfigError, match="chat.template"):
        chat_template.load(put(tmp_path / "t", settings))


LINES = [json.dumps({"messages": one.messages}) for one in CONVERSATIONS[:4]]
LINES += [
    json.dumps({"prompt": f"count {n}", "completion": " ".join(map(str, range(n)))})
    for n in range(1, 17)
]


def write(path, lines=LINES):
    path.write_text("\n".join(lines) + "\n")
    return path


def build(file, folder, **changes):
    settings = dict(
        path=str(file), tokenizer_path=str(folder), seq_len=192, vocab_size=300, heldout=0.1
    )
    settings |= dict(seed=0, split="train", packing="best_fit")
    return chat.build(**{**settings, **changes})


def documents(source):
    """Returns the documents of an epoch as lists of (token, weight), from plain loops."""
    batch = source.read(np.arange(source.size))
    found = []
    for row in range(len(batch.tokens)):
        for segment in np.unique(batch.segments[row]):
            here = np.flatnonzero(batch.segments[row] == segment)
            assert (np.diff(here) == 1).all()
            assert batch.positions[row, here].tolist() == list(range(len(here)))
            for i, j in zip(here, here[1:], strict=False):
                assert batch.weights[row, i] == 0 or batch.targets[row, i] == batch.tokens[row, j]
            assert batch.weights[row, here[-1]] == 0
            found.append([(int(batch.tokens[row, i]), float(batch.weights[row, i])) for i in here])
    return found


@pytest.mark.parametrize("name", [pytest.param("chatml", marks=pytest.mark.slow), "marked"])
def test_rows_hold_whole_conversations_and_weigh_the_tokens_before_learned_ones(
    name, tmp_path, folders
):
    path, folder = write(tmp_path / "a.jsonl"), folders[name]
    expected = []
    encode = conversations.reply_encoder(folder / "tokenizer.json")
    for one in conversations_in(path):
        text, spans = conversations.render(chat_template.load(folder), one)
        ((ids, offsets),) = encode([text])
        mask = conversations.is_inside(offsets, spans)
        # A token has weight 1 if the next one is learned.
        expected.append([*zip(ids.tolist(), [*map(float, mask[1:]), 0.0], strict=True)])
    found = [documents(build(path, folder, split=split)) for split in ("train", "heldout")]
    found = [[one for one in part if any(weight for _, weight in one)] for part in found]
    assert sorted(found[0] + found[1]) == sorted(expected)
    assert len(found[1]) == 2


def test_windows_weigh_the_same_tokens(tmp_path, folders):
    path = write(tmp_path / "a.jsonl")
    packed = build(path, folders["chatml"], heldout=0.0)
    windows = build(path, folders["chatml"], heldout=0.0, packing="windows", seq_len=1)
    weights = [one.read(np.arange(one.size)).weights.sum() for one in (packed, windows)]
    assert weights[0] == weights[1] > 0
    assert "splits conversations" in windows.warnings[0] and not packed.warnings


def test_a_longer_conversation_than_a_row_is_split_and_logged(tmp_path, folders):
    source = build(write(tmp_path / "a.jsonl"), folders["chatml"], seq_len=48)
    assert "20 conversations are longer and are split" in source.warnings[0]


def test_the_data_are_known_by_tokens_and_template(tmp_path, folders):
    path = write(tmp_path / "a.jsonl")
    (tmp_path / "more").mkdir()
    copies = [path, write(tmp_path / "more" / "b.json"), tmp_path / "more"]
    identities = {build(one, folders["chatml"]).identity["data"] for one in copies}
    assert len(identities) == 1
    assert build(path, folders["marked"]).identity["data"] not in identities


def test_the_held_out_conversations_are_the_fraction(tmp_path, folders):
    path = write(tmp_path / "a.jsonl", LINES[:1] * 100)
    source = build(path, folders["chatml"], heldout=0.07, split="heldout")
    assert ": 7 conversations, " in source.description


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_json_array_of_conversations_is_read(tmp_path, folders, is_folder):
    path = tmp_path / "in" / "a.json"
    path.parent.mkdir()
    path.write_text(f"[{', '.join(LINES)}]")
    source = build(path.parent if is_folder else path, folders["chatml"])
    (tmp_path / "a.jsonl").write_text("\n".join(LINES))
    expected = build(tmp_path / "a.jsonl", folders["chatml"])
    assert source.read(np.arange(4)).tokens.tolist() == expected.read(np.arange(4)).tokens.tolist()
    path.write_text(f'[{LINES[0]}, "text"]')
    with pytest.raises(ConfigError, match=f"{path}:2: is no object; use "):
        build(path, folders["chatml"])


def test_conversations_have_the_same_tokens_despite_dropout_in_the_tokenizer(tmp_path, folders):
    path = write(tmp_path / "a.jsonl")
    folder = put(tmp_path / "t", FOUND["templates"]["chatml"])
    described = json.loads((folder / "tokenizer.json").read_text())
    described["model"]["dropout"] = 0.5
    (folder / "tokenizer.json").write_text(json.dumps(described))
    source = build(path, folder)
    assert any("sets dropout=0.5" in line for line in source.warnings)
    expected = build(path, folders["chatml"])
    assert source.read(np.arange(4)).tokens.tolist() == expected.read(np.arange(4)).tokens.tolist()


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "not JSON"),
        ("[]", "is no object"),
        ("{}", "neither `messages` nor `prompt`"),
        ('{"conversations": [{"from": "me", "value": ""}]}', "is from 'me'; use human, gpt"),
        ('{"conversations": [{"from": "gpt"}]}', r"conversations\[0\] has no content"),
        ('{"conversations": [{"from": "function_call", "value": "f"}]}', "and is no JSON object"),
        ('{"conversations": 3}', "conversations is int, not a list of messages"),
        ('{"instruction": 3, "output": "a"}', "content is int, not a text"),
        ('{"instruction": "a", "input": 3, "output": "a"}', "input are not both texts"),
        ('{"instruction": "a", "output": "a", "history": ["a"]}', "history is not a list of pairs"),
        ('{"prompt": "a", "completion": "b", "documents": 3}', "documents is int"),
        ('{"prompt": "a", "completion": "b", "documents": [3]}', "has documents, which the chat"),
        ('{"messages": []}', "messages is an empty list"),
        ('{"messages": [3]}', r"messages\[0\] is int"),
        ('{"messages": [{"content": ""}]}', r"messages\[0\] has no role"),
        ('{"messages": [{"role": "assistant"}]}', r"messages\[0\] has no content"),
        ('{"messages": [{"role": "assistant", "content": 3}]}', "content is int, not a text"),
        ('{"messages": [{"role": "user", "content": ""}]}', "no message of the assistant"),
        ('{"prompt": "a", "completion": 1}', "completion is int"),
        ('{"messages": [{"role": "assistant", "content": ""}], "tools": 1}', "tools is int"),
        ('{"prompt": "a", "completion": "b", "id": 3}', "the key 'id', which is not read; remove"),
        (
            '{"prompt": "a", "completion": "b", "weight": 0}',
            "put it into the messages of the assistant",
        ),
        (
            '{"messages": [{"role": "assistant", "content": ""}], "prompt": "a"}',
            "the key 'prompt', which is not read",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "", "train": false}]}',
            "message 1 has the key 'train', which the chat template does not read; remove it",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "", "weight": 0.5}]}',
            r"messages\[0\]: weight is 0.5; use 0, or 1 for the assistant",
        ),
        ('{"messages": [{"role": "user", "content": "", "weight": 1}]}', "weight is 1; use 0"),
        (
            '{"messages": [{"role": "assistant", "content": "", "weight": 0}]}',
            "so there is nothing to learn",
        ),
        (
            '{"messages": [{"role": "system", "content": ""}, {"role": "assistant", "content": '
            '""}]}',
            "System role",
        ),
    ],
)
def test_a_faulty_line_is_named(line, fault, tmp_path, folders):
    path = write(tmp_path / "a.jsonl", ["", LINES[0], line])
    with pytest.raises(ConfigError, match=f"a.jsonl:3: .*{fault}"):
        build(path, folders["gemma"])


def test_only_the_first_faults_are_shown(tmp_path, folders):
    with pytest.raises(ConfigError) as error:
        build(write(tmp_path / "a.jsonl", ["{}"] * 9), folders["gemma"])
    assert len(error.value.faults) == 6 and error.value.faults[-1] == (
        "perhaps more: after 5 faulty lines no others are read"
    )


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"tokenizer_path": ""}, "data.tokenizer_path is empty"),
        ({"tokenizer_path": "bytes"}, "is a bytes tokenizer"),
        ({"path": "/nowhere"}, "no such file"),
        ({"path": __file__}, "no file ends in .jsonl"),
        ({"mixture": (("a", 1.0),)}, "into one folder"),
        ({"packing": "none"}, "data.packing='none'"),
        ({"heldout": 1.0}, "data.heldout=1.0"),
        ({"vocab_size": 200}, "set model.vocab_size=300"),
        ({"tokenizer_path": str(GOLDEN)}, "has no chat template"),
    ],
)
def test_settings_that_do_not_fit_are_errors(changes, fault, tmp_path, folders):
    with pytest.raises(ConfigError, match=fault):
        build(write(tmp_path / "a.jsonl"), folders["chatml"], **changes)


def test_a_sample_depends_on_its_index_alone(tmp_path, folders):
    source = build(write(tmp_path / "a.jsonl"), folders["chatml"])
    again = build(tmp_path / "a.jsonl", folders["chatml"])
    whole = source.read(np.arange(30))
    for index in (29, 0, 13):
        one = again.read(np.array([index]))
        rows = zip(jax.tree.leaves(one), jax.tree.leaves(whole), strict=True)
        assert all((a[0] == b[index]).all() for a, b in rows)


REPLY = "all is well"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, folders):
    """A run that learned one reply to everything."""
    folder = tmp_path_factory.mktemp("run")
    lines = [json.dumps({"prompt": f"count {n}", "completion": REPLY}) for n in range(99)]
    c = tiny_config()
    c.model.vocab_size = 300
    c.train.steps, c.model.num_layers, c.optim.learning_rate = 40, 1, 1e-2
    c.data.build = "meshtrain.data.chat:build"
    c.data.update(path=str(write(folder / "a.jsonl", lines)), packing="best_fit", heldout=0.1)
    c.data.update(tokenizer_path=str(folders["marked"]), seq_len=64)
    train(c, workdir=folder / "run")
    return folder / "run"


@pytest.mark.slow
def test_a_run_learns_replies_and_keeps_the_template(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0] / 10
    kept = chat_template.load(workdir / "tokenizer")
    assert kept.marks_replies and kept.eos_token == "</s>"


@pytest.mark.slow
def test_generate_writes_the_reply_to_a_message(workdir, capsys):
    arguments = [f"--workdir={workdir}", "--chat", "--prompt=count 5", "--temperature=0"]
    capsys.readouterr()
    assert app.main("generate", [*arguments, "--length=30"]) == 0
    assert capsys.readouterr().out == f"{REPLY}\n"
    assert app.main("generate", [*arguments, "--prompt=count 77", "--length=30"]) == 0
    assert capsys.readouterr().out == f"--- 0\n{REPLY}\n--- 1\n{REPLY}\n"
    assert app.main("generate", [*arguments, "--no-bos"]) == 2
    assert "the chat template writes the token" in capsys.readouterr().err
    assert app.main("generate", [*arguments, "--tokenizer=bytes"]) == 2
    assert "a bytes tokenizer has no chat template" in capsys.readouterr().err


@pytest.mark.slow
def test_evaluate_says_that_conversations_are_split(workdir, capsys):
    """A converted model has the rows of the config that it would be trained with next."""
    arguments = [f"--workdir={workdir}", "--split=all", "--config.data.seq_len=16", "--batch=8"]
    capsys.readouterr()
    assert app.main("evaluate", arguments) == 0
    error = capsys.readouterr().err
    assert "data.seq_len=16: 99 of 99 conversations are longer and are split" in error


@pytest.mark.slow
def test_a_conversation_that_the_model_cannot_see_completely_is_rejected(workdir, capsys):
    """Without the beginning of its template it would be no conversation."""
    arguments = [f"--workdir={workdir}", "--chat", "--temperature=0"]
    capsys.readouterr()
    assert app.main("generate", [*arguments, f"--prompt={'count 5 ' * 40}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("prompt 0: it has ")
    assert error.endswith("more than the 64 that the model sees; use a shorter message\n")


def test_a_reply_ends_where_the_context_is_full(workdir, folders, capsys):
    tokenizer = tokenizers.load(folders["marked"])
    template = chat_prompts.load(tokenizer)
    prompt = chat_prompts.encode_first(tokenizer, template, chat_prompts.Settings(), "count 5")
    arguments = [f"--workdir={workdir}", "--chat", "--prompt=count 5", "--temperature=0"]
    size = len(prompt) + 2
    capsys.readouterr()
    assert app.main("generate", [*arguments, f"--context={size}", "--length=30"]) == 0
    out, error = capsys.readouterr()
    # The last token is generated, and not seen.
    assert out.strip() == tokenizer.decode(tokenizer.encode(REPLY)[:3])
    assert error == (
        f"reply 0 ends because prompt and reply fill the {size} tokens that the model sees; "
        f"use a shorter message, or --context={size + 1}\n"
    )


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("chatml", {"</s>", "<|im_end|>"}),
        ("llama3", {"</s>", "<|eot_id|>"}),
        ("mistral", {"</s>"}),
        ("gemma", {"</s>", "<end_of_turn>"}),
        ("marked", {"</s>", "<|im_end|>"}),
    ],
)
def test_a_prompt_ends_where_the_reply_begins_and_a_reply_where_the_template_ends_it(
    name, ends, folders
):
    tokenizer = tokenizers.load(folders[name])
    template = chat_prompts.load(tokenizer)
    found = chat_prompts.end_tokens(tokenizer, template)
    vocabulary = json.loads((folders[name] / "tokenizer.json").read_text())["model"]["vocab"]
    assert {vocabulary[text] for text in ends} == {*found}
    ids = chat_prompts.encode_first(tokenizer, template, chat_prompts.Settings(), "one")
    text, spans = conversations.render(template, CONVERSATIONS[3])
    ((whole, offsets),) = conversations.reply_encoder(tokenizer.file)([text])
    assert ids == whole[: len(ids)].tolist()
    assert len(ids) == np.flatnonzero(conversations.is_inside(offsets, spans))[0]


def record_prompts(monkeypatch, tokenizer_folder):
    """Returns a list to which the texts of later prompts are added."""
    tokenizer = tokenizers.load(tokenizer_folder)
    texts, original = [], chat_prompts.conversations.reply_encoder

    def recording(file):
        encode = original(file)

        def record(rendered):
            texts.extend(rendered)
            return encode(rendered)

        return record

    monkeypatch.setattr(chat_prompts.conversations, "reply_encoder", recording)
    return texts, tokenizer


@pytest.mark.slow
def test_lines_of_stdin_are_the_messages_of_one_conversation(workdir, monkeypatch, capsys):
    texts, _ = record_prompts(monkeypatch, workdir / "tokenizer")
    template = chat_template.load(workdir / "tokenizer")
    lines = ["count 5", "", "count 6", "count 7 " * 60, "/clear", "count 8"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    arguments = [f"--workdir={workdir}", "--chat", "--system=be brief", "--temperature=0"]
    capsys.readouterr()
    assert app.main("generate", [*arguments, "--context=150"]) == 0
    out, error = capsys.readouterr()
    assert out.startswith(f"{REPLY}\n")
    assert error.count("\n") == 1  # of the message that is too long
    assert "more than the 150 that the model sees; /clear starts a new one" in error
    system = {"role": "system", "content": "be brief"}
    first = [system, {"role": "user", "content": "count 5"}]
    second = [*first, {"role": "assistant", "content": REPLY}]
    second.append({"role": "user", "content": "count 6"})
    cleared = [system, {"role": "user", "content": "count 8"}]
    expected = [
        template.render(messages, add_generation_prompt=True).text
        for messages in (first, second, cleared)
    ]
    prompts = [text for text in texts if "count" in text]
    assert [prompts[0], prompts[1], prompts[3]] == expected


def test_a_message_that_is_not_utf8_is_one_line(workdir, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("he\udcffllo\n"))
    capsys.readouterr()
    assert app.main("generate", [f"--workdir={workdir}", "--chat", "--length=1"]) == 2
    assert capsys.readouterr().err == "stdin: 'he\\udcffllo' is not valid UTF-8\n"


@pytest.mark.slow
def test_variables_of_the_template_are_read(workdir, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(workdir, tmp_path / "run")
    marked = json.loads((run / "tokenizer" / "tokenizer_config.json").read_text())["chat_template"]
    (run / "tokenizer" / "chat_template.jinja").write_text(
        "{% if style is defined %}({{ style.tone }}){% endif %}" + marked
    )
    texts, _ = record_prompts(monkeypatch, run / "tokenizer")
    arguments = [f"--workdir={run}", "--chat", "--prompt=count 5", "--length=2"]
    kwargs = '--chat_template_kwargs={"style": {"tone": "dry"}}'
    assert app.main("generate", [*arguments, kwargs]) == 0
    assert texts[-1].startswith("(dry)")
    assert app.main("generate", arguments) == 0
    assert not texts[-1].startswith("(")


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--chat", "--chat_template_kwargs={"], "--chat_template_kwargs={: is not JSON"),
        (["--chat", "--chat_template_kwargs=[1]"], "--chat_template_kwargs=[1]: is no JSON object"),
        (
            ["--chat", '--chat_template_kwargs={"messages": []}'],
            "--chat_template_kwargs: messages is set by the conversation",
        ),
        (["--system=be brief", "--prompt=a"], "--system: is for chat models; add --chat"),
        (["--chat_template_kwargs={}"], "--chat_template_kwargs: is for chat models"),
        (
            ["--chat", "--num_return_sequences=2"],
            "--num_return_sequences=2: a conversation has one reply to each message",
        ),
    ],
)
def test_faulty_flags_of_a_conversation_are_one_line(flags, fault, workdir, capsys):
    capsys.readouterr()
    assert app.main("generate", [f"--workdir={workdir}", *flags]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and error.startswith(fault)


def test_a_special_token_before_the_text_of_a_reply_does_not_end_it(tmp_path):
    template = "{% for m in messages %}{{ m.role }}<s>{{ m.content }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant{% endif %}"
    tokenizer = tokenizers.load(put(tmp_path / "t", template))
    vocabulary = json.loads((GOLDEN / "tokenizer.json").read_text())["model"]["vocab"]
    found = chat_prompts.end_tokens(tokenizer, chat_prompts.load(tokenizer))
    assert {*found} == {vocabulary["</s>"], vocabulary["<|im_end|>"]}


def test_the_tokens_that_generation_config_lists_end_a_reply(workdir, tmp_path, capsys):
    run = shutil.copytree(workdir, tmp_path / "run")
    tokenizer = tokenizers.load(run / "tokenizer")
    ids = tokenizer.encode(REPLY)
    listed = {"eos_token_id": [1, int(ids[3])]}
    (run / "tokenizer" / "generation_config.json").write_text(json.dumps(listed))
    arguments = [f"--workdir={run}", "--chat", "--prompt=count 5", "--temperature=0"]
    capsys.readouterr()
    assert app.main("generate", [*arguments, "--length=30"]) == 0
    assert capsys.readouterr().out.strip() == tokenizer.decode(ids[:3]).strip()
