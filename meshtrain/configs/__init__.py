"""Configurations of the package: `--config=NAME`; `default` documents every key."""
