"""The device metadata (KEP-5304) of one driver's claims: the content of each request's file, and the files on the host.

The metadata files are in the directory of the agent's claim files (`deviceplugin.register.claim_files`). They are
written before the CDI file that mounts them, and removed after this file. The ledger file has their content in the
claim's recorded response, so that lost files can be written again.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Final

from deviceplugin import cdi, device_metadata
from deviceplugin.device import ContainerEdits, Mount
from dra_bridge.driver.claims import ClaimRef
from dra_bridge.driver.served import RequestDevices


class ClaimMetadata:
    """The metadata files of one driver's claims. directory: the directory of CDI specs."""

    def __init__(self, driver: str, directory: str) -> None:
        self._driver = driver
        self._directory = cdi.own_directory(directory)
        self._file: Final = re.compile(
            rf"{re.escape(driver)}_(?P<uid>{cdi.UID.pattern})_(?P<request>[a-z0-9-]+)\.metadata(\.[0-9a-f]+)?"
        )

    def path(self, uid: str, request: str) -> str:
        """Return the path of a request's file on the host."""
        return f"{self._directory}/{self._driver}_{uid}_{request}.metadata"

    def text(self, ref: ClaimRef, groups: Sequence[RequestDevices], pod_claim: str) -> str:
        """Return the content of a request's metadata file; "" if no resource of the request's devices has metadata."""
        devices, name = dict[str, device_metadata.Described](), ""
        for group in groups:
            for device, result in group.members if group.served.source.metadata else ():
                attributes = device_metadata.described(group.served.source.resource, device)
                one = {"driver": self._driver, "pool": result.pool, "name": result.device, "attributes": attributes}
                devices[result.device], name = one, result.request
        if not devices:
            return ""
        about = {"name": ref.name, "namespace": ref.namespace, "uid": ref.uid}
        return device_metadata.stream(about, name, list(devices.values()), pod_claim).decode()

    def mount(self, ref: ClaimRef, request: str, pod_claim: str) -> ContainerEdits:
        """Return the container edits that mount a request's metadata file."""
        inside = device_metadata.claim_path(self._driver, ref.name, request, pod_claim)
        return ContainerEdits(mounts=[Mount(self.path(ref.uid, request), inside, readonly=True)])

    def write(self, uid: str, texts: Mapping[str, str]) -> bool:
        """Write a claim's metadata files; return whether any file was missing. Blocks. Raises CdiError.

        texts: the files' contents by request.
        """
        written = False
        for request, text in texts.items():
            try:
                written |= device_metadata.write(self.path(uid, request), text.encode())
            except OSError as error:
                raise cdi.CdiError(f"cannot write {self.path(uid, request)}: {error.strerror}") from error
        return written

    def remove(self, uid: str) -> None:
        """Remove a claim's metadata files, if they exist. Blocks. Raises CdiError."""
        for name, of in self._names().items():
            if of[0] == uid:
                try:
                    with contextlib.suppress(FileNotFoundError):
                        os.remove(f"{self._directory}/{name}")
                except OSError as error:
                    raise cdi.CdiError(f"cannot remove {self._directory}/{name}: {error.strerror}") from error

    def list(self) -> dict[str, set[str]]:
        """Return, for each claim UID, the requests that have a metadata file. Blocks."""
        found: dict[str, set[str]] = {}
        for uid, request in self._names().values():
            found.setdefault(uid, set()).add(request)
        return found

    def _names(self) -> dict[str, tuple[str, str]]:
        """Return, for each file name of a metadata file or leftover draft, the claim's UID and the request."""
        try:
            names = os.listdir(self._directory)
        except OSError:
            return {}
        return {name: (match["uid"], match["request"]) for name in names if (match := self._file.fullmatch(name))}
