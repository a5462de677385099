"""Reads a model's generation_config.json: the defaults of `meshtrain generate`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from meshtrain.checkpoint import run_tokenizer

# Keys with the names of `Sampling`, and the type of their values.
SAMPLING_KEYS = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "no_repeat_ngram_size": int,
}
# What transformers samples with if the file has `do_sample` alone.
IF_SAMPLED = {"temperature": 1.0, "top_k": 50}
# Keys that change which tokens are drawn, and are not supported; the values that change nothing.
IGNORED_KEYS = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "guidance_scale": (1,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "penalty_alpha": (),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "min_new_tokens": (0,),
    "min_length": (0,),
    "exponential_decay_length_penalty": (),
}


class Defaults(NamedTuple):
    """What a file says; empty without one."""

    file: Path | None = None
    sampling: dict[str, float] = {}  # by the names of `Sampling`
    length: int | None = None  # tokens to generate
    stop: tuple[str, ...] = ()  # texts that end a text
    ignored: tuple[str, ...] = ()  # KEY=VALUE that changes what transformers draws, but not here

    def notes(self) -> list[str]:
        """Returns a line with what the file sets in vain."""
        if not self.ignored:
            return []
        return [f"{self.file}: {', '.join(self.ignored)}: is not supported, ignored"]


def read(folders: Iterable[Path]) -> Defaults:
    """Returns the defaults in the first generation_config.json of `folders`.

    Values of another type are ignored, as null is. `do_sample` false is temperature 0.
    """
    found = run_tokenizer.generation_config(folders)
    if found is None:
        return Defaults()
    file, config = found
    sampling = dict(IF_SAMPLED) if config.get("do_sample") is True else {}
    for key, kind in SAMPLING_KEYS.items():
        value = config.get(key)
        is_number = type(value) is int or (kind is float and type(value) is float)
        if is_number:
            sampling[key] = kind(value)
    if config.get("do_sample") is False:
        sampling["temperature"] = 0.0
    length = config.get("max_new_tokens")
    ignored = []
    for key, neutral in IGNORED_KEYS.items():
        value = config.get(key)
        if value is not None and value not in neutral:
            ignored.append(f"{key}={value!r}")
    return Defaults(
        file,
        sampling,
        length if type(length) is int and length > 0 else None,
        _texts(config.get("stop_strings")),
        tuple(ignored),
    )


def _texts(value: Any) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else [value]
    return tuple(text for text in texts if isinstance(text, str) and text)
