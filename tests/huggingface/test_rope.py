"""Scaled rope equals that of transformers: frequencies, factor, and dynamic rope with a cache."""

import json
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from meshtrain.huggingface import config_json, weights
from meshtrain.models import rope
from tests.lib.hf import ATOL, GOLDEN, assert_same_generation, load, logits

HERE = Path(__file__).resolve().parent
ENTRIES = json.loads((HERE / "rope.json").read_text())  # see make_golden.py


def section_of(entry):
    """Returns the section of the Llama model with this rope."""
    keys = dict(head_dim=entry["head_dim"], rope_parameters=entry["rope"])
    keys |= dict(max_position_embeddings=entry["max_position_embeddings"])
    original = config_json.read(GOLDEN / "llama3" / "config.json")
    return config_json.to_section(original | keys)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: str(entry["rope"])[:70])
def test_frequencies_and_attention_factor_equal_those_of_transformers(entry):
    s = section_of(entry)
    scaling = s["rope_scaling"]
    actual = rope.frequencies(s["head_dim"], s["rope_theta"], scaling, entry["row_length"])
    np.testing.assert_allclose(actual, entry["frequencies"], rtol=1e-5)
    assert rope.attention_factor(scaling) == pytest.approx(entry["attention_factor"], rel=1e-12)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: str(entry["rope"])[:70])
@pytest.mark.parametrize("removed", ["rope_scaling", "rope_parameters"])
def test_an_exported_rope_is_the_imported_one(entry, removed):
    section = section_of(entry)
    config = json.loads(json.dumps(config_json.to_config(section)))
    del config[removed]
    assert config_json.to_section(config)["rope_scaling"] == section["rope_scaling"]


def test_keys_of_an_exported_rope_are_those_of_the_model_card():
    config = config_json.to_config(section_of(ENTRIES[0]))
    assert config["rope_parameters"] == ENTRIES[0]["rope"]


def test_rows_longer_than_the_original_length_have_the_logits_of_transformers():
    golden = np.load(HERE / "dynamic" / "logits.npz")
    model, params = load(HERE / "dynamic")
    assert weights.model_section(HERE / "dynamic")["rope_scaling"] == ("dynamic", 4.0, 16.0)
    with jax.default_matmul_precision("highest"):
        actual = jax.jit(partial(logits, model))(params, golden["tokens"].astype(np.int32))
    np.testing.assert_allclose(actual[..., :61], golden["logits"], rtol=0, atol=ATOL)


def test_dynamic_rope_depends_on_the_length_of_a_packed_row_and_not_on_its_documents():
    model, params = load(HERE / "dynamic")
    tokens = np.load(HERE / "dynamic" / "logits.npz")["tokens"].astype(np.int32)
    positions = np.r_[:8, :14][None].astype(np.int32)
    segments = np.repeat([0, 1], [8, 14])[None].astype(np.int32)
    compiled = jax.jit(partial(logits, model))
    packed = compiled(params, tokens[:1], positions, segments)
    first = compiled(params, tokens[:1])[:, :8]  # of a row of the same length
    np.testing.assert_allclose(packed[:, :8], first, rtol=0, atol=ATOL)


def test_generation_with_dynamic_rope_has_the_logits_of_transformers():
    assert_same_generation(HERE / "dynamic", *load(HERE / "dynamic"))
