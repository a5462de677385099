"""Writes the README.md of an exported model: a model card, with facts of the run and no others."""

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshtrain.checkpoint.manifest import Manifest
from meshtrain.config import paths
from meshtrain.huggingface.peft import section_of

NAME = "README.md"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def write(
    folder: Path,
    saved: Manifest,
    *,
    architecture: str,
    num_params: int,
    dtype: str,
    base_model: str | None,
    is_adapter: bool,
) -> None:
    """Writes the card of the model of a checkpoint, or of its adapter alone.

    `base_model` is the model that the run began with, if that is known; a path is only mentioned.
    """
    on_hub = base_model if base_model and HUB_NAME.fullmatch(base_model) else None
    lines = ["---", f"library_name: {'peft' if is_adapter else 'transformers'}"]
    if on_hub:
        lines.append(f"base_model: {on_hub}")
    lines += ["pipeline_tag: text-generation", "tags:", "- meshtrain"]
    lines += ["- lora"] if is_adapter else []
    what = "An adapter (LoRA) of" if is_adapter else "A"
    lines += ["---", "", f"# {architecture}, step {saved.step}", ""]
    lines += [f"{what} {architecture}, written by meshtrain. All that follows was recorded by the"]
    lines += ["run; nothing else is known of this model here, such as its license.", ""]
    lines += ["| | |", "|---|---|"]
    facts = {"parameters": f"{num_params:,}, stored in {dtype}", **_facts(saved, base_model)}
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    (folder / NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _facts(saved: Manifest, base_model: str | None) -> dict[str, str]:
    """Returns what a checkpoint records, as text by name; what it lacks is left out."""
    config = saved.config
    train, data, optim = (config.get(name, {}) for name in ("train", "data", "optim"))
    found: dict[str, str] = {}
    if base_model:
        found["began with"] = _as_code(base_model)
    elif init_from := config.get("checkpoint", {}).get("init_from"):
        found["began with"] = f"the run {_as_code(Path(init_from).name)}"
    found["steps"] = f"{saved.step:,} of {train.get('steps', '?')}"
    if "tokens" in saved.metrics:
        found["tokens seen"] = f"{int(saved.metrics['tokens']):,}"
    for name, label in (("loss", "training loss"), ("eval_loss", "held-out loss")):
        if name in saved.metrics:
            found[label] = f"{saved.metrics[name]:.4f} nats per token"
    places = [Path(path).name for path in paths.of_data(data)]
    if places:
        found["data"] = ", ".join(map(_as_code, dict.fromkeys(places)))
    batch, seq_len = train.get("global_batch"), data.get("seq_len")
    if batch and seq_len:
        found["batch"] = f"{batch} sequences of {seq_len} tokens"
    optimizer = str(optim.get("build", "")).rpartition(":")[2]
    if optimizer:
        rate, schedule = optim.get("learning_rate"), optim.get("schedule")
        found["optimizer"] = f"{optimizer}, learning rate {rate:g}, schedule {schedule}"
    found["computed in"] = f"{train.get('dtype')}, parameters in {train.get('param_dtype')}"
    adapter = section_of(config.get("adapter", {}))
    if adapter.rank:
        kind = "rsLoRA" if adapter.rslora else "LoRA"
        found["adapter"] = f"{kind}, rank {adapter.rank}, alpha {adapter.alpha:g}"
    used = [f"{axis} {size}" for axis, size in saved.mesh.items() if _is_used(axis, size)]
    found["mesh"] = " x ".join(used) or "one device"
    found["versions"] = ", ".join(
        f"{name} {version}" for name, version in _versions(saved.versions)
    )
    found["saved"] = datetime.fromtimestamp(saved.time, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return found


def _is_used(axis: str, size: Any) -> bool:
    return axis not in ("slices", "auto") and isinstance(size, int) and size > 1


def _versions(versions: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, version in versions.items():
        if version:
            yield name, version


def _as_code(text: str) -> str:
    """Returns a text that a table of Markdown shows as it is."""
    return f"`{text.replace('|', '/').replace('`', '')}`"
