"""Our own conversation format as a Jinja chat template: what a run with a Hugging Face tokenizer renders with, and what
an export holds."""

from __future__ import annotations

import json
from collections.abc import Mapping

from data.records.conversation import MARKERS


def own_chat_template(begin: str, roles: Mapping[str, str], end: str, places: Mapping[str, str]) -> str:
    """Return the template.

    Args:
        begin: text in front of the conversation.
        roles: role -> marker that opens its turns.
        end: text that ends every turn.
        places: kind -> text at the place of a medium. In a content that is a text, records' markers become places too.
    """
    text = "message['content']"
    for marker, kind in MARKERS.items():
        if kind in places:
            text += "".join(f"|replace({_literal(one)}, {_literal(marker)})" for one in (f"\n{marker}", f"{marker}\n"))
            text += f"|replace({_literal(marker)}, {_literal(places[kind])})" if places[kind] != marker else ""
    parts = "".join(
        f"{{% elif part['type'] == '{kind}' %}}{{{{ {_literal(place)} }}}}" for kind, place in places.items()
    )
    content = (
        f"{{% if message['content'] is string %}}{{{{ {text} }}}}{{% else %}}{{% for part in message['content'] %}}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}" + parts + "{% endif %}{% endfor %}{% endif %}"
    ) + f"{{{{ {_literal(end)} }}}}"
    opened = "".join(
        f"{{% {'elif' if at else 'if'} message['role'] == '{role}' %}}{{{{ {_literal(mark)} }}}}"
        for at, (role, mark) in enumerate(roles.items())
    )
    return (
        f"{{{{ {_literal(begin)} }}}}{{% for message in messages %}}{opened}"
        "{% else %}{{ raise_exception('no such role: ' + message['role']) }}{% endif %}"
        f"{{% if message['role'] == 'assistant' %}}{{% generation %}}{content}{{% endgeneration %}}"
        f"{{% else %}}{content}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {_literal(roles['assistant'])} }}}}{{% endif %}}"
    )


def _literal(text: str) -> str:
    """Return a text as a string of Jinja, whose escapes are those of JSON but for pairs of surrogates."""
    return json.dumps(text, ensure_ascii=False)
