"""Moves the planted bugs along with the code after a change of the lines around them.

  python tests/mutants/rebase.py BASE_COMMIT              all bugs whose patch no longer applies
  python tests/mutants/rebase.py BASE_COMMIT 'ring_*'     some of them

At BASE_COMMIT all patches must apply. Each is planted in the files of that commit, and its change
is merged into the files of the working tree: three-way by lines, then by words, into the same or
the renamed file. If both conflict, its lines replace the same lines elsewhere in the package, at
any indent, if they occur there once. The patch keeps its header, and its results get the digest of
the new patch, since the bug is the same. Read the new patches: a merge by words may misplace a
line.

The names printed at the end conflict: write these patches by hand, and then give the results of the
patches at BASE_COMMIT the digests of the new ones with

  python tests/mutants/rebase.py BASE_COMMIT --rekey
"""

import argparse
import difflib
import fnmatch
import json
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import run  # run.py in this folder

CONTEXT = 3  # lines around a change, as in `git diff`
WORD = re.compile(r"\n *|\w+| +|.")  # a line's indent belongs to its start


def git(*args: str) -> str:
    return subprocess.check_output(["git", *args], cwd=run.ROOT, text=True)


def header_and_diff(patch: str) -> tuple[str, str]:
    header, _, diff = patch.partition("\n\n")
    return header, diff


def files_of(diff: str) -> list[str]:
    return re.findall(r"^\+\+\+ b/(\S+)", diff, re.MULTILINE)


def applies(patch: str) -> bool:
    command = ["git", "apply", "--check", "-"]
    done = subprocess.run(command, cwd=run.ROOT, input=patch, text=True, capture_output=True)
    return done.returncode == 0


def renamed_since(base: str) -> dict[str, str]:
    """Returns the new path of each file that git finds renamed since `base`."""
    lines = git("diff", "-M", "--name-status", "--diff-filter=R", base).splitlines()
    return {old: new for _, old, new in (line.split("\t") for line in lines)}


def plant_at_base(base: str, patch: str, folder: Path) -> dict[str, tuple[str, str]]:
    """Returns each file of the patch as it was at `base`, without and with the bug."""
    files = files_of(patch)
    before = {file: git("show", f"{base}:{file}") for file in files}
    for file, text in before.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    run.plant(patch, folder)
    return {file: (before[file], (folder / file).read_text()) for file in files}


def merge(today: str, before: str, after: str, by_word: bool = False) -> str | None:
    """Returns today's text with the change from `before` to `after`, or None if they conflict."""
    if by_word:
        words = [[json.dumps(word) for word in WORD.findall(t)] for t in (today, before, after)]
        merged = merge(*("\n".join([*one, ""]) for one in words))
        return merged and "".join(map(json.loads, merged.splitlines()))
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("today", "before", "after")]
        for path, text in zip(paths, (today, before, after), strict=True):
            path.write_text(text)
        command = ["git", "merge-file", "--stdout", *map(str, paths)]
        done = subprocess.run(command, text=True, capture_output=True)
    return done.stdout if done.returncode == 0 and done.stdout != today else None


def indent_of(lines: list[str]) -> str:
    return min((re.match(" *", line)[0] for line in lines if line.strip()), key=len, default="")


def replace_lines(today: str, before: str, after: str) -> tuple[str, int]:
    """Returns today's text with each changed run of lines replaced, at any indent.

    The number is how often the lines were found. The text is right if it is 1; a change of several
    runs stops at the first that is not found once.
    """
    old, new, lines = before.splitlines(), after.splitlines(), today.splitlines()
    num_places = 0
    changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(0)
    for group in changes:
        start, end, new_start, new_end = group[0][1], group[-1][2], group[0][3], group[-1][4]
        # A line that is added alone is placed by the lines around it.
        margin = 0 if end > start else 1
        for around in range(margin, CONTEXT + 1):
            removed = old[max(start - around, 0) : end + around]
            wanted = textwrap.dedent("\n".join(removed)).splitlines()
            places = []
            for at in range(len(lines) - len(removed) + 1):
                there = textwrap.dedent("\n".join(lines[at : at + len(removed)])).splitlines()
                if there == wanted:
                    places.append(at)
            if len(places) <= 1:
                break
        num_places = len(places)
        if num_places != 1:
            return today, num_places
        at = places[0]
        shift = indent_of(lines[at : at + len(removed)])
        added = new[max(new_start - around, 0) : new_end + around]
        cut = len(indent_of(removed))
        added = [shift + line[cut:] if line.strip() else "" for line in added]
        lines[at : at + len(removed)] = added
    return "\n".join([*lines, ""]), num_places


def rebase(base: str, patch: str, renamed: dict[str, str]) -> str | None:
    """Returns the patch for today's files, or None if it conflicts with them."""
    header, _ = header_and_diff(patch)
    diffs = []
    with tempfile.TemporaryDirectory() as folder:
        changes = plant_at_base(base, patch, Path(folder))
    for file, (before, after) in changes.items():
        path = run.ROOT / renamed.get(file, file)
        today = path.read_text() if path.exists() else ""
        merged = merge(today, before, after) or merge(today, before, after, by_word=True)
        if merged is None:
            found = []
            for path in sorted((run.ROOT / "meshtrain").rglob("*.py")):
                today = path.read_text()
                text, num_places = replace_lines(today, before, after)
                found += [(path, today, text)] * num_places
            if len(found) != 1:
                return None
            path, today, merged = found[0]
        diffs.append(unified(path.relative_to(run.ROOT).as_posix(), today, merged))
    return f"{header}\n\n{''.join(diffs)}"


def unified(file: str, before: str, after: str) -> str:
    texts = before.splitlines(keepends=True), after.splitlines(keepends=True)
    return "".join(difflib.unified_diff(*texts, f"a/{file}", f"b/{file}", n=CONTEXT))


def rekey(digests: dict[tuple[str, str], str]) -> None:
    """Gives the results of a bug's old digest its new one: `digests` is by bug and old digest."""
    lines = []
    for line in run.RESULTS.read_text().splitlines():
        result = json.loads(line)
        result["digest"] = digests.get((result["mutant"], result["digest"]), result["digest"])
        lines.append(json.dumps(result) + "\n")
    run.RESULTS.write_text("".join(lines))


def main() -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("base", help="a commit where all patches apply")
    parser.add_argument("names", nargs="*", default=["*"], help="names of bugs, * as in a shell")
    parser.add_argument("--rekey", action="store_true", help="only give results their new digests")
    args = parser.parse_args()
    chosen = [one for one in run.load() if any(fnmatch.fnmatch(one.name, n) for n in args.names)]
    digests: dict[tuple[str, str], str] = {}
    if args.rekey:
        for mutant in chosen:
            old = git("show", f"{args.base}:tests/mutants/{mutant.name}.patch")
            digests[mutant.name, run.digest_of(old)] = mutant.digest
        rekey(digests)
        return 0
    renamed, conflicts = renamed_since(args.base), []
    chosen = [mutant for mutant in chosen if not applies(mutant.patch)]
    for mutant in chosen:
        patch = rebase(args.base, mutant.patch, renamed)
        if patch is None or not applies(patch):
            conflicts.append(mutant.name)
            continue
        (run.FOLDER / f"{mutant.name}.patch").write_text(patch)
        digests[mutant.name, mutant.digest] = run.digest_of(patch)
    rekey(digests)
    print(f"{len(chosen) - len(conflicts)} patches follow the code, {len(conflicts)} conflict:")
    print(*conflicts, sep="\n")
    return 1 if conflicts else 0


if __name__ == "__main__":
    sys.exit(main())
