"""Whether a server answers, and addresses without their passwords.

Clients of the hub and of MLflow retry for minutes before they report that no server answers, so we ask first.
"""

from __future__ import annotations

import http.client
import re
import ssl
import urllib.error
import urllib.request
from urllib.parse import urlsplit, urlunsplit

CONNECT_SECONDS = 3.0
# The patterns find THIS in postgresql://user:THIS@host/db and in postgresql://host/db?password=THIS.
PASSWORDS = (
    re.compile(r"(?<=://)([^/@\s]*?):[^/\s]*(?=@)"),
    re.compile(r"(?<=[?&])(\w*(?:password|passwd|pwd|token|secret)\w*)=[^&\s]*", re.IGNORECASE),
)


def server_answers(url: str) -> bool:
    """Return whether a web server answers anything within CONNECT_SECONDS. The environment's proxies are used."""
    try:
        parts = urlsplit(url)
        # No password is sent.
        bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        question = urllib.request.Request(bare, method="HEAD")
        urllib.request.urlopen(question, timeout=CONNECT_SECONDS).close()
    except (ValueError, http.client.InvalidURL):  # no address
        return False
    except (urllib.error.HTTPError, http.client.HTTPException):
        return True  # an error status is an answer too
    except urllib.error.URLError as error:
        # The server answers; its client decides whether to trust it.
        return isinstance(error.reason, ssl.SSLError)
    except (TimeoutError, ConnectionError):
        return False
    return True


def without_password(text: str) -> str:
    """Return the text without passwords in its addresses."""
    for password in PASSWORDS:
        text = password.sub(r"\1", text)
    return text
