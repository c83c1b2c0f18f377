"""For `mkdocs build`: signatures that stand in the pages for those who read the checkout are left to mkdocstrings."""

import re
from typing import Any

_SIGNATURE = re.compile(r"^<!-- signature -->\n```python\n.*?^```\n", re.DOTALL | re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page without them."""
    return _SIGNATURE.sub("", markdown)
