"""One offline page about a model as it stands: the look that such pages share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from equipoise.report.place import write_page

_SHELL = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.title }}</title><style>
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto;
       padding: 0 1rem; overflow-wrap: anywhere }
.wide { overflow-x: auto; overflow-wrap: normal }
figure { margin: 0 }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid #8884 }
td:nth-child(n+2) { font-variant-numeric: tabular-nums }
{{ page.style }}
</style></head><body>
<h1>{{ page.heading }}</h1>
<p>{{ headline }}</p>
<ul>{% for line in remarks %}<li>{{ line }}</li>{% endfor %}</ul>
{{ body }}
</body></html>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPage:
    """What distinguishes one kind of page: its names, its body, its own style."""

    title: str
    heading: str
    body: str
    """A template; a table stands in ``<div class="wide">``, to scroll on a phone."""
    style: str = ""

    def write(
        self, path: Path, *, headline: str, remarks: Sequence[str] = (), **values: Any
    ) -> Path:
        """Write the page with these values and return where it is."""
        made = Environment(autoescape=True, undefined=StrictUndefined).from_string
        body = Markup(made(self.body).render(**values))
        page = made(_SHELL).render(
            page=self, headline=headline, remarks=remarks, body=body
        )
        return write_page(path, page)
