r"""Prints a script that completes verbs, flags, config keys and their values in a shell.

  mkdir -p ~/.local/share/bash-completion/completions
  meshtrain completion bash > ~/.local/share/bash-completion/completions/meshtrain

  mkdir -p ~/.zfunc                                     # a folder of fpath, before compinit
  meshtrain completion zsh > ~/.zfunc/_meshtrain

  mkdir -p ~/.config/fish/completions
  meshtrain completion fish > ~/.config/fish/completions/meshtrain.fish

The script holds all that it completes: a key press starts no Python. Write it again after an
update.
"""

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import meshtrain
from meshtrain import console, hardware
from meshtrain.cli import app, verbs
from meshtrain.cli.config import leaves
from meshtrain.cli.verbs import Verb
from meshtrain.config import describe
from meshtrain.config.parse import parse
from meshtrain.configs import default
from meshtrain.errors import ConfigError
from meshtrain.schedules import SCHEDULES

CONFIGS = Path(default.__file__).parent
FILES = "FILES"  # stands for the names of files
NAMES_OF_FILES = {"DIR", "FILE", "FILE.svg", "INPUT", "PATH", "SOURCE"}  # metavars


class Option(NamedTuple):
    """A flag or a key, such as `--config.train.steps`, or an argument without a name."""

    name: str
    takes_value: bool  # behind =
    values: tuple[str, ...]  # FILES among them: or a file
    help: str


def options_of(verb: str) -> list[Option]:
    """Returns the flags of a verb, and its arguments without a name."""
    parser = app.parser_of(verb)
    found = []
    for action in parser._actions:
        if action.dest == "_":  # --config.KEY
            continue
        values = tuple(action.choices or ())
        if action.dest in ("config", "diff"):
            values += tuple(sorted(path.stem for path in CONFIGS.glob("[!_]*.py")))
        if action.dest == "schedule":
            values += tuple(SCHEDULES)
        if action.dest == "device":
            values += tuple(hardware.devices())
        is_file = action.type is Path or action.metavar in NAMES_OF_FILES
        if is_file or action.dest in ("diff", "device"):
            values += (FILES,)
        help_text = parser._get_formatter()._expand_help(action) if action.help else ""
        takes_value = action.nargs in (None, "?")
        names = action.option_strings or [""]
        if action.dest == "diff":
            names = [*names, ""]  # its second value follows a value, not the flag
        for name in names:
            found.append(Option(name, takes_value, values, help_text))
    return [option for option in found if option.name.startswith("--") or not option.name]


def keys() -> list[Option]:
    """Returns the keys of configs/default.py, as flags."""
    meanings = {entry.name: entry.comment for entry in describe.entries(describe.source())}
    found = []
    for key, value in leaves(default.get_config().to_dict()):
        values: tuple[str, ...] = ()
        if isinstance(value, bool):
            values = ("True", "False")
        elif isinstance(value, str):
            values = _choices(key) or (FILES,)
        found.append(Option(f"--config.{key}", True, values, meanings.get(key, "")))
    return found


def _choices(key: str) -> tuple[str, ...]:
    """Returns the values that the checks of a config name when a key has none of them.

    Those of `model` are checked where models are built, with jax: they are not asked for.
    """
    config = default.get_config()
    config.update_from_flattened_dict({key: "?"})
    try:
        parse(config)
    except ConfigError as error:
        for fault in error.faults:
            if found := re.match(rf"{re.escape(key)}='\?': use one of (.*)", fault):
                choices = found[1].split(", ")
                return tuple(choice for choice in choices if re.fullmatch(r"\w+", choice))
    return ()


# ---- bash and zsh: one function finds the candidates, and each shell shows them ----

# A flag that takes a value ends with =, a section with a dot: no space follows either.
CANDIDATES = r"""
# Prints what may stand at the end of a line, one a line: WORD is its last word, which is not
# complete, and the others are the words between meshtrain and it. FILES stands for files.
_meshtrain_candidates() {
  local word="$1" verb=train previous= argument= is_first=1
  shift
  for argument in "$@"; do
    if [ -n "$is_first" ]; then
      case "$argument" in
        @VERBS_PATTERN@|help) verb=$argument ;;
      esac
    fi
    is_first=
    if [ "$argument" = -- ]; then is_first=1 verb=train; fi
    previous=$argument
  done
  case "$word" in
    -*=*) _meshtrain_values "$verb" "${word%%=*}" "${word%%=*}=" ;;
    --config.*.*) _meshtrain_keys "$verb" ;;
    --config.*) _meshtrain_sections "$verb" ;;
    -*) _meshtrain_flags "$verb"; [ "$verb" = launch ] || _meshtrain_top "$verb" ;;
    *)
      if [ -n "$is_first" ] || [ "$verb" = help ]; then
        printf '%s\n' @VERBS@
      else
        _meshtrain_values "$verb" "$previous" ""
      fi ;;
  esac
}
"""

BASH = r"""
_meshtrain() {
  local line="${COMP_LINE:0:COMP_POINT}" typed= word= words=() candidates= file=
  # A word of the line: plain, escaped and quoted characters, then perhaps a quote that is open.
  local plain="[^[:space:]\\'\"]|\\\\." quoted="'[^']*'|\"([^\\\"]|\\\\.)*\""
  local open="'[^']*|\"([^\\\"]|\\\\.)*"
  local pattern="^[[:space:]]*(($plain|$quoted)*($open)?\\\\?)"
  while [[ $line =~ $pattern && -n ${BASH_REMATCH[0]} ]]; do
    typed=${BASH_REMATCH[1]}  # empty behind a space at the end of the line
    words+=("$typed")
    line=${line:${#BASH_REMATCH[0]}}
  done
  word=${typed//[\\\'\"]/}
  candidates=$(_meshtrain_candidates "$word" "${words[@]:1:${#words[@]}-2}")
  COMPREPLY=($(compgen -W "${candidates//FILES/}" -- "$word"))
  # Readline takes what follows = for the word, unless a quote was opened before it.
  if [[ $word == *=* && $COMP_WORDBREAKS == *=* && $typed != [\'\"]* ]]; then
    COMPREPLY=("${COMPREPLY[@]#"${word%%=*}="}")
  fi
  if [[ $candidates == *FILES* && ${#COMPREPLY[@]} -gt 0 && -n ${word#*=} ]]; then
    compopt -o filenames 2> /dev/null
    while IFS= read -r file; do COMPREPLY+=("$file"); done < <(compgen -f -- "${word#*=}")
  fi
  if [[ ${COMPREPLY[0]-} == *[=.] ]]; then compopt -o nospace 2> /dev/null; fi
}
# default: where nothing else completes a word, the name of a file does.
complete -o default -F _meshtrain meshtrain
"""

ZSH = r"""
_meshtrain() {
  local -a found
  local has_files=
  local -i shown=$compstate[nmatches]
  found=("${(@f)$(_meshtrain_candidates "$PREFIX" "${(@)words[2,CURRENT-1]}")}")
  if (( ${found[(I)FILES]} )); then has_files=1; fi
  found=(${found:#FILES})
  if [[ $PREFIX == *=* ]]; then
    compset -P '*='
    found=(${found#*=})
  fi
  compadd -S '' -- ${(M)found:#*[=.]}
  compadd -- ${found:#*[=.]}
  if [[ -n $has_files ]] || (( compstate[nmatches] == shown )); then _files; fi
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  _meshtrain "$@"
else
  compdef _meshtrain meshtrain
fi
"""


def shell_lines(shell: str) -> Iterator[str]:
    """Yields the lines of the script for bash or zsh."""
    if shell == "zsh":
        yield "#compdef meshtrain"
    yield f"# Completion of meshtrain {meshtrain.__version__}, by `meshtrain completion {shell}`."
    options = {verb: options_of(verb) for verb in verbs.NAMES}
    with_keys = [verb for verb in verbs.NAMES if _has_keys(verb)]
    known_keys = keys()

    yield from _function(
        "_meshtrain_flags",
        {
            verb: [option.name + "=" * option.takes_value for option in found if option.name]
            for verb, found in options.items()
        },
    )
    sections = dict.fromkeys(_section(key) for key in known_keys)
    names = [f"{key.name}=" for key in known_keys]
    yield from _function("_meshtrain_keys", {"|".join(with_keys): names})
    yield from _function("_meshtrain_sections", {"|".join(with_keys): sections})
    yield from _function("_meshtrain_top", {"|".join(with_keys): ["--config."]})
    yield from _values_function(options, known_keys)
    yield CANDIDATES.replace("@VERBS_PATTERN@", "|".join(verbs.NAMES)).replace(
        "@VERBS@", " ".join((*verbs.NAMES, "help"))
    )
    yield BASH if shell == "bash" else ZSH


def _has_keys(verb: str) -> bool:
    return verbs.load(verb).reads != "flags"


def _section(key: Option) -> str:
    """Returns `--config.train.` for a key of this section; a key without one is the key itself."""
    _, section, *rest = key.name.split(".")
    return f"--config.{section}" + ("." if rest else "=")


def _function(name: str, words_by_case: dict[str, Iterable[str]]) -> Iterator[str]:
    """Yields a function that prints words, one a line, by its first argument."""
    yield f"{name}() {{"
    yield '  case "$1" in'
    for case, words in words_by_case.items():
        yield f"    {case}) printf '%s\\n' {' '.join(words)} ;;"
    yield "  esac"
    yield "}"


def _values_function(
    options: dict[str, list[Option]], known_keys: Iterable[Option]
) -> Iterator[str]:
    """Yields a function that prints the values of a flag of a verb, each behind a prefix."""
    yield "_meshtrain_values() {  # VERB FLAG PREFIX"
    yield '  case "$1:$2" in'
    for key in known_keys:
        if key.values:
            yield f"    *:{key.name}) {_printed(key.values)} ;;"
    for verb, found in options.items():
        for option in found:
            if option.name and option.values:
                yield f"    {verb}:{option.name}) {_printed(option.values)} ;;"
            elif option.name and option.takes_value:
                yield f"    {verb}:{option.name}) ;;"
    for verb, found in options.items():
        arguments = {}
        for option in found:
            if not option.name and option.values:
                # A word such as `prune` follows the verb; a file may follow anything.
                previous = "*" if FILES in option.values else verb
                arguments[previous] = option.values
        for previous, values in arguments.items():
            yield f"    {verb}:{previous}) {_printed(values)} ;;"
    yield "  esac"
    yield "}"


def _printed(values: Iterable[str]) -> str:
    lines = [FILES if value == FILES else f'"$3{value}"' for value in values]
    return f"printf '%s\\n' {' '.join(lines)}"


# ---- fish ----

# fish completes no flags after --: there the run's own command line is completed, as one by itself.
FISH_RUN = r"""
function __meshtrain_run_words  # prints launch's words after --; fails where there is none
    set -l words (commandline -opc)
    __fish_seen_subcommand_from launch; or return 1
    set -l at (contains -i -- -- $words); or return 1
    set -e words[1..$at]
    string escape -- $words
    return 0  # also without words
end
function __meshtrain_complete_run
    complete -C (string join ' ' -- meshtrain (__meshtrain_run_words) (commandline -ct))
end
complete -c meshtrain -n '__meshtrain_run_words > /dev/null' -F -a '(__meshtrain_complete_run)'
"""


def fish_lines() -> Iterator[str]:
    """Yields the lines of the script for fish, whose completions have descriptions."""
    yield f"# Completion of meshtrain {meshtrain.__version__}, by `meshtrain completion fish`."
    yield "complete -c meshtrain -f"
    no_verb = "not __fish_seen_subcommand_from $__meshtrain_verbs"
    yield f"set -g __meshtrain_verbs {' '.join(verbs.NAMES)}"
    for verb in verbs.NAMES:
        summary = verbs.load(verb).summary
        yield f"complete -c meshtrain -n '{no_verb}' -a {verb} -d {_fish_text(summary)}"
    for verb in verbs.NAMES:
        seen = f"__fish_seen_subcommand_from {verb}"
        for option in options_of(verb):
            condition = seen
            if not option.name and FILES not in option.values:  # one word, such as `prune`
                condition += f"; and not __fish_seen_subcommand_from {' '.join(option.values)}"
            yield _fish_line(option, condition)
        if verb == "train":  # flags without a verb are those of train
            for option in options_of(verb):
                yield _fish_line(option, no_verb)
    with_keys = [verb for verb in verbs.NAMES if _has_keys(verb)]
    seen = f"__fish_seen_subcommand_from {' '.join(with_keys)}; or {no_verb}"
    for key in keys():
        yield _fish_line(key, seen)
    yield FISH_RUN


def _fish_line(option: Option, condition: str) -> str:
    parts = [f"complete -c meshtrain -n '{condition}'"]
    if option.name:
        parts.append(f"-l {option.name.removeprefix('--')}")
    if option.name and option.takes_value:  # -x: and no file is one
        parts.append("-r -F" if FILES in option.values else "-x")
    elif not option.name and FILES in option.values:
        parts.append("-F")
    values = " ".join(value for value in option.values if value != FILES)
    if values:
        parts.append(f"-a '{values}'")
    if option.name and option.help:
        parts.append(f"-d {_fish_text(option.help)}")
    return " ".join(parts)


def _fish_text(text: str) -> str:
    """Returns the first clause of a text, quoted."""
    first = re.split(r"[;(:]", " ".join(text.split()), maxsplit=1)[0].strip()
    escaped = first.replace("\\", r"\\").replace("'", r"\'")
    return f"'{escaped}'"


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(args: argparse.Namespace) -> int:
    """Prints the script; returns the exit code."""
    lines = fish_lines() if args.shell == "fish" else shell_lines(args.shell)
    console.say(*lines)
    return 0


VERB = Verb(
    summary="print a script that completes flags and keys in a shell",
    help=__doc__,
    add_flags=add_flags,
    run=run,
)
