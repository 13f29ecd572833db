"""A page of HTML as the tests of the report look at it."""

import re
from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "path"}
FETCHING = {"src", "href", "srcset", "poster", "data", "action", "formaction", "background", "ping", "xlink:href"}
"""Attributes whose value a browser may fetch."""

LEADING_OUT = {"script", "iframe", "object", "embed", "base", "form"}
"""Elements that run or fetch something."""


class ParsedPage(HTMLParser):
    """Checks that tags are balanced and attributes single; keeps the attributes of every element, and the text."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.elements, self.text, self.style = [], [], "", ""
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"
        self.words = " ".join(self.text.split())

    def handle_starttag(self, tag, attrs):
        self._keep(tag, attrs)
        if tag not in VOID or (tag == "path" and not self.get_starttag_text().endswith("/>")):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self._keep(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            self.style += data
        else:
            self.text += data + " "

    def _keep(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"an attribute twice: {self.get_starttag_text()}"
        self.elements.append((tag, dict(attrs)))

    def all(self, tag, css=""):
        """Attributes of the elements with this tag, and this class."""
        return [
            attrs
            for name, attrs in self.elements
            if name == tag and css in ["", *(attrs.get("class") or "").split(" ")]
        ]

    def outside(self) -> list[str]:
        """Everything by which the page would fetch something or run something; empty for a page in one piece."""
        found = [
            f"<{tag}>" for tag, _ in self.elements if tag in ("script", "iframe", "object", "embed", "base", "form")
        ]
        for tag, attrs in self.elements:
            for name, value in attrs.items():
                if name in FETCHING and not value.startswith("data:"):
                    found.append(f"<{tag} {name}={value}>")
                if name.startswith("on") or (name == "style" and not re.fullmatch(r"(top|left):[\d.]+%", value)):
                    found.append(f"<{tag} {name}={value}>")
        return found + re.findall(r"url\(|@import|https?:|//|</", self.style)
