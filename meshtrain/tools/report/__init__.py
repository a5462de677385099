"""`meshtrain report`: one HTML page about runs, made from the files of their workdirs. No jax."""
