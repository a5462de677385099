"""Hooks of mkdocs.yml: pages.md is the navigation; pages outside docs/ and notebooks are pages too.

A link between pages is written as GitHub follows it, relative to the file; here it becomes one
between pages of the site. Any other link out of docs/ stays as it is, and `mkdocs build --strict`
fails at it.

A comment `<!-- search: bf16, mixed precision -->` in a page has words that people type and the page
does not: a search for them finds the page.
"""

import os
import re
from pathlib import Path

from mkdocs.structure.files import File
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent
# Files of the repository outside docs/, and their place in the site.
OUTSIDE = {
    "README.md": "project/overview.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "tests/mutants/README.md": "project/mutants.md",
    "tests/blind/README.md": "project/blind.md",
}
SEARCH = re.compile(r"^<!-- search: (.+) -->$", re.MULTILINE)
# A block of commands or Python, a block of another kind, and code in a line.
CODE = re.compile(
    r'(?P<block><div class="language-(?:bash|python).*?</pre>)'
    r"|<pre.*?</pre>"
    r"|<code>(?P<inline>.*?)</code>",
    re.DOTALL,
)
KEY = re.compile(r"[a-z]\w*(\.\w+)+")
DOT = re.compile(r"(?<=\w)\.(?=[a-zA-Z_])")
# A word with a hyphen, after which a browser may end the line: --config becomes "--" and "config".
# Tags are matched so that they stay as they are.
HYPHENATED = re.compile(r"<[^>]*>|(?P<word>[\w-]*-[\w-]*)")
LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config):
    """Sets the navigation from pages.md: a tab for each `##`, a group of pages for each `###`."""
    text = (ROOT / "docs" / "pages.md").read_text(encoding="utf-8")
    config.nav = [{"Home": "index.md"}]
    for level in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        first, *groups = re.split(r"^### ", level, flags=re.MULTILINE)
        entries = pages_of(first)
        for group in groups:
            entries.append({group.splitlines()[0]: pages_of(group)})
        config.nav.append({level.splitlines()[0]: entries})
    # Not in a tab, since it is the navigation itself.
    config.nav.append({"All pages": "pages.md"})
    return config


def pages_of(section):
    """Returns the pages that the table of a section lists, as entries of a navigation."""
    rows = re.findall(r"^\| \[([^\]]+)\]\(([^)]+)\)", section, re.MULTILINE)
    return [{title: site_path("docs/pages.md", target)} for title, target in rows]


def on_files(files, config):
    """Adds the files of OUTSIDE, and the notebooks."""
    for path, place in OUTSIDE.items():
        files.append(
            File.generated(config, place, content=(ROOT / path).read_text(encoding="utf-8"))
        )
    for notebook in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")):
        for file in notebook_files(notebook, config):
            files.append(file)
    return files


def notebook_files(notebook, config):
    """Yields the page of a notebook, in Markdown as all others are, and the pictures in it.

    Not mkdocs-jupyter: it loads MathJax from another host, and has styles of its own.
    """
    markdown, resources = MarkdownExporter().from_filename(
        notebook, resources={"unique_key": notebook.stem}
    )
    yield File.generated(config, f"tutorials/{notebook.stem}.md", content=markdown)
    for name, content in resources["outputs"].items():
        yield File.generated(config, f"tutorials/{name}", content=content)


def on_page_markdown(markdown, page, config, files):
    """Returns the page with links between places of the site, and sets its words for the search."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]  # which would list this page alone
    if words := SEARCH.search(markdown):
        page.meta["tags"] = words[1].split(", ")
    place = page.file.src_uri
    source = {place: path for path, place in OUTSIDE.items()}.get(place, f"docs/{place}")

    def replace(link):
        target = os.path.relpath(site_path(source, link[1]), os.path.dirname(place) or ".")
        return f"]({target}{link[2] or ''})"

    return LINK.sub(replace, markdown)


def on_page_content(html, page, config, files):
    """Returns the page with lines of code that end at spaces and after dots, but not after hyphens.

    A key, such as `train.num_microbatches`, gets a class of its own.
    """

    def replace(found):
        if found["block"]:
            return HYPHENATED.sub(keep_together, found["block"])
        if found["inline"] is None:
            return found[0]
        code = HYPHENATED.sub(keep_together, found["inline"])
        name = ' class="key"' if KEY.fullmatch(found["inline"]) else ""
        return f"<code{name}>{DOT.sub('.<wbr>', code)}</code>"

    return CODE.sub(replace, html)


def keep_together(found):
    # Names of files may be longer than the line of a phone.
    if not found["word"] or len(found["word"]) > 24:
        return found[0]
    return f'<span class="word">{found["word"]}</span>'


def site_path(source: str, target: str) -> str:
    """Returns the place in the site of a link's target.

    `source` is the path in the repository of its page.
    """
    path = os.path.normpath(os.path.join(os.path.dirname(source), target))
    if path.endswith(".ipynb"):
        path = path.removesuffix(".ipynb") + ".md"
    return OUTSIDE.get(path) or os.path.relpath(path, "docs")
