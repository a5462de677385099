"""A function for worker processes, which the tests of workers.py run."""

import os
import signal

from meshtrain.data.workers import Message, serve
from meshtrain.errors import ConfigError


class Squares:
    def __init__(self, settings):
        self.add = settings["add"]

    def __call__(self, item):
        match item.value:
            case "fault":
                raise ConfigError("one", "two")
            case "error":
                raise RuntimeError("a bug of ours")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "pid":
                return Message(os.getpid())
            case "print":
                print("printed", flush=True)
        return Message(None, [item.arrays[0] ** 2 + self.add])


if __name__ == "__main__":
    serve(Squares)
