"""What training sends between two hosts, counted at their interfaces, is what the audit says."""

import sys
from types import SimpleNamespace

import pytest

from benchmarks.lib import network
from benchmarks.parallel import slow_network

FAULT = network.fault()
needs_network = pytest.mark.skipif(bool(FAULT), reason=FAULT)
# Small arrays would be sent in small packets, of which headers are a larger part.
TOY = dict(layers=1, width=192, steps=3, rounds=1, wires=["float32", "int8"], mbit=[100.0])


@pytest.fixture
def toy(monkeypatch):
    """The smallest measurement: two hosts with one device each."""
    flags = [f"--{name}={TOY[name]}" for name in ("layers", "width")]
    monkeypatch.setattr(sys, "argv", ["slow_network.py", *flags, "--wires", *TOY["wires"]])
    return SimpleNamespace(**TOY)


@pytest.mark.slow
@pytest.mark.multiprocess
@needs_network
def test_an_interface_counts_the_bytes_of_the_audit(toy):
    layout = slow_network.Layout(hosts=2, devices=1)
    cases = layout.cases(toy.wires)
    audited = {case: slow_network.expected_bytes(toy, layout, case) for case in cases}
    samples = slow_network.measure(toy, layout)
    exact, compressed = slow_network.figures(layout, samples, audited)
    assert exact["sent / audit"] == pytest.approx(1, abs=0.04)
    assert compressed["sent / audit"] == pytest.approx(1, abs=0.04)
    assert exact["MB sent"] > 3.5 * compressed["MB sent"]
    for row in samples:
        assert len(row["seconds"]) == len(row["losses"]) == toy.steps


@pytest.mark.multiprocess
@needs_network
def test_hosts_end_with_the_process_that_started_them():
    with network.joined(2) as hosts:
        holders = [*hosts.holders, hosts.bridge]
        assert hosts.sent() == [pytest.approx(0, abs=2000)] * 2
        assert all(holder.poll() is None for holder in holders)
    assert all(holder.poll() == 0 for holder in holders)


def test_without_permission_one_line_says_why(monkeypatch, capsys):
    monkeypatch.setattr(network, "fault", lambda: "network namespaces are not permitted (no)")
    monkeypatch.setattr(sys, "argv", ["slow_network.py"])
    with pytest.raises(SystemExit, match="2"):
        slow_network.main()
    assert capsys.readouterr().err == "network namespaces are not permitted (no)\n"


@pytest.mark.parametrize(
    ("text", "number"),
    [("2x1", 4), ("4x1", 6), ("2x2", 10)],
)
def test_a_layout_has_the_cases_that_differ_on_it(text, number):
    layout = slow_network.Layout.parse(text)
    cases = layout.cases(slow_network.WIRES)
    assert layout.name == text and cases[0] == ("float32", "xla")
    assert len({*cases}) == len(cases) == number
