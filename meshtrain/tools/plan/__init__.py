"""Chooses a layout before the hardware is there: a closed form of step time and memory, and a search; see cost.py."""
