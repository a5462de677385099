"""Finds what a checkpoint's folder contains besides the checkpoint: leftovers of editors, macOS or NFS."""

import os
from pathlib import Path, PurePosixPath

from meshtrain.checkpoint.manifest import NAME, Manifest


def find(directory: Path, manifest: Manifest) -> list[str]:
    """Returns the paths that the manifest does not list; of a folder without listed files, only its own."""
    files = {NAME, f"._{NAME}", *manifest.files}  # the second: of a crash while it was replaced
    folders = {str(parent) for name in files for parent in PurePosixPath(name).parents}
    found = []
    for root, subfolders, names in os.walk(directory):
        inside = Path(root).relative_to(directory)
        paths = [str(inside / name) for name in (*subfolders, *names)]
        found += [path for path in paths if path not in files | folders]
        subfolders[:] = [name for name in subfolders if str(inside / name) in folders]
    return sorted(found)


def note(directory: Path, manifest: Manifest) -> str:
    """Returns a note on the files that the manifest does not list, or an empty string."""
    found = find(directory, manifest)
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"ignores {', '.join(found[:3])}{more}: not in the manifest" if found else ""
