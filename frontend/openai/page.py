"""The page at "/": one document made of static/, and the policy under which a browser shows it.

Scripts and styles are written as files and sent within the document, so the policy can name each by its hash
and the page needs no further request, whatever path a proxy gives it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

_FOLDER = Path(__file__).parent / "static"


def load_page() -> str:
    """static/index.html with the styles and scripts that it names in their places."""
    page = (_FOLDER / "index.html").read_text()
    page = re.sub(r'<link rel="stylesheet" href="(\S+)">', lambda found: _inline("style", found[1]), page)
    return re.sub(r'<script src="(\S+)"></script>', lambda found: _inline("script", found[1]), page)


def make_content_security_policy(page: str) -> str:
    """Only this page's own scripts and style, by their hashes, and this server; no text becomes markup."""
    scripts = " ".join(f"'{_hash(body)}'" for body in re.findall(r"<script>(.*?)</script>", page, re.S))
    styles = " ".join(f"'{_hash(body)}'" for body in re.findall(r"<style>(.*?)</style>", page, re.S))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    )


def _inline(tag: str, name: str) -> str:
    body = (_FOLDER / name).read_text()
    if tag == "script":
        # What would end a script's element, or begin another in it, stands in literals; \x3c is the same.
        body = re.sub(r"<(?=!--|/?script)", r"\\x3c", body, flags=re.I)
    return f"<{tag}>{body}</{tag}>"


def _hash(body: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
