"""The functions that `build` of a section names."""

import importlib

import pytest

from meshtrain.config import build
from meshtrain.config.parse import parse
from meshtrain.errors import ConfigError


def test_the_builders_of_the_package_are_those_that_return_what_their_section_needs():
    for section, paths in build.BUILDERS.items():
        for path in paths:
            function = build.resolve(path, key=f"{section}.build")
            returns = function.__annotations__["return"]
            assert getattr(returns, "__name__", returns) == build.KINDS[section]
    # All of them: no other public function of the optimizers' modules returns one.
    for name in ("base", "others", "muon"):
        module = importlib.import_module(f"meshtrain.optim.{name}")
        for function in vars(module).values():
            returns = getattr(function, "__annotations__", {}).get("return")
            takes_rate = "learning_rate" in getattr(function, "__annotations__", {})
            if getattr(returns, "__name__", returns) == build.KINDS["optim"] and takes_rate:
                path = f"{function.__module__}:{function.__name__}"
                assert path in build.BUILDERS["optim"]


@pytest.mark.parametrize(
    ("key", "path", "message"),
    [
        (
            "optim.build",
            "adam",
            "use one of meshtrain.optim.base:adamw, meshtrain.optim.others:lion",
        ),
        ("optim.build", "", "use one of meshtrain.optim.base:adamw"),
        ("model.build", "llama", "use one of meshtrain.models.transformer:build, or a package"),
        (
            "data.build",
            "tokens",
            "use one of meshtrain.data.tokens:build, meshtrain.data.chat:build",
        ),
        ("optim.build", "meshtrain.optim.base:adam", 'did you mean "meshtrain.optim.base:adamw"?'),
        (
            "optim.build",
            "no_such_module_here:lamb",
            "if no_such_module_here is a module of yours, add its folder to PYTHONPATH",
        ),
    ],
)
def test_a_name_that_is_no_builder_leads_to_those_there_are(tiny, key, path, message):
    section = key.partition(".")[0]
    with tiny.unlocked():
        tiny[section].build = path
    with pytest.raises(ConfigError) as caught:
        build.build(parse(tiny))
    assert any(
        fault.startswith(f"{key}={path}: ") and message in fault for fault in caught.value.faults
    )
