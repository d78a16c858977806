"""Write the table of families in recipes/guides/evidence.md from recipes/guides/families.md.

    python tests evidence

`tests/recipes/test_guides.py` fails if the page has another table.
"""

from __future__ import annotations

import re
from pathlib import Path

GUIDES = Path(__file__).resolve().parents[2] / "recipes" / "guides"
MARK = re.compile(r"(<!-- families -->\n).*?(?=\n\n|\Z)", re.DOTALL)


def main() -> None:
    page = GUIDES / "evidence.md"
    page.write_text(MARK.sub(lambda mark: mark[1] + families(), page.read_text("utf-8")), encoding="utf-8")
    print(families())


def families() -> str:
    """A table: for each group of families how many there are, and the one whose gradients differ most."""
    lines = ["| group | families | largest error of a loss | of a gradient | in |", "|---|---|---|---|---|"]
    text = (GUIDES / "families.md").read_text("utf-8")
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in body.splitlines() if line.startswith("|")]
        measured = [(float(row[4]), float(row[3]), row[0]) for row in rows if re.fullmatch(r"\d+\.\d+", row[4])]
        if measured:
            gradient, _, name = max(measured)
            loss = max(loss for _, loss, _ in measured)
            lines.append(f"| {title} | {len(measured)} | {loss:.2f} | {gradient:.2f} | {name if gradient else ''} |")
    return "\n".join(lines)
