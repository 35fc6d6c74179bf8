"""Whether the hub can be reached, asked once: its libraries ask six times for every file, for minutes in all."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

from ..errors import PackingError

_SECONDS = 5


def check_hub(name: str, key: str) -> None:
    """
    Check that a name on the hub can be looked up, unless the libraries are told to stay offline.

    Args:
        name (`str`):
            Hub id.
        key (`str`):
            Setting that holds it, for the message.

    Raises:
        [`PackingError`]: If the hub does not answer.
    """
    from huggingface_hub import constants

    # Behind a proxy the hub's own address says nothing.
    if constants.HF_HUB_OFFLINE or {"https", "all"} & set(getproxies()):
        return
    address = urlsplit(constants.ENDPOINT)
    host, port = address.hostname or "", address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((host, port), timeout=_SECONDS).close()
    except OSError as error:
        raise PackingError(
            f"`{key}: {name}` is no path on this machine, and {host} cannot be reached: {error.strerror or error}. "
            "Give a local path, or set HF_HUB_OFFLINE=1 to use what was downloaded before."
        ) from error
