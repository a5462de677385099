"""The default config and its sections."""

from typing import Any

from ml_collections import ConfigDict

from meshtrain import moved


class Sections(ConfigDict):
    """The whole config, in which a `ConfigDict` or a dict can replace a section."""

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, dict):
            value = ConfigDict(value)
        if isinstance(value, ConfigDict) and key in self:
            # Without this, a value has to be of the type of the one that it replaces: `Section`.
            with self.ignore_type():
                super().__setitem__(key, value)
        else:
            super().__setitem__(key, value)


class Section(ConfigDict):
    """A section whose renamed keys can also be read and set under their old names.

    A user's get_config() may still use these.
    """

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(self._new_key(key))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(self._new_key(key), value)

    def _new_key(self, key: str) -> str:
        """Returns the new name of a key of this section; any other key as it is."""
        if key.startswith("_"):
            return key
        for old, new in moved.KEYS.items():
            section, _, old_key = old.partition(".")
            new_key = new.partition(".")[2]
            # A section does not know its name, but it has the new key.
            if old_key == key and new_key in self.keys():
                moved.report(old, new)
                return new_key
        return key
