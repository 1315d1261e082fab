"""One offline page about a model as it stands: the look that such pages share."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

STYLE = """:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto;
       padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid #8884 }
td:nth-child(n+2) { font-variant-numeric: tabular-nums }
"""


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Write a template with its values, and with ``style``; return where."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    page = environment.from_string(template).render(style=STYLE, **values)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path
