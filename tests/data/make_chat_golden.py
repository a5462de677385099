"""Writes chat/: a small tokenizer, and what transformers makes of conversations with its templates.

  python tests/data/make_chat_golden.py       # transformers 5.24.0, jinja2 3.1.6

The templates write the formats of four families, with what their own templates use of Jinja.
`texts` of golden.json has the text of each template and conversation, with and without the prompt
for a reply, or null if the template rejects the conversation; `ids` the tokens, and `masks` the
assistant's tokens of a template with {% generation %}.
"""

import json
from pathlib import Path

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

FOLDER = Path(__file__).resolve().parent / "chat"
CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and tools %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.content is defined %}
        {{- '\\n' + message.content }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = """\
{{ bos_token }}{% set date = "26 Jul 2024" if 1 > 0 else strftime_now("%d %b %Y") %}
{% if messages[0]['role'] == 'system' %}
    {% set ns = namespace(system=messages[0]['content'] | trim) %}
    {% set messages = messages[1:] %}
{% else %}
    {% set ns = namespace(system='') %}
{% endif %}
{{ '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date + '\\n\\n' + ns.system + \
'<|eot_id|>' }}
{%- for message in messages %}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim \
+ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif \
%}
"""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 "
    "is even) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + "
    "eos_token }}{% endif %}"
    "{% endfor %}"
)
GEMMA = """\
{{ bos_token }}
{%- macro turn(role, text) -%}
    {{ '<start_of_turn>' + role + '\\n' + text | trim + '<end_of_turn>\\n' }}
{%- endmacro %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
    {{- turn({'assistant': 'model'}.get(message.role, message.role), message.content) }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""
# ChatML again: the end of the turn is learned, the newline after it is not.
MARKED = """\
{% for message in messages %}
{% if message.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}

{% else %}
{{ '<|im_start|>' ~ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "marked": MARKED,
}
SPECIAL = (
    "<s> </s> <|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> "
    "[INST] [/INST]"
).split()
SPECIAL += ["<start_of_turn>", "<end_of_turn>"]


def say(*texts, **more):
    """Returns messages of the user and the assistant, one after the other."""
    return [
        {"role": ("user", "assistant")[number % 2], "content": text, **more}
        for number, text in enumerate(texts)
    ]


CALL = {"type": "function", "function": {"name": "area", "arguments": {"width": 2, "unit": "é<m>"}}}
TOOL = {"type": "function", "function": {"name": "area", "parameters": {"width": "number"}}}
CONVERSATIONS = [
    {"messages": say("What is 2 + 2?", "4")},
    {
        "messages": say(
            " Größe? 你好 \n",
            "  Über 1,80 m 🙂\n",
            "Then <|im_end|> ends it?",
            "</s> <b>Yes</b> {{ 1 }}",
        )
    },
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            *say("Hi", "Hello", "Bye", "See you"),
        ]
    },
    {"messages": say("one", "two", name=None)},
    {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
    {
        "messages": [
            *say("How large?"),
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "4 m²"},
        ],
        "tools": [TOOL],
    },
]


def train_tokenizer():
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator([json.dumps(CONVERSATIONS), *TEMPLATES.values()], trainer)
    model.save(str(FOLDER / "tokenizer.json"))


def main():
    FOLDER.mkdir(exist_ok=True)
    train_tokenizer()
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (FOLDER / "special_tokens_map.json").write_text(json.dumps(special, indent=1) + "\n")
    found = {"templates": TEMPLATES, "conversations": CONVERSATIONS, "texts": {}, "ids": {}}
    masks = []
    for name, template in TEMPLATES.items():
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(FOLDER / "tokenizer.json"), chat_template=template, **special
        )
        found["texts"][name], found["ids"][name] = [], []
        for one in CONVERSATIONS:
            options = dict(conversation=one["messages"], tools=one.get("tools"))
            try:
                texts = [
                    tokenizer.apply_chat_template(
                        **options, tokenize=False, add_generation_prompt=flag
                    )
                    for flag in (False, True)
                ]
                out = tokenizer.apply_chat_template(
                    **options, return_dict=True, return_assistant_tokens_mask=name == "marked"
                )
            except Exception:
                found["texts"][name].append(None)
                found["ids"][name].append(None)
                continue
            found["texts"][name].append(texts)
            found["ids"][name].append(out["input_ids"])
            if name == "marked":
                masks.append(out["assistant_masks"])
    found["masks"] = masks
    (FOLDER / "golden.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
