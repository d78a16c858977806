"""A hook of MkDocs: the site's pages are the repository's Markdown files, and one page for each public module.

Pages keep their text. Relative links are made to lead to the pages of the site. A linked source file becomes a page
that shows it; a picture or a table of data is copied.
"""

import ast
import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "recipes/README.md": "recipes.md",
    "recipes/RESULTS.md": "results.md",
    "recipes/notebook.ipynb": "notebook.md",
    "recipes/guides": "guides/index.md",
    ".github/CHANGELOG.md": "changelog.md",
    ".github/CONTRIBUTING.md": "contributing.md",
    ".github/SECURITY.md": "security.md",
    "hf_bmtrain/README.md": "source.md",
    "hf_bmtrain/hf/README.md": "source_hf.md",
    "kernels/README.md": "kernels.md",
    **{f"recipes/guides/{path.name}": f"guides/{path.name}" for path in (ROOT / "recipes" / "guides").glob("*.md")},
}
"""Pages of the site by path in the repository."""
MODULES = ("", "config", "distributed", "hf", "inspect", "loss", "lr_scheduler", "nn", "optim", "store", "utils")
SHOWN = (".py", ".cu", ".cuh", ".yml", ".toml")
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
BADGE = re.compile(r" \[!\[\w+\]\([^)]*\)\]\([^)]*\)")
FENCED = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add all pages, and the files that they link to."""
    linked: set[str] = set()
    for source, page in PAGES.items():
        add(files, config, page, relinked(text_of(source), source, page, linked))
    for module in MODULES:
        add(files, config, f"api/{module or 'hf_bmtrain'}.md", reference(module))
    for source in sorted(linked):
        if source.endswith(SHOWN):
            text = (ROOT / source).read_text("utf-8")
            add(files, config, target_of(source), f"# {source}\n\n````{Path(source).suffix[1:]}\n{text}\n````\n")
        else:
            files.append(File.generated(config, target_of(source), abs_src_path=str(ROOT / source)))
    return files


def add(files: Files, config: Any, page: str, text: str) -> None:
    files.append(File.generated(config, page, content=text))


def text_of(source: str) -> str:
    """The Markdown of a page: of a file, of a notebook, or a list of the guides."""
    if source.endswith(".ipynb"):
        return notebook(json.loads((ROOT / source).read_text("utf-8")))
    if (ROOT / source).is_dir():
        guides = sorted((ROOT / source).glob("*.md"))
        titles = {path.name: path.read_text("utf-8").splitlines()[0].lstrip("# ") for path in guides}
        return "# Guides\n\n" + "".join(f"- [{title}](guides/{name})\n" for name, title in titles.items())
    return (ROOT / source).read_text("utf-8")


def notebook(content: dict) -> str:
    """The cells of a notebook as Markdown."""
    texts = [("".join(cell["source"]), cell["cell_type"]) for cell in content["cells"]]
    return "\n\n".join(text if kind == "markdown" else f"```py\n{text}\n```" for text, kind in texts) + "\n"


def relinked(text: str, source: str, page: str, linked: set[str]) -> str:
    """The text with links of the site; adds to `linked` the files that are no pages."""

    def replace(match: re.Match[str]) -> str:
        before, link, after = match.groups()
        path, mark, anchor = link.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        aim = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (ROOT / aim).exists():
            return match[0]  # the strict build fails on it
        if aim not in PAGES:
            linked.add(aim)
        return before + os.path.relpath(target_of(aim), posixpath.dirname(page) or ".") + mark + anchor + after

    text = BADGE.sub("", text)
    # nested items need four spaces here, two on GitHub
    parts = FENCED.split(text)
    parts[::2] = [re.sub(r"^  (?=- )", "    ", LINK.sub(replace, part), flags=re.MULTILINE) for part in parts[::2]]
    return "".join(parts)


def target_of(source: str) -> str:
    """The path in the site of a file of the repository."""
    return PAGES.get(source) or f"files/{source}" + (".md" if source.endswith(SHOWN) else "")


def reference(module: str) -> str:
    """A page with the public names of a module, those of its `__all__`."""
    name = f"hf_bmtrain.{module}".rstrip(".")
    shown = [each for each in public_names(module) if each not in MODULES]
    return f"# {name}\n\n" + "\n".join(f"::: {name}.{each}\n" for each in shown)


def public_names(module: str) -> list[str]:
    """The `__all__` of a public module, read from its source."""
    folder = ROOT / "hf_bmtrain"
    file = folder / f"{module}.py" if (folder / f"{module}.py").is_file() else folder / module / "__init__.py"
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise ValueError(f"{file} has no __all__")
