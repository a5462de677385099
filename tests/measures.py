"""Prints measures of the package's structure.

Nothing asserts them, so that nobody writes code to a figure.

  python -m tests.measures

docs/contributing/code.md says what the layout aims at; tests/test_structure.py has what must hold.
"""

import ast
import io
import re
import tokenize

from tests.lib.imports import FILES, MODULES, longest_chain, mutual_folders, own_imports, parsed
from tests.lib.paths import ROOT

LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
MATHS = ("meshtrain/models/", "meshtrain/ops/")
FEW_LINES = 60


def code_tokens(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in LAYOUT_TOKENS for token in tokens)


def density(files: list[str]) -> float:
    """Returns code tokens per line that is not blank; a docstring is one token of several lines."""
    num_tokens = num_lines = 0
    for file in files:
        text = FILES[file].read_text()
        num_tokens += code_tokens(text)
        num_lines += sum(bool(line.strip()) for line in text.splitlines())
    return num_tokens / num_lines


def comment_lines(text: str) -> int:
    return sum(line.lstrip().startswith("#") for line in text.splitlines())


def function_lengths(files: list[str]) -> list[int]:
    return sorted(
        node.end_lineno - node.lineno + 1
        for file in files
        for node in ast.walk(parsed(FILES[file]))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def measures() -> dict[str, object]:
    """Returns each measure by its name."""
    modules = [
        file for file in FILES if "/configs/" not in file and not file.endswith("__init__.py")
    ]
    texts = {file: FILES[file].read_text() for file in modules}
    sizes = {file: len(text.splitlines()) for file, text in texts.items()}
    lengths = function_lengths(modules)
    chain = longest_chain()
    within_functions = {
        module: names
        for module, file in MODULES.items()
        if (names := own_imports(file, in_functions=True))
    }
    within_cli = [module for module in within_functions if module.startswith("cli.")]
    test_imports = re.compile(
        r"^\s*(?:from|import)\s+(?:[\w.]+\.)?(?:test_\w+|conftest)\b", re.MULTILINE
    )
    asks = re.compile(r"(?<!def )\bis_url\(|\bif object_store\.url\(")
    num_tools = sum(name.startswith("meshtrain/tools/") for name in modules)
    return {
        "modules without __init__ and configs": f"{len(modules)}, {num_tools} of them in tools/",
        f"  of less than {FEW_LINES} lines": sum(size < FEW_LINES for size in sizes.values()),
        "  of 280 to 300 lines": sum(280 <= size <= 300 for size in sizes.values()),
        "  lines": f"{sum(sizes.values()):,}, at most {max(sizes.values())} in "
        f"{max(sizes, key=sizes.get)}",
        "code tokens per line outside models/ and ops/": round(
            density([file for file in modules if not file.startswith(MATHS)]), 2
        ),
        "code tokens per line": round(density(modules), 2),
        "comment lines per 1,000": round(
            1000 * sum(map(comment_lines, texts.values())) / sum(sizes.values()), 1
        ),
        "lines of a function: median, 90 %, most": (
            f"{lengths[len(lengths) // 2]}, {lengths[len(lengths) * 9 // 10]}, {lengths[-1]}"
        ),
        "longest chain of imports": f"{len(chain)}: {' -> '.join(chain)}",
        "imports of own modules within functions": (
            f"{sum(map(len, within_functions.values()))}, "
            f"{sum(len(within_functions[module]) for module in within_cli)} of them in cli/"
        ),
        "pairs of folders that import each other": len(mutual_folders()),
        "places that ask whether a workdir is on an object store": (
            f"{sum(len(asks.findall(text)) for text in texts.values())} in "
            f"{sum(bool(asks.search(text)) for text in texts.values())} files"
        ),
        "imports of test modules by test modules": sum(
            len(test_imports.findall(path.read_text())) for path in (ROOT / "tests").rglob("*.py")
        ),
    }


def main() -> None:
    for name, value in measures().items():
        print(f"{name:56}  {value}")


if __name__ == "__main__":
    main()
