"""From the data of a page to HTML: the templates and the style sheet beside this file."""

from collections.abc import Sequence
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


def render(page: object, template: str = "page.html.j2", styles: Sequence[str] = ("style.css",)) -> str:
    """The whole page, with its style sheets inside. `page` is what the template reads: of templates/page.html.j2 a
    `page.Page`, of templates/data.html.j2 a `data_page.DataPage`."""
    style = "".join((_FOLDER / name).read_text(encoding="utf-8") for name in styles)
    return environment().get_template(template).render(page=page, style=style)
