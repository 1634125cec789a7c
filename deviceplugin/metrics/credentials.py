"""Reads the certificate of the agent's HTTP server, and the token for its clients, from files that may change."""

from __future__ import annotations

import base64
import binascii
import errno
import hmac
import logging
import os
import ssl
import threading
from pathlib import Path
from typing import Final, Literal

_LOG: Final = logging.getLogger(__name__)


class _Watched:
    """The content of files, which is read again after a change of the files.

    Each use of the content checks whether the files have changed, which takes microseconds.
    """

    def __init__(self, *paths: str | Path) -> None:
        self.paths = tuple(map(Path, paths))
        self._warned = ""
        self._lock = threading.Lock()
        self._load()
        self._seen = self._identities()

    def _identities(self) -> list[tuple[int, ...]]:
        stats = (os.stat(path) for path in self.paths)
        return [(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]

    def _load(self) -> None:
        raise NotImplementedError

    def _refresh(self) -> None:
        with self._lock:
            try:
                seen = self._identities()
                if seen == self._seen:
                    return
                self._load()
            except OSError as error:
                # The old content stays in use: the files are often incomplete while another program replaces them, and
                # the next use reads them again.
                warning = f"{error.strerror or error}"
                if warning != self._warned:
                    self._warned = warning
                    _LOG.warning("%s; the content that was read before stays in use", warning)
                return
            _LOG.info("%s was read again", " and ".join(map(str, self.paths)))
            self._seen, self._warned = seen, ""


class Certificate(_Watched):
    """A server's certificate chain and key in PEM files.

    client_ca: a PEM file with the certificate authorities of clients. With this file, clients need a certificate for
    all routes except public ones (the kubelet's probes). Raises OSError at the start if the files cannot be read, or
    the key does not match the certificate.
    """

    def __init__(
        self,
        certificate: str | Path,
        key: str | Path | None = None,
        client_ca: str | Path | None = None,
        min_version: Literal["1.2", "1.3"] = "1.2",
    ) -> None:
        self.client_ca = client_ca
        self._min_version = ssl.TLSVersion.TLSv1_3 if min_version == "1.3" else ssl.TLSVersion.TLSv1_2
        super().__init__(certificate, key or certificate, *([client_ca] if client_ca else []))

    def _load(self) -> None:
        certificate, key = self.paths[:2]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = self._min_version
        try:
            context.load_cert_chain(certificate, key)
        except ssl.SSLError as error:
            message = f"{certificate} and {key} are not a certificate and its key:  {error.reason or error}"
            raise OSError(errno.EINVAL, message) from error
        except OSError as error:
            # The message names the unreadable file, because OpenSSL's error does not.
            unread = next((path for path in self.paths if not os.access(path, os.R_OK)), certificate)
            raise OSError(error.errno, f"certificate file {unread}: {os.strerror(error.errno or 0)}") from error
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except OSError as error:
                message = f"client CA file {self.client_ca}: {error.strerror or error}"
                raise OSError(error.errno, message) from error
            context.verify_mode = ssl.CERT_OPTIONAL  # `Server.refusal` requires a certificate, except from probes.
        self._context = context

    @property
    def context(self) -> ssl.SSLContext:
        """The TLS context for the next connection, with the present certificate."""
        self._refresh()
        return self._context


class Token(_Watched):
    """A bearer token in a file. Raises OSError at the start if the file cannot be read or is empty."""

    def _load(self) -> None:
        (path,) = self.paths
        try:
            token = path.read_bytes().strip()
        except OSError as error:
            raise OSError(error.errno, f"token file {path}: {error.strerror}") from error
        if not token:
            raise OSError(errno.EINVAL, f"token file {path}: it is empty")
        self._token = token

    def admits(self, authorization: str) -> bool:
        """Return whether an Authorization header contains the token: as a bearer token, or as a browser's password."""
        self._refresh()
        scheme, _, credentials = authorization.partition(" ")
        given = credentials.strip().encode(errors="replace")
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(given, self._token)
