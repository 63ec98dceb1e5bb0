"""Whether somebody is there: clients of the hub and of MLflow retry for minutes before they admit that nobody is. And
addresses without what nobody else is to read.
"""

from __future__ import annotations

import http.client
import re
import ssl
import urllib.error
import urllib.request
from urllib.parse import urlsplit, urlunsplit

CONNECT_SECONDS = 3.0
# postgresql://user:THIS@host/db, and postgresql://host/db?password=THIS
PASSWORDS = (
    re.compile(r"(?<=://)([^/@\s]*?):[^/\s]*(?=@)"),
    re.compile(r"(?<=[?&])(\w*(?:password|passwd|pwd|token|secret)\w*)=[^&\s]*", re.IGNORECASE),
)


def answers(url: str) -> bool:
    """True if a web server says anything at all within seconds; proxies of the environment are used."""
    parts = urlsplit(url)
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))  # without a password
    try:
        question = urllib.request.Request(bare, method="HEAD")
        urllib.request.urlopen(question, timeout=CONNECT_SECONDS).close()
    except (urllib.error.HTTPError, http.client.HTTPException):
        return True  # it answered, if not with what a browser wants
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # whom to trust is its client's business
    except (TimeoutError, ConnectionError):
        return False
    return True


def without_password(text: str) -> str:
    """The same where there is none."""
    for password in PASSWORDS:
        text = password.sub(r"\1", text)
    return text
