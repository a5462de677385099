"""`meshtrain report`: one HTML page about one or several runs, made from the files of their workdirs. No jax."""
