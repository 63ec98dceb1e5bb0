"""Whether somebody is there: clients of the hub and of MLflow retry for minutes before they admit that nobody is."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
from urllib.parse import urlsplit, urlunsplit

CONNECT_SECONDS = 3.0


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
