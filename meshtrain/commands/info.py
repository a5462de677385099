"""Prints versions, processes, devices and settings, and tests an all-reduce.

  meshtrain info                       # with several processes, process 0 prints
  meshtrain info --simulate_devices=8

The all-reduce runs over all devices and, with several processes, over the processes. The exit code is 1
if a result is wrong.
"""

import argparse

from meshtrain.cluster import environment


def add_flags(flags: argparse.ArgumentParser) -> None:
    environment.add_flags(flags)


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns the exit code."""
    from meshtrain.analysis import info

    return info.run(args)
