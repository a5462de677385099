"""Where a text can be split so that its pieces are guaranteed to have the same tokens as the full text."""

import re
import unicodedata

# Patterns of pre-tokenizers in which no token spans a letter and the newline after it, and none has a
# look-behind: a split there does not change the tokens. GPT-2's own pattern is used without a Split step.
_LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_QWEN = _LLAMA.replace("{1,3}", "")

_DEEPSEEK = (  # its tokenizer.json holds literal newlines, not \r\n
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^NL\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[NL]*|\s*[NL]+|\s+(?!\S)|\s+"
    ).replace("NL", "\r\n"),
)

SAFE_PATTERNS = {(_LLAMA,), (_QWEN,), _DEEPSEEK}


def can_split(tokenizer_json: dict) -> bool:
    """Returns True if a split between a letter and a newline is guaranteed not to change the tokens."""
    model, pre_tokenizers = tokenizer_json["model"], steps(tokenizer_json, "pre_tokenizer")
    if not pre_tokenizers:
        return False
    *splits, byte_level = pre_tokenizers
    if byte_level["type"] != "ByteLevel" or byte_level["add_prefix_space"]:
        return False
    patterns = tuple(
        step["type"] == "Split"
        and step["behavior"] == "Isolated"
        and not step["invert"]
        and step["pattern"].get("Regex")
        for step in splits
    )
    if not (patterns in SAFE_PATTERNS if patterns else byte_level["use_regex"]):
        return False
    match_whitespace = [
        token
        for token in tokenizer_json["added_tokens"]
        if not token["special"]
        and (
            token["lstrip"]
            or token["rstrip"]
            or token["single_word"]
            or re.search(r"\s", token["content"])
        )
    ]
    normalizers = [step for step in steps(tokenizer_json, "normalizer") if step["type"] != "NFC"]
    return model["type"] == "BPE" and not (model["dropout"] or normalizers or match_whitespace)


def last_split_point(text: str) -> int:
    """Returns the last index with a letter before and a newline at it; 0 if there is none."""
    for index in range(len(text) - 1, 0, -1):
        # A letter both today and in Unicode 3.2 is a letter in every version that a tokenizer may use.
        if text[index] in "\r\n" and text[index - 1].isalpha():
            if unicodedata.ucd_3_2_0.category(text[index - 1]).startswith("L"):
                return index
    return 0


def steps(tokenizer_json: dict, *stages: str) -> list[dict]:
    """Returns the steps of these stages of a tokenizer.json, with nested sequences flattened."""
    found = [tokenizer_json[stage] for stage in stages if tokenizer_json[stage]]
    for step in found:  # the list grows during the loop
        for inner in ("pretokenizers", "normalizers", "decoders"):
            found.extend(step.get(inner, []))
    return [step for step in found if step["type"] != "Sequence"]
