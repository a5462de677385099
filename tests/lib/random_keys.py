"""Records how random keys are used: each key that a program folds, splits or draws from.

The keys are of a PRNG of their own, which computes what threefry does and records its calls as they
are executed, on every device.
"""

import collections
from typing import Any

import jax
import jax.extend
import numpy as np


class KeyRecord:
    """The uses of random keys so far. A key is two words."""

    def __init__(self):
        # Shapes of the bits that are drawn from each key.
        self.drawn: dict[tuple, set] = collections.defaultdict(set)
        # Kinds of use of each key: fold_in, split, random_bits.
        self.kinds: dict[tuple, set[str]] = collections.defaultdict(set)
        # For each new key, what it was made of: the parent and a number.
        self.origins: dict[tuple, set] = collections.defaultdict(set)

    def clear(self) -> None:
        """Forgets all uses so far."""
        for uses in (self.drawn, self.kinds, self.origins):
            uses.clear()

    def faults(self) -> list[str]:
        """Returns a line for each key that is used twice."""
        found = []
        for key, kinds in self.kinds.items():
            if len(kinds) > 1:
                found.append(f"{key}: {sorted(kinds)}")
        for key, shapes in self.drawn.items():
            if len(shapes) > 1:
                found.append(f"{key}: bits of {sorted(shapes)}")
        for key, origins in self.origins.items():
            if len(origins) > 1:
                found.append(f"{key}: made of {sorted(origins)}")
        return found

    def num_drawn(self, size: int | None = None) -> int:
        """Returns from how many keys bits were drawn: those of `size` numbers, or all."""
        sizes = [{int(np.prod(shape)) for shape in shapes} for shapes in self.drawn.values()]
        return sum(size is None or size in found for found in sizes)

    def _used(self, kind: str, words: Any) -> tuple:
        key = tuple(np.asarray(words).tolist())
        self.kinds[key].add(kind)
        return key


def record(monkeypatch) -> KeyRecord:
    """Returns the record of all keys that `jax.random.key` makes from here on."""
    found = KeyRecord()

    def wrap(words):
        return jax.random.wrap_key_data(words, impl="threefry2x32")

    def children(parent, words, numbers):
        for child, number in zip(np.reshape(words, (-1, 2)).tolist(), numbers, strict=True):
            found.origins[tuple(child)].add((parent, int(number)))

    def fold_in(words, number):
        new = jax.random.key_data(jax.random.fold_in(wrap(words), number))

        def note(words, number, new):
            children(found._used("fold_in", words), new, [number])

        jax.debug.callback(note, words, number, new)
        return new

    def split(words, shape):
        new = jax.random.key_data(jax.random.split(wrap(words), shape))

        def note(words, new):
            children(found._used("split", words), new, range(np.prod(shape, dtype=int)))

        jax.debug.callback(note, words, new)
        return new

    def random_bits(words, bit_width, shape):
        def note(words):
            found.drawn[found._used("random_bits", words)].add((bit_width, *shape))

        jax.debug.callback(note, words)
        return jax.random.bits(wrap(words), shape, f"uint{bit_width}")

    real_key = jax.random.key
    implementation = jax.extend.random.define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: jax.random.key_data(real_key(seed)),
        split=split,
        random_bits=random_bits,
        fold_in=fold_in,
        name=f"recorded_{id(found)}",
        tag="rec",
    )
    monkeypatch.setattr(jax.random, "key", lambda seed, **_: real_key(seed, impl=implementation))
    return found
