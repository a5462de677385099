"""Points at which a text can be split without changing its tokens, guaranteed."""

import re
import unicodedata

# Patterns of pre-tokenizers in which no token spans a letter and the newline after it, and none has
# a look-behind: a split there does not change the tokens. GPT-2's own pattern is used without a
# Split step.
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
    """Returns whether a split between a letter and a newline is guaranteed not to change tokens."""
    model = tokenizer_json["model"]
    if model["type"] != "BPE" or model["dropout"]:
        return False
    if any(step["type"] != "NFC" for step in steps(tokenizer_json, "normalizer")):
        return False
    if any(_may_match_whitespace(token) for token in tokenizer_json["added_tokens"]):
        return False
    pre_tokenizers = steps(tokenizer_json, "pre_tokenizer")
    if not pre_tokenizers:
        return False
    *splits, byte_level = pre_tokenizers
    if byte_level["type"] != "ByteLevel" or byte_level["add_prefix_space"]:
        return False
    if not splits:
        return byte_level["use_regex"]
    return tuple(map(_pattern_of, splits)) in SAFE_PATTERNS


def _pattern_of(step: dict) -> str | None:
    """Returns the pattern of a Split step; None for any other step."""
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"]:
        return None
    return step["pattern"].get("Regex")


def _may_match_whitespace(token: dict) -> bool:
    """Returns whether an added token may span a newline; special tokens are encoded as text."""
    if token["special"]:
        return False
    strips = token["lstrip"] or token["rstrip"] or token["single_word"]
    return bool(strips or re.search(r"\s", token["content"]))


def last_split_point(text: str) -> int:
    """Returns the last index with a letter before and a newline at it; 0 if there is none."""
    for index in range(len(text) - 1, 0, -1):
        if text[index] not in "\r\n":
            continue
        before = text[index - 1]
        # A letter both today and in Unicode 3.2 is one in every version that a tokenizer may use.
        if before.isalpha() and unicodedata.ucd_3_2_0.category(before).startswith("L"):
            return index
    return 0


def steps(tokenizer_json: dict, *stages: str) -> list[dict]:
    """Returns the steps of these stages of a tokenizer.json, with nested sequences flattened."""
    flat = [tokenizer_json[stage] for stage in stages if tokenizer_json[stage]]
    for step in flat:  # the list grows during the loop
        for key in ("pretokenizers", "normalizers", "decoders"):
            flat.extend(step.get(key, []))
    return [step for step in flat if step["type"] != "Sequence"]
