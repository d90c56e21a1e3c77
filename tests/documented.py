"""The blocks of code and the links of README and docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
    if path.name != "CHANGELOG.md"
)


@dataclass(frozen=True)
class Block:
    """A block of code on a page.

    Attributes:
        page: path of the page.
        line: number of its first line.
        language: of a fenced block; empty if it is indented, or names none.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Its command lines, continued lines joined, without comments."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [line for line in (re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines) if line]


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced and the indented blocks of a page."""
    lines = [*(ROOT / page).read_text(encoding="utf-8").splitlines(), "end"]
    at = 0
    while at < len(lines) - 1:
        if fence := re.fullmatch(r"```(\w*)", lines[at]):
            end = lines.index("```", at + 1)
            yield Block(page, at + 2, fence[1], "\n".join(lines[at + 1 : end]) + "\n")
            at = end + 1
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1]):
            end = next(i for i in range(at, len(lines)) if lines[i] and not lines[i].startswith("    "))
            yield Block(page, at + 1, "", "\n".join(line[4:] for line in lines[at:end]).strip() + "\n")
            at = end
        else:
            at += 1


def links(page: str) -> list[str]:
    """Return the targets of a page's links and pictures, outside of code."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^ {4}.*$|`[^`\n]*`", "", text, flags=re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", title.lower()).strip().replace(" ", "-") for title in titles}
