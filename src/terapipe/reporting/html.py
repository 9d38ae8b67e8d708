"""A page that needs nothing but itself."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

_STYLE = """
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; color: #1f2933;
       max-width: 980px; margin: 2.5rem auto; padding: 0 1rem; background: #fff; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p.lead { color: #616e7c; margin-top: 0; } svg { width: 100%; height: auto; }
table { border-collapse: collapse; } td, th { padding: .3rem 1.4rem .3rem 0; text-align: left; }
td { border-top: 1px solid #d9dfe5; font-variant-numeric: tabular-nums; } th { color: #616e7c; font-weight: 500; }
"""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def page(title: str, lead: str, sections: Sequence[tuple[str, str]]) -> str:
    """``sections`` are headings with ready HTML or SVG under them."""
    body = "\n".join(f"<h2>{escape(heading)}</h2>\n{content}" for heading, content in sections)
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>\n"
        f"<meta name='viewport' content='width=device-width, initial-scale=1'><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n<p class='lead'>{escape(lead)}</p>\n{body}\n</body></html>\n"
    )


def write(path: Path, text: str) -> None:
    """Beside first, then renamed: a page that was there stays whole until the new one is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
