"""How the controller's API may listen, and how clients know that it is the right one.

Promises: beyond this machine's loopback a controller listens only over TLS, or where somebody said
in so many words that it needn't (``plain_http``): a token on a network in the clear is everybody's.
Files that TLS can't be done with are refused before anything starts. A client of the home trusts
the home's own certificate and no other one, whatever name it carries; a client elsewhere trusts the
system's authorities, or those of ``$OCTAVO_CA``, and looks at the name. A certificate that is
replaced is taken without a restart. Imports nothing heavy: the CLI reads it.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.home.folder import HomeConfig

logger = logging.getLogger(__name__)

RENEW_S = 5.0
"""Seconds between two looks at whether a certificate was replaced."""
CA_VARIABLE = "OCTAVO_CA"
SECURE = "give it a certificate (--tls-cert, --tls-key), or --plain-http where the network is yours"


class ListeningError(ValueError):
    """It must not, or can't, listen like that."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message, remedy)
        self.message, self.remedy = message, remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})"


def check_listening(config: HomeConfig) -> None:
    """Raises ``ListeningError`` for settings that a controller must not or can't listen with."""
    cert, key = config.tls_cert, config.tls_key
    if (cert is None) != (key is None):
        missing = "--tls-key" if key is None else "--tls-cert"
        raise ListeningError("TLS takes a certificate and its key", f"give {missing} too")
    if cert is not None and key is not None:
        _check_files(cert, key)
    elif not on_loopback(config.host) and not config.plain_http:
        told = f"it would listen on {config.host} without TLS, and its token go over the network"
        raise ListeningError(told, SECURE)


class Certificate:
    """A certificate and its key in files, which are replaced before it ends, as every few weeks."""

    def __init__(self, cert: Path, key: Path) -> None:
        self._files = (cert, key)
        self._seen = self._look()

    def renew(self, context: ssl.SSLContext) -> bool:
        """Let new connections of ``context`` have what is in the files now, where that has changed;
        whether it has. Files that don't belong together (yet) are left for the next time."""
        seen = self._look()
        if seen is None or seen == self._seen:
            return False
        try:
            context.load_cert_chain(*self._files, password="")
        except (OSError, ValueError):
            return False
        self._seen = seen
        return True

    def keep(self, context: Callable[[], ssl.SSLContext | None], stop: threading.Event) -> None:
        """``renew`` until ``stop``; ``context``: as soon as there is one."""
        while not stop.wait(RENEW_S):
            now = context()
            if now is not None and self.renew(now):
                logger.info("the API has the certificate that is in %s now", self._files[0])

    def _look(self) -> tuple[tuple[int, int], ...] | None:
        try:
            found = [file.stat() for file in self._files]
        except OSError:
            return None
        return tuple((at.st_ino, at.st_mtime_ns) for at in found)


def on_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches an address or host name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(a[4][0]).partition("%")[0]).is_loopback for a in found)


def trusting_home(cert: Path) -> ssl.SSLContext:
    """For clients of a home: its certificate and no other one. Raises OSError."""
    leaf = re.search(
        r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", cert.read_text(), re.DOTALL
    )
    if leaf is None:
        raise OSError(f"{cert} has no certificate")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The certificate itself is known: neither its name nor who signed it says more.
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=leaf[0])
    return context


def trusting(ca: Path | None) -> ssl.SSLContext:
    """For clients elsewhere: the system's authorities, or those in ``ca``. Raises OSError."""
    if ca is None:
        return ssl.create_default_context()
    try:
        context = ssl.create_default_context(cafile=str(ca))
    except ssl.SSLError as error:
        raise OSError(f"{ca} has no certificate: {error.reason or error}") from None
    except OSError as error:
        raise OSError(f"{ca} can't be read: {error.strerror or error}") from None
    # Also a certificate that signed itself, or was signed by one that isn't in the file.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _check_files(cert: Path, key: Path) -> None:
    for option, file in (("--tls-cert", cert), ("--tls-key", key)):
        try:
            file.read_bytes()
        except OSError as error:
            message = f"{option}: {file} can't be read: {error.strerror or error}"
            raise ListeningError(message, "name a PEM file") from None
    if key.stat().st_mode & 0o077:
        raise ListeningError(f"--tls-key: {key} can be read by others", f"chmod 600 {key}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # With a password of its own, so that it never asks for one on a terminal.
        context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        message = f"{cert} and {key} are no certificate and its key: {reason}"
        remedy = "name PEM files that belong together, without a password"
        raise ListeningError(message, remedy) from None
