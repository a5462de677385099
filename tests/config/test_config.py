"""Every fault of a config is reported at once, in a line that names key, value and what to do."""

import dataclasses
import math
import sys

import pytest
from ml_collections import ConfigDict

import meshtrain
from meshtrain.config import load as configfile
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.configs import default
from meshtrain.configs._sections import Sections
from meshtrain.program import assemble
from meshtrain.train import train

QUICKSTART = "configs/quickstart.py"


def faults_of(c, num_devices=1):
    """Returns the faults that parsing finds or, if it finds none, building."""
    with pytest.raises(meshtrain.ConfigError) as error:
        build(parse(c, num_devices=num_devices))
    return list(error.value.faults)


@pytest.mark.parametrize(
    "key, value, line",
    [
        ("mesh.data", 2, "mesh.data=2 needs 2 devices and there are 1; use --simulate_devices=2"),
        ("train.dtype", "float31", "train.dtype='float31': use one of float32, bfloat16"),
        ("train.remat", "some", "train.remat='some': use one of none, full, dots, names:"),
        ("train.zero_stage", 4, "train.zero_stage=4: use 0, 1, 2 or 3"),
        ("train.seed", 2**32, "train.seed=4294967296: use a number below 2^32"),
        ("train.num_microbatches", 3, "train.num_microbatches=3; use 15 or 18"),
        ("train.num_microbatches", 0, "train.num_microbatches=0: use 1 or more"),
        ("train.global_batch", 0, "train.global_batch=0 is not divisible"),
        ("model.num_kv_heads", 3, "model.num_heads=4 is not divisible by model.num_kv_heads=3"),
        ("model.d_model", 30, "model.d_model=30 is not divisible by model.num_heads=4"),
        ("model.d_model", 4, "is odd, but rope rotates pairs"),
        ("model.norm", "batch", "model.norm='batch': use one of rms, layer"),
        ("model.build", "meshtrain.models.transformer:bild", "model.build=meshtrain.models"),
        ("optim.schedule", "cosin", "optim.schedule='cosin': use one of constant, cosine"),
        ("optim.clip_norm", 0.0, "optim.clip_norm=0.0: use a positive norm"),
        ("optim.decay_fraction", 2.0, "optim.decay_fraction=2.0: use a number from 0 to 1"),
        ("checkpoint.keep_last", 0, "checkpoint.keep_last=0: use 1 or more"),
        ("eval.every", -1, "eval.every=-1: use 0 or more"),
        ("data.build", "meshtrain.data.tokens:build", "data.path=: no such file or folder"),
        (
            "rules",
            (("batch", "dta"),),
            "'batch' to 'dta', not a mesh axis (did you mean \"data\"?)",
        ),
        ("train.dtype", "float64", "train.dtype=float64: jax computes it in float32; set JAX"),
        ("train.remat", "names:", "train.remat='names:': use one of"),
        ("train.remat", "offload:", "train.remat='offload:': use one of"),
        ("train.remat", "offload:mlp,", "train.remat='offload:mlp,': use one of"),
        ("train.remat", "offloads", "train.remat='offloads': use one of none, full, dots"),
        ("optim.learning_rate", float("nan"), "optim.learning_rate=nan: use a finite number"),
        ("model.build", "jax:__version__", "model.build=jax:__version__: is a str, not a function"),
        ("data.seq_len", 0, "data.seq_len=0: use 1 or more"),
        ("train.global_batch", -4, "train.num_microbatches=1; use 1"),
        ("rules", (("batch", 5),), "config.rules: ('batch', 5) is not (logical name, mesh axis"),
        ("rules", ("batch",), "config.rules: 'batch' is not (logical name, mesh axis"),
    ],
)
def test_an_invalid_value_is_reported_with_its_key_and_what_to_do(tiny, key, value, line):
    section, _, name = key.rpartition(".")
    (tiny[section] if section else tiny)[name] = value
    (fault,) = faults_of(tiny)
    assert line in fault


def test_to_write_a_new_section_walks_over_no_other(monkeypatch):
    def ignore_type(config):
        raise AssertionError("a walk over all sections")

    monkeypatch.setattr(Sections, "ignore_type", ignore_type)
    assert default.get_config().train.steps == 1000


def test_tensor_must_divide_heads_and_feed_forward(tiny):
    tiny.mesh.update(data=1, tensor=8)
    tiny.model.d_ff = 60
    heads, width = faults_of(tiny, num_devices=8)
    assert "model.num_heads=4 is not divisible by mesh.tensor=8; use 8, or" in heads
    assert "model.d_ff=60 is not divisible by mesh.tensor=8; use 56 or 64" in width


def test_learned_positions_must_cover_a_sequence(tiny):
    tiny.model.positions = "learned"
    tiny.data.seq_len = 17
    (fault,) = faults_of(tiny, num_devices=8)
    assert "data.seq_len=17 is more than model.max_seq_len=16; use the same" in fault


@pytest.mark.parametrize(
    ("num_experts", "fault"),
    [
        (0, "mesh.expert=2: the model has no experts; put"),
        (3, "use 2 or 4, or another mesh.expert"),
    ],
)
def test_the_axis_expert_must_divide_the_number_of_experts(tiny, num_experts, fault):
    tiny.mesh.expert, tiny.model.num_experts = 2, num_experts
    (found,) = faults_of(tiny, num_devices=2)
    assert fault in found


def test_faults_of_all_sections_are_reported_together(tiny):
    tiny.mesh.fsdp = 3
    tiny.train.dtype = "int8"
    tiny.model.mlp = "relu"
    tiny.optim.schedule = "step"
    tiny.eval.batches = -1
    named = [fault.split("=")[0] for fault in faults_of(tiny, num_devices=8)]
    wanted = "train.dtype eval.batches optim.schedule mesh.fsdp"
    assert sorted(named) == sorted(wanted.split())


def test_faults_of_everything_that_is_built_are_reported_together(tiny):
    tiny.mesh.update(data=1, tensor=8)
    tiny.model.mlp = "relu"
    tiny.data.build = "meshtrain.data.tokens:build"
    with tiny.unlocked():
        tiny.optim.epsilom = 1.0
    named = [fault.split("=")[0].split(":")[0] for fault in faults_of(tiny, num_devices=8)]
    wanted = "model.num_heads model.mlp optim.epsilom data.path"
    assert sorted(named) == sorted(wanted.split())


@pytest.mark.parametrize(
    "section", ["mesh", "train", "model", "data", "optim", "eval", "checkpoint", "divergence"]
)
def test_an_unknown_key_in_a_file_is_reported_with_the_most_similar_one(tiny, section):
    tiny.data.build = "meshtrain.data.tokens:build"  # the synthetic builder takes any key
    known = [key for key in tiny[section] if key != "build"][0]
    with tiny.unlocked():
        tiny[section][known + "x"] = 1
    assert any(
        fault == f'{section}.{known}x: unknown key (did you mean "{section}.{known}"?)'
        for fault in faults_of(tiny)
    )


def test_missing_keys_sections_and_wrong_types_are_reported(tiny):
    raw = tiny.to_dict()
    del raw["train"]["seed"], raw["model"]["bias"]
    raw["optim"]["b1"] = "0.9"
    raw["checkpoint"]["every"] = True
    assert set(faults_of(raw)) == {
        "train.seed: missing",
        "checkpoint.every=True: not of type int",
    }
    raw["train"]["seed"], raw["checkpoint"]["every"] = 0, 1
    assert set(faults_of(raw)) == {"model.bias: missing", "optim.b1='0.9': not of type float"}
    del raw["eval"]
    raw["evl"] = {}
    unknown, missing = faults_of(raw)
    assert unknown == 'config.evl: unknown section (did you mean "eval"?)'
    assert missing.startswith("config.eval: missing section")


def test_sections_become_frozen(tiny):
    settings = parse(tiny, num_devices=8)
    assert settings.mesh.data == 8
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.train.steps = 5


def test_what_the_caller_passes_is_not_built_from_the_config(tiny):
    tiny.model.build = "no.such:model"
    tiny.data.build = "no.such:data"
    parts = build(parse(tiny, num_devices=1), model="a model", data="batches")
    assert parts[::2] == ("a model", "batches") and parts.heldout_data is None


def test_settings_are_parsed_without_building_anything(tiny):
    tiny.model.build = "no.such:model"
    tiny.mesh.data = -1
    settings = parse(tiny)
    assert settings.mesh.data == -1 and settings.model.build == "no.such:model"
    assert settings.model.options["num_layers"] == 2
    with pytest.raises(TypeError):
        settings.model.options["num_layers"] = 3


def test_settings_are_written_as_a_config_that_parses_to_the_same(tiny):
    settings = parse(tiny, num_devices=8)
    assert settings.to_dict() == {**tiny.to_dict(), "mesh": {**tiny.mesh.to_dict(), "data": 8}}
    assert parse(settings.to_dict()) == settings


# ---- files and overrides ----


def test_overrides_keep_the_types_and_references_of_the_file():
    c = configfile.load_config(
        QUICKSTART,
        [
            "--config.optim.learning_rate=1",
            "--config.train.steps",
            "7",
            "--config.model.bias=True",
            "--config.model.vocab_size=300",
            "--config.data.exclude=('a','b')",
            "--config.rules=(('batch','data'),('embed',None))",
        ],
    )
    assert isinstance(c, ConfigDict)
    assert c.optim.learning_rate == 1.0 and isinstance(c.optim.learning_rate, float)
    assert c.train.steps == 7 and c.model.bias is True and c.data.vocab_size == 300
    assert c.data.exclude == ("a", "b") and c.rules == (("batch", "data"), ("embed", None))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("bias,scale", ("bias", "scale")),
        ("bias, scale,", ("bias", "scale")),
        ("bias", ("bias",)),
        ("layers/*,final_norm", ("layers/*", "final_norm")),
        ("linear,2.0", ("linear", 2.0)),
        ("('bias','scale')", ("bias", "scale")),
        ("", ()),
        ("()", ()),
    ],
)
def test_a_list_on_the_command_line_has_commas(value, expected):
    config = meshtrain.load_config(QUICKSTART, [f"--config.optim.no_decay={value}"])
    assert config.optim.no_decay == expected
    environ = {"MESHTRAIN__OPTIM__NO_DECAY": value}
    assert configfile.read(QUICKSTART, environ=environ)[0].optim.no_decay == expected


@pytest.mark.parametrize(
    ("key", "names", "line"),
    [
        ("optim.no_decay", ("bias,scale",), "no parameter has the name 'bias,scale'"),
        ("optim.no_decay", ("bias", "scael"), "the name 'scael' .did you mean \"scale\"."),
        ("optim.no_decay", ("final_norm",), "the name 'final_norm'; the names are .*scale"),
        (
            "sync.uncompressed",
            ("embedding_",),
            "the name 'embedding_' .did you mean \"embedding\".",
        ),
    ],
)
def test_a_name_in_a_list_that_no_parameter_has_is_rejected(tiny, key, names, line):
    tiny.update_from_flattened_dict({key: names})
    with pytest.raises(meshtrain.ConfigError, match=f"{key}={','.join(names)}: .*{line}"):
        train(tiny)


def test_names_of_parameters_of_other_models_are_accepted_if_the_default_has_them(tiny):
    tiny.train.steps, tiny.eval.batches = 0, 0
    tiny.sync.uncompressed = ("scale", "bias", "final_norm")
    tiny.optim.no_decay = ("bias", "scale", "embedding")
    train(tiny)


def test_every_invalid_override_is_reported():
    overrides = {
        "--config.trian.steps=3": '--config.trian.steps: unknown key (did you mean "train.steps"?)',
        "--config.train.steps=many": "--config.train.steps=many: not of type int, like 600",
        "--config.train.seed=1.5": "--config.train.seed=1.5: not of type int, like 0",
        "--simulate_device=2": "--simulate_device: unknown argument (did you mean "
        '"--simulate_devices"?)',
        "--config.mesh=3": "--config.mesh=3: is a section; set its keys, such as "
        "--config.mesh.auto",
        "--config.train.seed=2": None,
    }
    settings, faults = configfile.read(QUICKSTART, overrides)
    assert faults == [fault for fault in overrides.values() if fault]
    assert settings.train.seed == 2


def test_the_configs_of_the_package_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert configfile.load_config(QUICKSTART).train.steps == 600
    assert configfile.load_config("quickstart").train.steps == 600
    (tmp_path / "quickstart").mkdir()  # a folder of that name, such as a workdir, does not matter
    assert configfile.load_config("quickstart").train.steps == 600


def test_a_config_file_does_not_change_which_modules_are_found_first(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "folder").mkdir()
    for name in ("folder/c.py", "d.py"):
        (tmp_path / name).write_text(
            "from meshtrain.configs import default\nget_config = default.get_config\n"
        )
    before = list(sys.path)
    configfile.load_config(str(tmp_path / "folder" / "c.py"))
    assert sys.path == [*before, str(tmp_path / "folder")]  # its own models are found, last
    configfile.load_config("default")
    configfile.load_config("configs/default.py")
    assert sys.path[: len(before)] == before


def test_a_config_file_that_is_missing_or_broken_is_reported_in_one_line(tmp_path):
    with pytest.raises(meshtrain.ConfigError, match="nope.py: no such file"):
        configfile.load_config("configs/nope.py")
    with pytest.raises(meshtrain.ConfigError, match='did you mean "quickstart"'):
        configfile.load_config("quikstart")
    for text in ("def get_config(:", "import nonsense_module", "x = 1"):
        (tmp_path / "broken.py").write_text(text)
        with pytest.raises(meshtrain.ConfigError, match="broken.py cannot be read: "):
            configfile.load_config(str(tmp_path / "broken.py"))


START = (
    "from meshtrain.configs import default\ndef get_config():\n    config = default.get_config()\n"
)


@pytest.mark.parametrize(
    "text, fault",
    {
        START
        + "    config.train.stps = 3\n    return config": " cannot be read: line 4: stps: unknown "
        "key "
        '(did you mean "steps"?)',
        START + "    config.train.steps = 3": ": get_config() returned None; return the config",
        "import nonsense": " cannot be read: line 1: ModuleNotFoundError: No module named "
        "'nonsense'",
        "config = 1": " cannot be read: it has no function get_config()",
    }.items(),
)
def test_a_mistake_in_a_config_file_is_one_line_with_its_place(tmp_path, text, fault):
    file = tmp_path / "own.py"
    file.write_text(text)
    with pytest.raises(meshtrain.ConfigError) as error:
        configfile.load_config(str(file))
    assert str(error.value) == f"--config={file}{fault}"


def test_something_else_in_place_of_a_model_is_reported_with_what_to_do(tiny):
    with pytest.raises(
        meshtrain.ConfigError, match="model=<lambda>: make a Model of it with meshtrain.from_nnx"
    ):
        train(tiny, model=lambda rngs: None)


FLOATS = [
    f"{section}.{key}"
    for section, values in default.get_config().to_dict().items()
    if isinstance(values, dict)
    for key, value in values.items()
    if isinstance(value, float)
]


@pytest.mark.parametrize(
    "key",
    "train.steps train.global_batch train.log_every train.num_microbatches mesh.fsdp model.d_ff "
    "model.num_layers data.seq_len optim.warmup_steps checkpoint.every eval.batches "
    "health.every".split(),
)
@pytest.mark.parametrize(
    "value", [2**31, 2**63, -(2**80), 10**5000], ids=["31", "63", "-80", "5000"]
)
def test_integers_that_the_program_cannot_count_to_are_rejected(tiny, key, value):
    section, _, name = key.partition(".")
    tiny[section][name] = value
    with pytest.raises(meshtrain.ConfigError) as error:
        build(parse(tiny))
    assert any(x.startswith(f"{key}=") and "2^31" in x for x in error.value.faults)
    assert all(len(fault) < 200 for fault in error.value.faults)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, math.nan) for key in FLOATS),
        *(
            (key, math.inf)
            for key in FLOATS
            if key not in ("optim.clip_norm", "divergence.spike_sigmas")
        ),
        *((key, -math.inf) for key in FLOATS),
        ("model.rope_scaling", ("linear", math.nan)),
        ("train.seed", 2**80),
        ("data.seed", 2**80),
    ],
)
def test_numbers_without_a_meaning_are_rejected(tiny, key, value):
    section, _, name = key.partition(".")
    tiny[section][name] = value
    with pytest.raises(meshtrain.ConfigError, match=f"{key}="):
        build(parse(tiny))


def test_infinite_numbers_with_a_meaning_are_accepted(tiny):
    tiny.optim.clip_norm = tiny.divergence.spike_sigmas = math.inf
    tiny.optim.learning_rate = tiny.checkpoint.every_minutes = -0.0
    build(parse(tiny))


def test_a_name_for_remat_that_no_layer_has_is_rejected(tiny):
    tiny.train.remat = "names:attention,mpl"
    cfg = parse(tiny, num_devices=8)
    with pytest.raises(
        meshtrain.ConfigError, match="'mpl' .did you mean \"mlp\".*it has attention, mlp"
    ):
        assemble(cfg, build(cfg))
    tiny.train.remat = "names:attention,mlp"
    cfg = parse(tiny, num_devices=8)
    assemble(cfg, build(cfg))


def test_a_name_to_offload_that_no_layer_has_is_rejected(tiny):
    tiny.train.remat = "offload:attention,layer_inptu"
    cfg = parse(tiny, num_devices=8)
    with pytest.raises(meshtrain.ConfigError, match="'layer_inptu' .did you mean \"layer_input\""):
        assemble(cfg, build(cfg))


def test_only_layers_have_inputs_to_offload(tiny):
    tiny.train.remat = "offload"
    cfg = parse(tiny, num_devices=8)
    parts = build(cfg)
    loss = dataclasses.replace(parts.model, block=None)
    with pytest.raises(meshtrain.ConfigError, match="train.remat=offload: the model is one loss"):
        assemble(cfg, parts._replace(model=loss))


@pytest.mark.parametrize("remat", ["offload", "offload:attention"])
def test_a_pipeline_does_not_offload_activations(remat, tiny):
    tiny.mesh.pipeline, tiny.train.remat = 2, remat
    with pytest.raises(meshtrain.ConfigError, match=f"train.remat={remat}: with mesh.pipeline=2"):
        build(parse(tiny))
    tiny.train.remat = "full"
    build(parse(tiny))


def test_a_dtype_that_grouped_kernels_lack_is_rejected_before_anything_is_traced(tiny):
    tiny.model.update(num_experts=4, d_expert=16)
    tiny.expert.kernel, tiny.train.dtype = "grouped", "float16"
    cfg = parse(tiny, num_devices=8)
    with pytest.raises(meshtrain.ConfigError, match="train.dtype is float16; use 'batched'"):
        assemble(cfg, build(cfg))
