"""From the data of a page to HTML: the templates and the style sheet beside this file. Imports no torch."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_FOLDER = Path(__file__).parent


def environment() -> Environment:
    """Templates that escape every text, and in which a name that nobody gave is an error."""
    return Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(page: object) -> str:
    """The whole page, with its style sheet inside. `page` is what templates/page.html.j2 reads: a `page.Page`."""
    style = (_FOLDER / "style.css").read_text(encoding="utf-8")
    return environment().get_template("page.html.j2").render(page=page, style=style)
