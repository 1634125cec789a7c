"""A small client of the kube-apiserver: JSON over one HTTPS connection per thread, only with the standard library.

A call of kubectl needs 0.1 s of CPU; a request of this client needs 2 ms.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import ssl
import textwrap
import threading
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

Object = dict[str, Any]
"""A Kubernetes object, decoded from JSON."""

Objects = list[Object]


class ApiError(Exception):
    """The API server refused a request."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        """Store parts of the Status object in the server's response."""
        super().__init__(f"{code} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message


@dataclass(frozen=True)
class Resource:
    """A kind of objects that the API server serves, in one API version."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool
    names: frozenset[str]
    """All names of the kind, in lower case: kind, plural, singular and short names."""

    def path(self, name: str = "", namespace: str | None = None) -> str:
        """Return the URL path of one object, or of the collection without a name."""
        base = f"/api/{self.api_version}" if "/" not in self.api_version else f"/apis/{self.api_version}"
        if self.namespaced and namespace is not None:
            base += f"/namespaces/{namespace}"
        return f"{base}/{self.plural}" + (f"/{name}" if name else "")


def parse_yaml(text: str) -> Objects:
    """Return the documents of a YAML text, which may be indented as a whole."""
    yaml = importlib.import_module("yaml")
    return [document for document in yaml.safe_load_all(textwrap.dedent(text)) if document]


class Api:
    """Requests to one API server with one bearer token; safe to use from several threads."""

    def __init__(self, host: str, port: int, token: str, ca: str, timeout: float = 30.0) -> None:
        """Store the options without a connection. ``ca``: the path of the authority's certificate."""
        self.host = host
        self.port = port
        self._token = token
        self._timeout = timeout
        self._tls = ssl.create_default_context(cafile=ca)
        self._local = threading.local()
        self._connections: set[http.client.HTTPSConnection] = set()
        self._resources: list[Resource] = []

    # --- requests ---

    def close(self) -> None:
        """Close the connections of all threads; a later request makes a new one."""
        while self._connections:
            self._connections.pop().close()
        self._local = threading.local()

    def __del__(self) -> None:
        """Close the connections, so that the interpreter does not warn of open sockets."""
        with contextlib.suppress(Exception):
            self.close()

    def _drop(self, connection: http.client.HTTPSConnection) -> None:
        connection.close()
        self._connections.discard(connection)
        self._local.connection = None

    def raw(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Send one request and return status and body. Raises OSError if the server cannot be reached."""
        sent = {"Authorization": f"Bearer {self._token}", "Accept": "application/json", **(headers or {})}
        for attempt in (1, 2):
            connection = cast("http.client.HTTPSConnection | None", getattr(self._local, "connection", None))
            kept = connection is not None
            if connection is None:
                connection = http.client.HTTPSConnection(self.host, self.port, timeout=self._timeout, context=self._tls)
                self._local.connection = connection
                self._connections.add(connection)
            try:
                connection.request(method, path, body, sent)
                response = connection.getresponse()
                return response.status, response.read()
            except (http.client.HTTPException, OSError) as error:
                self._drop(connection)
                # A kept connection may have been closed by a server that has restarted since.
                closed = isinstance(
                    error,
                    (ConnectionError, ssl.SSLEOFError, http.client.BadStatusLine, http.client.CannotSendRequest),
                )
                if attempt == 1 and kept and closed:
                    continue
                if isinstance(error, http.client.HTTPException):
                    raise ConnectionError(f"{method} {path}: {error!r}") from error
                raise
        raise AssertionError("not reached")

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        content_type: str = "application/json",
        **query: str,
    ) -> Object:
        """Send one request and return the decoded JSON response. Raises ApiError if the status is not 2xx."""
        if query:
            path += "?" + urllib.parse.urlencode(query)
        data = None if body is None else json.dumps(body).encode()
        code, answer = self.raw(method, path, data, {"Content-Type": content_type} if data else None)
        try:
            parsed = json.loads(answer)
        except ValueError:
            parsed = {"message": answer.decode(errors="replace")}
        if not isinstance(parsed, dict):
            parsed = {"value": parsed}
        if not 200 <= code < 300:
            raise ApiError(code, str(parsed.get("reason", "")), str(parsed.get("message", "")))
        return parsed

    # --- kinds ---

    def resources(self) -> list[Resource]:
        """Return all kinds that the server serves, the preferred version of each kind before its other versions."""
        found: list[Resource] = []
        accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
        for path in ("/api", "/apis"):
            code, answer = self.raw("GET", path, headers={"Accept": accept})
            if code != 200:
                raise ApiError(code, "", answer.decode(errors="replace"))
            for group in json.loads(answer)["items"]:
                group_name = group.get("metadata", {}).get("name", "")
                for version in group["versions"]:
                    api_version = f"{group_name}/{version['version']}" if group_name else version["version"]
                    for entry in version.get("resources", []):
                        kind = entry.get("responseKind", {}).get("kind", "")
                        names = {kind, entry["resource"], entry.get("singularResource", "")}
                        names.update(entry.get("shortNames", []))
                        found.append(
                            Resource(
                                api_version,
                                kind,
                                entry["resource"],
                                entry["scope"] == "Namespaced",
                                frozenset(name.lower() for name in names if name),
                            )
                        )
        return found

    def resource(self, kind: str, api_version: str | None = None) -> Resource:
        """Return the Resource of a kind by any of the kind's names; for an unknown name, read the discovery again."""
        for attempt in (1, 2):
            if attempt == 2 or not self._resources:
                self._resources = self.resources()
            for resource in self._resources:
                if kind.lower() in resource.names and api_version in (None, resource.api_version):
                    return resource
        raise ApiError(404, "NotFound", f"the server has no {kind} {api_version or ''}".rstrip())

    # --- objects ---

    def get(self, kind: str, name: str, namespace: str = "default", api_version: str | None = None) -> Object:
        """Return one object. Raises ApiError with code 404 if it does not exist."""
        return self.request("GET", self.resource(kind, api_version).path(name, namespace))

    def list(
        self,
        kind: str,
        namespace: str | None = None,
        api_version: str | None = None,
        label_selector: str = "",
        field_selector: str = "",
    ) -> Objects:
        """Return all objects of a kind, in the given namespace or in all namespaces."""
        query = {"labelSelector": label_selector, "fieldSelector": field_selector}
        resource = self.resource(kind, api_version)
        answer = self.request(
            "GET", resource.path(namespace=namespace), **{key: value for key, value in query.items() if value}
        )
        return cast("Objects", answer.get("items") or [])

    def create(self, manifest: Mapping[str, Any], namespace: str = "default") -> Object:
        """Create one object and return it."""
        resource = self.resource(manifest["kind"], manifest["apiVersion"])
        namespace = manifest.get("metadata", {}).get("namespace", namespace)
        return self.request("POST", resource.path(namespace=namespace), manifest)

    def apply(self, manifests: str | Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> Objects:
        """Create or change objects by server-side apply, in the given order; return them."""
        applied = []
        for manifest in _documents(manifests):
            resource = self.resource(manifest["kind"], manifest["apiVersion"])
            namespace = manifest["metadata"].get("namespace", "default")
            path = resource.path(manifest["metadata"]["name"], namespace)
            applied.append(
                self.request(
                    "PATCH", path, manifest, "application/apply-patch+yaml", fieldManager="cluster-tests", force="true"
                )
            )
        return applied

    def patch(
        self,
        kind: str,
        name: str,
        patch: object,
        namespace: str = "default",
        subresource: str = "",
        api_version: str | None = None,
    ) -> Object:
        """Change an object by a merge patch, or by a JSON patch if `patch` is a list; return the object."""
        content_type = "application/json-patch+json" if isinstance(patch, list) else "application/merge-patch+json"
        path = self.resource(kind, api_version).path(name, namespace)
        return self.request("PATCH", path + (f"/{subresource}" if subresource else ""), patch, content_type)

    def delete(
        self,
        kind: str,
        name: str,
        namespace: str = "default",
        api_version: str | None = None,
        grace: int | None = None,
    ) -> None:
        """Delete an object if it exists."""
        body: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        try:
            self.request("DELETE", self.resource(kind, api_version).path(name, namespace), body)
        except ApiError as error:
            if error.code != 404:
                raise


def _documents(manifests: str | Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> Iterator[Object]:
    if isinstance(manifests, str):
        yield from parse_yaml(manifests)
    elif isinstance(manifests, Mapping):
        yield dict(manifests)
    else:
        for manifest in manifests:
            yield dict(manifest)
