"""What is suggested for an unknown flag or key."""

import pytest

from meshtrain.cli import verbs
from meshtrain.cli.parser import Parser
from meshtrain.config import load, suggest
from meshtrain.configs import default
from meshtrain.errors import did_you_mean

KEYS = load._keys(default.get_config().to_dict())


def flags_of(name):
    flags = Parser()
    verbs.load(name).add_flags(flags)
    return flags.known()


def test_what_other_trainers_call_a_key_leads_to_a_key_or_flag_that_exists():
    keys = [*KEYS, *(f"data.{key}" for key in ("path", "heldout"))]
    assert {*suggest.OTHER_NAMES.values()} <= {*keys}
    flags = {"--config"}.union(*(flags_of(name) for name in verbs.NAMES))
    assert {*suggest.OTHER_FLAGS.values()} <= flags


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("train.stepz", "train.steps"),
        ("train.use_amp", "train.dtype"),
        ("train.lr", "optim.learning_rate"),
        ("train.learning_rate", "optim.learning_rate"),
        ("optim.lerning_rate", "optim.learning_rate"),
        ("trian.steps", "train.steps"),
        ("mesh.fdsp", "mesh.fsdp"),
        ("mesh.tp", "mesh.tensor"),
        ("model.n_layer", "model.num_layers"),
        ("data.block_size", "data.seq_len"),
        ("model.hidden-size", "model.d_model"),
        ("train.nonsense", ""),
        ("mesh.backend", ""),
        ("x", ""),
    ],
)
def test_a_key_is_suggested_where_one_is_near(name, key):
    assert suggest.key_for(name, KEYS) == key


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("--learning_rate", "--config.optim.learning_rate"),
        ("--learning-rate", "--config.optim.learning_rate"),
        ("--lr", "--config.optim.learning_rate"),
        ("--epochs", "--config.train.epochs"),
        ("--batch-size", "--config.train.global_batch"),
        ("--steps", "--config.train.steps"),
        ("--workdri", "--workdir"),
        ("--output_dir", "--workdir"),
        ("--resume-from-checkpoint", "--workdir"),
        ("--from-scratch", "--from_scratch"),
        ("--backend", ""),
        ("--gpus", ""),
    ],
)
def test_a_flag_or_key_is_suggested_where_one_is_near(name, found):
    expected = f' (did you mean "{found}"?)' if found else ""
    assert suggest.did_you_mean_flag(name, flags_of("train"), KEYS) == expected


def test_a_verb_without_a_config_suggests_no_key():
    flags = flags_of("launch")
    assert suggest.did_you_mean_flag("--backend", flags) == ""
    assert suggest.did_you_mean_flag("--epochs", flags) == ""
    assert suggest.did_you_mean_flag("--nproc_per_node", flags) == ' (did you mean "--nproc"?)'


def test_a_name_that_is_half_of_another_is_not_near():
    assert did_you_mean("--force", ["--grace", "--trace"]) == ""
    assert did_you_mean("adma", ["adam", "lion"]) == ' (did you mean "adam"?)'
