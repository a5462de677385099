"""Configurations of the package: `--config=NAME`; `default` documents every key."""

from meshtrain import lazy

lazy.load_modules_of(__name__)
