"""The files of a workdir."""

import pytest

from meshtrain.errors import ConfigError
from meshtrain.monitor.writer import Writer
from meshtrain.storage import LocalFolder


def test_the_history_of_configs_bears_files_of_others(tmp_path):
    writer = Writer(LocalFolder(tmp_path), leader=True)
    (tmp_path / "config_history").mkdir()
    (tmp_path / "config_history" / "0001 copy.json").touch()
    for seed in range(3):
        writer.write_config({"seed": seed})
    names = {"0001 copy.json", "0001.json", "0002.json"}
    assert {path.name for path in (tmp_path / "config_history").iterdir()} == names


def test_a_history_of_configs_that_is_no_folder_is_one_fault(tmp_path):
    writer = Writer(LocalFolder(tmp_path), leader=True)
    (tmp_path / "config_history").touch()
    writer.write_config({})
    with pytest.raises(ConfigError, match="config_history/0001.json: File exists"):
        writer.write_config({"seed": 1})


def test_a_file_is_not_replaced_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "config.json.new").symlink_to(tmp_path / "mine")
    Writer(LocalFolder(tmp_path), leader=True).write_config({"seed": 0})
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "config.json").is_symlink()
