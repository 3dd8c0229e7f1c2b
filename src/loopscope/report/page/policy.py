"""What may run on the page? Its own scripts, told by their hashes, and nothing else.

Whatever else finds its way into the file, the browser refuses to run: no other inline script, no handler in an
attribute, no `eval`, no style but the page's, no request.
"""

import base64
import hashlib
from collections.abc import Iterable


def content_security_policy(scripts: Iterable[str], styles: Iterable[str]) -> str:
    """The policy of a page whose inline scripts and styles have exactly these texts."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(scripts)}",
            f"style-src {_hashes(styles)}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _hashes(texts: Iterable[str]) -> str:
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in texts)
