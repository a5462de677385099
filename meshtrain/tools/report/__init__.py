"""`meshtrain report`: one HTML page about runs, made from the files of their workdirs. No jax."""

from meshtrain import lazy

lazy.load_modules_of(__name__)
