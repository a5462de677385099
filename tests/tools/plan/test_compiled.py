"""Audits that the planner compiles, and keeps."""

import subprocess

from meshtrain.configs import gpt2
from meshtrain.tools.plan import compiled


def test_variables_do_not_change_what_is_compiled(tmp_path, monkeypatch):
    def run(command, *, env, **options):
        seen.append([name for name in env if name.startswith("MESHTRAIN__")])
        raise subprocess.TimeoutExpired(command, 1)

    seen = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MESHTRAIN__TRAIN__REMAT", "full")
    monkeypatch.setattr(compiled.subprocess, "run", run)
    audit, fault = compiled.audited(gpt2.get_config().to_dict(), "h100:8")
    assert audit is None and "not compiled in" in fault and seen == [[]]


def test_an_audit_is_kept_until_the_config_or_a_source_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runs = []

    def audit(config, target):
        runs.append((config["train"]["steps"], target))
        return (
            ({"memory": {"peak": len(runs)}}, "") if target != "h100:3" else (None, "not compiled")
        )

    monkeypatch.setattr(compiled, "_audit", audit)
    config = gpt2.get_config().to_dict()
    assert [compiled.audited(config, "h100:8")[0]["memory"]["peak"] for _ in range(2)] == [1, 1]
    config["train"]["steps"] += 1
    assert compiled.audited(config, "h100:8") == compiled.audited(config, "h100:8") != (None, "")
    for _ in range(2):  # what did not compile is tried again
        assert compiled.audited(config, "h100:3") == (None, "not compiled")
    assert len(runs) == 4
    monkeypatch.setattr(compiled, "version", lambda name: "0.0.0")
    compiled.audited(config, "h100:8")
    config["model"]["build"] = "my_model:build"
    for _ in range(2):  # code that may change
        compiled.audited(config, "h100:8")
    assert len(runs) == 7
    config["model"]["build"] = gpt2.get_config().model.build
    source = tmp_path / "package" / "module.py"
    source.parent.mkdir()
    monkeypatch.setattr(compiled.meshtrain, "__file__", str(source))
    for code in ("a = 1", "a = 1", "a = 2"):
        source.write_text(code)
        compiled.audited(config, "h100:8")
    assert len(runs) == 9
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    for _ in range(2):
        compiled.audited(config, "h100:8")
    assert len(runs) == 10
    for file in (tmp_path / "meshtrain" / "audits").iterdir():
        file.write_text("{")  # damaged
    compiled.audited(config, "h100:8")
    assert len(runs) == 11
