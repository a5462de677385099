"""Chooses a layout before the hardware is there.

A closed form predicts step time (cost.py) and memory (memory.py); search.py ranks all layouts.
"""

from meshtrain import lazy

lazy.load_modules_of(__name__)
