"""The HTML of the page: served with its script and style, or complete in one file that needs no server."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any

from tarshards.errors import visible
from tarshards.view.media_types import media_types

FOLDER = Path(__file__).with_name("page")
FILES = {path.name: path for path in sorted(FOLDER.iterdir()) if path.suffix in (".js", ".css")}
IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?:async )?(?:function|class|const) (\w+)", re.MULTILINE)

HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
{head}
<title>{title}</title>
"""
END = "</script>\n</body>\n</html>\n"


def served_page(title: str, nonce: str, config: dict[str, Any]) -> str:
    """Return the page for a server that also serves ``served_files``, with the *nonce* of its policy."""
    title = escape(visible(title))
    return (
        HEAD.format(head='<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">', title=title)
        + f'<link rel="stylesheet" href="style.css" nonce="{nonce}">\n'
        + f'<script type="module" src="main.js" nonce="{nonce}"></script>\n'
        + f"</head>\n<body>\n{_data_head()}{dumped({**config, 'types': media_types()})}{END}"
    )


def served_files() -> dict[str, tuple[str, str]]:
    """Return the media type and the text of each file that ``served_page`` loads; a file a module would be slower."""
    return {
        "main.js": ("text/javascript", bundled("main.js")),
        "style.css": ("text/css", FILES["style.css"].read_text()),
    }


def whole_page(title: str, config: dict[str, Any], *, connect: str = "'none'") -> tuple[str, str]:
    """Return the beginning and the end of a page in one file; a caller may add entries to its *config* in between.

    Its policy allows only its own script, and connections to *connect*.
    """
    style, script = FILES["style.css"].read_text(), "\n" + bundled("main.js")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        f"img-src data: blob:; media-src blob:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<meta name="referrer" content="no-referrer">'
    )
    begin = HEAD.format(head=head, title=escape(visible(title)))
    begin += f"<style>{style}</style>\n</head>\n<body>\n<noscript>This page requires JavaScript.</noscript>\n"
    begin += _data_head() + dumped({**config, "types": media_types()})
    return begin, f'</script>\n<script type="module">{script}</script>\n</body>\n</html>\n'


def _data_head() -> str:
    return '<script type="application/json" id="config">'


def dumped(value: Any) -> str:
    """Return *value* as JSON in which no text can end the surrounding script."""
    return json.dumps(value).replace("<", "\\u003c")


def bundled(entry: str) -> str:
    """Return the module *entry* and its imports as one module, in which each module is a function."""
    return "\n".join(_modules(entry, set()))


def _modules(name: str, done: set[str]) -> Iterator[str]:
    if name in done:
        return
    done.add(name)
    text = FILES[name].read_text()
    for _, other in IMPORT.findall(text):
        yield from _modules(f"{other}.js", done)
    text = IMPORT.sub(r"const {\1} = \2_module;\n", text)
    exported = ", ".join(EXPORT.findall(text))
    text = EXPORT.sub(lambda found: found[0].removeprefix("export "), text)
    yield f"const {name.removesuffix('.js')}_module = (() => {{\n{text}return {{ {exported} }};\n}})();"


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
