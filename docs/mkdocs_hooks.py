"""Hooks of mkdocs.yml: index.md is the navigation; pages outside docs/ and notebooks are pages too.

A link between pages is written as GitHub follows it, relative to the file; here it becomes one
between pages of the site. Any other link out of docs/ stays as it is, and `mkdocs build --strict`
fails at it.
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
LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config):
    """Sets the navigation: a section for each heading of index.md, with the links of its tables."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    config.nav = [{"Home": "index.md"}]
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        rows = re.findall(r"^\| \[([^\]]+)\]\(([^)]+)\)", section, re.MULTILINE)
        pages = [{title: site_path("docs/index.md", target)} for title, target in rows]
        config.nav.append({section.splitlines()[0]: pages})
    return config


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
    """Returns the page with links between places of the site."""
    place = page.file.src_uri
    source = {place: path for path, place in OUTSIDE.items()}.get(place, f"docs/{place}")

    def replace(link):
        target = os.path.relpath(site_path(source, link[1]), os.path.dirname(place) or ".")
        return f"]({target}{link[2] or ''})"

    return LINK.sub(replace, markdown)


def site_path(source: str, target: str) -> str:
    """Returns the place in the site of a link's target.

    `source` is the path in the repository of its page.
    """
    path = os.path.normpath(os.path.join(os.path.dirname(source), target))
    if path.endswith(".ipynb"):
        path = path.removesuffix(".ipynb") + ".md"
    return OUTSIDE.get(path) or os.path.relpath(path, "docs")
