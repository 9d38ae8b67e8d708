"""HTML elements and a self-contained page around them."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

# The browser loads nothing from elsewhere, so a page is safe to pass on.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def asset(name: str) -> str:
    """A style sheet or script of this package."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, wrapped: bool = False) -> str:
    """``wrapped`` breaks the last column into lines, so that a wide table fits the page."""
    head = "".join(f"<th scope='col'>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    kind = " class='wrapped'" if wrapped else ""
    return f"<div class='scroll'><table{kind}><tr>{head}</tr>{body}</table></div>"


def facts(values: Mapping[str, str]) -> str:
    """A box of names and values."""
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in values.items())
    return f"<dl class='facts'>{rows}</dl>" if rows else ""


def page(title: str, lead: str, sections: Sequence[tuple[str, str]]) -> str:
    """``sections`` are pairs of a heading, which may be empty, and ready HTML or SVG."""
    body = "\n".join(_section(heading, content) for heading, content in sections)
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>\n"
        f"<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<meta name='color-scheme' content='light dark'>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<style>\n{asset('page.css')}</style></head>\n"
        f"<body><main><header><h1>{escape(title)}</h1>\n<p class='lead'>{escape(lead)}</p></header>\n"
        f"{body}\n</main></body></html>\n"
    )


def _section(heading: str, content: str) -> str:
    return f"<section>{f'<h2>{escape(heading)}</h2>' if heading else ''}\n{content}</section>"
