"""Where a text can be cut so that the tokens of its pieces are those of the whole, for certain."""

import re
import unicodedata

# Pre-tokenizers in which no token spans a letter and the newline after it, and none looks back: text cut
# there gives the same tokens in pieces as in one. GPT-2's own is without a split.
_LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _LLAMA.replace("{1,3}", "")
_DEEPSEEK = (  # spells its newlines as they are
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^NL\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[NL]*|\s*[NL]+|\s+(?!\S)|\s+"
    ).replace("NL", "\r\n"),
)
CUTTABLE = {(_LLAMA,), (_QWEN,), _DEEPSEEK}


def is_cuttable(described: dict) -> bool:
    """Whether pieces that are cut after a letter, before a newline, surely give the same tokens."""
    model, before = described["model"], steps(described, "pre_tokenizer")
    if not before or before[-1]["type"] != "ByteLevel" or before[-1]["add_prefix_space"]:
        return False
    splits = tuple(
        step["type"] == "Split"
        and step["behavior"] == "Isolated"
        and not step["invert"]
        and step["pattern"].get("Regex")
        for step in before[:-1]
    )
    if not (splits in CUTTABLE if splits else before[-1]["use_regex"]):
        return False
    looks_around = [
        one
        for one in described["added_tokens"]
        if not one["special"]
        and (
            one["lstrip"] or one["rstrip"] or one["single_word"] or re.search(r"\s", one["content"])
        )
    ]
    composes = [step for step in steps(described, "normalizer") if step["type"] != "NFC"]
    return model["type"] == "BPE" and not (model["dropout"] or composes or looks_around)


def last_newline(text: str) -> int:
    """Returns the last place in a text between a letter and a newline; 0 where there is none."""
    for place in range(len(text) - 1, 0, -1):
        # A letter today and in Unicode 3.2 is one in whatever version the tokenizer was built with.
        if text[place] in "\r\n" and text[place - 1].isalpha():
            if unicodedata.ucd_3_2_0.category(text[place - 1]).startswith("L"):
                return place
    return 0


def steps(described: dict, *names: str) -> list[dict]:
    """Returns the steps of these stages of a tokenizer.json, sequences opened."""
    found = [described[name] for name in names if described[name]]
    for step in found:  # grows while it is gone through
        for inner in ("pretokenizers", "normalizers", "decoders"):
            found.extend(step.get(inner, []))
    return [step for step in found if step["type"] != "Sequence"]
