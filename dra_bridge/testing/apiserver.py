"""A fake Kubernetes API server in a thread, for tests.

The fake is fast, and can produce faults that are rare in reality. The server stores objects of all kinds in KINDS. It
handles ResourceSlices as kube-apiserver 1.36 does: versions v1beta1, v1beta2 and v1, the validation that the tests
need, defaulted fields, and dropped fields of disabled features. It serves plain HTTP, without authentication and
admission.

    with FakeApiServer() as server:
        server.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}})
        server.fail(lambda request: request.method == "PUT", Fault(code=500))
        ...
        assert len(server.writes) == 2
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import re
import socket
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from deviceplugin.naming import NamingError, check_attribute_name, check_label, parse_quantity
from dra_bridge.kube.api import Object
from dra_bridge.testing import protobuf

__all__ = ["FakeApiServer", "Fault", "LoggedRequest", "StoredObjects"]


INCONSISTENT: Final = (
    "The provided continue parameter is too old to display a consistent list result. You can start a new list without "
    "the continue parameter, or use the continue token in this response to retrieve the remainder of the results. "
    "Continuing with the provided token results in an inconsistent list - objects that were created, modified, or "
    "deleted between the time the first chunk was returned and now may show up in the list."
)
"""kube-apiserver's message about a continue token whose resource version was compacted (storage/etcd3/errors.go,
1.36)."""
GROUP: Final = "resource.k8s.io"
RBAC: Final = "rbac.authorization.k8s.io"
APPS: Final = "apps"
COORDINATION: Final = "coordination.k8s.io"
FEATURES: Final = frozenset({"taints", "counters", "sharing"})
KINDS: Final[Mapping[str, tuple[str, str, bool]]] = {
    # For each plural: the group, the kind, and whether objects are in a namespace.
    "nodes": ("", "Node", False),
    "namespaces": ("", "Namespace", False),
    "pods": ("", "Pod", True),
    "events": ("", "Event", True),
    "configmaps": ("", "ConfigMap", True),
    "leases": (COORDINATION, "Lease", True),
    "daemonsets": (APPS, "DaemonSet", True),
    "resourceslices": (GROUP, "ResourceSlice", False),
    "resourceclaims": (GROUP, "ResourceClaim", True),
    "deviceclasses": (GROUP, "DeviceClass", False),
    "clusterrolebindings": (RBAC, "ClusterRoleBinding", False),
}


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request in the log. code: the HTTP status of the response; 0 if the server sent no response."""

    method: str
    path: str
    query: Mapping[str, str]
    body: Any = None
    code: int = 0

    @property
    def watch(self) -> bool:
        """Whether the request opens a watch stream."""
        return self.query.get("watch") == "true"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in the handling of a request.

    code: the HTTP status that the server sends instead of executing the request; 0 closes the connection without a
    response, or, with a delay, only delays the response. done: whether the request is executed, but the response is
    lost. delay: seconds for which the server waits first. retry_after: seconds in the header Retry-After. body: a text
    to send instead of a Status.
    """

    code: int = 0
    done: bool = False
    delay: float = 0.0
    message: str = "injected"
    retry_after: int = 0
    body: str = ""


class _RefusedError(Exception):
    def __init__(
        self, code: int, reason: str, message: str, causes: Sequence[Mapping[str, str]] = (), name: str = ""
    ) -> None:
        super().__init__(message)
        details: Object = {"name": name, "causes": list(causes)} if name or causes else {}
        self.code = code
        self.status: Object = {
            "apiVersion": "v1",
            "kind": "Status",
            "metadata": {},
            "status": "Failure",
            "code": code,
            "reason": reason,
            "message": message,
            "details": details,
        }


@dataclass(slots=True)
class _Store:
    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    history: list[tuple[int, str, Object]] = field(default_factory=list)
    """The changes of objects, the oldest first: (resource version, ADDED or MODIFIED or DELETED, object at that
    version)."""


class StoredObjects(NamedTuple):
    """All stored objects at one resource version. objects: the objects by plural, then by namespace and name."""

    version: int
    objects: Mapping[str, dict[tuple[str, str], Object]]


class FakeApiServer:
    """A fake API server, and the context manager that starts and stops it. Any thread may call its methods.

    versions: the versions of resource.k8s.io that the server serves. features: the enabled features, out of taints,
    counters and sharing; fields of disabled features are dropped without an error.
    """

    def __init__(
        self, *, versions: Sequence[str] = ("v1", "v1beta2", "v1beta1"), features: frozenset[str] = FEATURES
    ) -> None:
        self.versions = tuple(versions)
        self.features = features
        self.log: list[LoggedRequest] = []
        self.log_condition = threading.Condition()
        self.proxied: Callable[[str], tuple[int, Object | str]] = lambda path: (503, "no endpoints available")
        """A function that handles requests to pods, services and nodes through the proxy: returns status and body for a
        path."""
        self.user = "system:anonymous"
        """The user name that SelfSubjectReview returns to every client."""
        self._changed = threading.Condition()
        self._version = 100
        self._oldest = 0
        self._stores: dict[str, _Store] = {}
        self._moments: dict[tuple[str, str, int], list[Object]] = {}
        """For each list that a client reads in pages (path, selectors, resource version), all its objects."""
        self._faults: list[tuple[Callable[[LoggedRequest], bool], Fault, int]] = []
        self._bookmark = 0
        self._bookmark_at = 0
        self._generation = 0
        self._stopping = False
        self._http: _Http | None = None
        self._port = 0
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- start and stop of the server ---

    @property
    def url(self) -> str:
        """The server's address, which stays the same after a restart."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start the server; after a `stop`, on the same address."""
        self._stopping = False
        self._http = _Http(("127.0.0.1", self._port), self)
        self._port = self._http.server_address[1]
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, name="fake-apiserver", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Close all connections and refuse new ones. The stored objects stay."""
        http, thread = self._http, self._thread
        if http is None or thread is None:
            return
        self._http = self._thread = None
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        http.shutdown()
        thread.join()
        http.close_all()

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """Stop the server while the context lasts."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def break_watches(self) -> None:
        """End all watch streams, as a server does when it shuts down."""
        with self._changed:
            self._generation += 1
            self._changed.notify_all()

    # --- faults ---

    def fail(self, which: Callable[[LoggedRequest], bool], fault: Fault, times: int = 1) -> None:
        """Apply a fault to the next `times` requests that `which` accepts."""
        with self._changed:
            self._faults.append((which, fault, times))

    def heal(self) -> None:
        """Discard all faults that have not been applied to a request yet."""
        with self._changed:
            self._faults.clear()

    def compact(self) -> None:
        """Forget the history of changes: new watches and pages at older versions get a 410; open watches continue."""
        with self._changed:
            self._oldest = self._version
            self._moments.clear()

    def snapshot(self) -> StoredObjects:
        """Return all stored objects, for `restore`."""
        with self._changed:
            objects = {plural: dict(store.objects) for plural, store in self._stores.items()}
            return StoredObjects(self._version, copy.deepcopy(objects))

    def restore(self, snapshot: StoredObjects, *, end_streams: bool = True) -> None:
        """Restore a snapshot, resource versions included, as etcd is restored without a revision bump.

        end_streams: whether watch streams end, as if the API server were restarted as well. A stream that stays open
        sends nothing until the server's resource version has passed the stream's position.
        """
        with self._changed:
            self._version = self._oldest = snapshot.version
            self._moments.clear()
            for plural, store in self._stores.items():
                store.history.clear()
                store.objects = copy.deepcopy(snapshot.objects.get(plural, {}))
            self._generation += end_streams
            self._changed.notify_all()

    def bookmark(self) -> None:
        """Send a bookmark to every watch stream that allows bookmarks."""
        with self._changed:
            self._version += 1
            self._bookmark += 1
            self._bookmark_at = self._version
            self._changed.notify_all()

    def _fault(self, request: LoggedRequest) -> Fault | None:
        with self._changed:
            for index, (which, fault, times) in enumerate(self._faults):
                if which(request):
                    if times > 1:
                        self._faults[index] = (which, fault, times - 1)
                    else:
                        del self._faults[index]
                    return fault
        return None

    # --- the log ---

    @property
    def writes(self) -> list[LoggedRequest]:
        """The successful requests with other methods than GET, except dry runs."""
        with self.log_condition:
            return [
                entry
                for entry in self.log
                if entry.method != "GET" and "dryRun" not in entry.query and 200 <= entry.code < 300
            ]

    def requests(self, method: str = "", path: str = "") -> list[LoggedRequest]:
        """Return the logged requests with this HTTP method ("": any) whose path contains the text `path`."""
        with self.log_condition:
            return [entry for entry in self.log if method in ("", entry.method) and path in entry.path]

    def wait_for(self, met: Callable[[FakeApiServer], bool], seconds: float = 30.0) -> None:
        """Wait until `met(self)` is true. `met` is called after every request, and at least every 20 ms.

        Raises:
            TimeoutError: `met(self)` is not true after `seconds`.
        """
        deadline = time.monotonic() + seconds
        while not met(self):
            with self.log_condition:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the condition was not met within {seconds} s")
                self.log_condition.wait(0.02)

    def wait_changed(self, after: int, seconds: float) -> int:
        """Wait at most `seconds` for a change after a position in the history; return the new position.

        after: the position that the last call returned; -1 does not wait.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._version != after, seconds)
            return self._version

    def forget_log(self) -> None:
        """Empty the log."""
        with self.log_condition:
            self.log.clear()

    # --- stored objects, for tests ---

    def objects(self, plural: str = "resourceslices") -> list[Object]:
        """Return copies of all objects of a kind, sorted by name. ResourceSlices are of version v1."""
        with self._changed:
            store = self._stores.get(plural, _Store())
            return [copy.deepcopy(body) for _, body in sorted(store.objects.items())]

    def get(self, plural: str, name: str, namespace: str = "") -> Object:
        """Return a copy of one object; KeyError if it does not exist."""
        with self._changed:
            return copy.deepcopy(self._stores[plural].objects[namespace, name])

    def create(self, body: Object) -> Object:
        """Create an object, as a client would."""
        return self._write("POST", *self._place(body), copy.deepcopy(body), {})

    def replace(self, body: Object) -> Object:
        """Replace an object, as a client would that ignores the object's resource version."""
        body = copy.deepcopy(body)
        body["metadata"].pop("resourceVersion", None)
        plural, namespace, _ = self._place(body)
        return self._write("PUT", plural, namespace, body["metadata"]["name"], body, {})

    def patch(self, plural: str, name: str, patch: Object, namespace: str = "", *, subresource: str = "") -> Object:
        """Change parts of an object by a merge patch, as a client would."""
        return self._patch(plural, namespace, name, subresource, patch, {}, "application/merge-patch+json")

    def delete(self, plural: str, name: str, namespace: str = "") -> None:
        """Delete an object."""
        self._delete(plural, namespace, name, {}, {})

    def wipe(self, node: str) -> int:
        """Delete all ResourceSlices of a node, as its kubelet does when it starts; return their number."""
        names = [body["metadata"]["name"] for body in self.objects() if body["spec"].get("nodeName") == node]
        for name in names:
            self.delete("resourceslices", name)
        return len(names)

    @staticmethod
    def _place(body: Object) -> tuple[str, str, str]:
        plural = next(plural for plural, (_, kind, _) in KINDS.items() if kind == body["kind"])
        namespace = body["metadata"].get("namespace", "default") if KINDS[plural][2] else ""
        return plural, namespace, ""

    # --- verbs ---

    def _write(
        self, method: str, plural: str, namespace: str, name: str, body: Object, query: Mapping[str, str]
    ) -> Object:
        with self._changed:
            store = self._stores.setdefault(plural, _Store())
            metadata = body.setdefault("metadata", {})
            if method == "POST":
                if not metadata.get("name"):
                    prefix = metadata.get("generateName")
                    if not prefix:
                        raise _RefusedError(422, "Invalid", "name or generateName is required")
                    metadata["name"] = prefix + uuid.uuid4().hex[:5]
                name = metadata["name"]
            before = store.objects.get((namespace, name))
            if method == "POST" and before is not None:
                raise _RefusedError(409, "AlreadyExists", f'{plural} "{name}" already exists', name=name)
            if method == "PUT":
                if before is None:
                    raise _missing(plural, name)
                wanted = metadata.get("resourceVersion") or before["metadata"]["resourceVersion"]
                if wanted != before["metadata"]["resourceVersion"]:
                    raise _RefusedError(
                        409, "Conflict", f'Operation cannot be fulfilled on {plural} "{name}": modified', name=name
                    )
                uid = metadata.get("uid") or before["metadata"]["uid"]
                if uid != before["metadata"]["uid"]:
                    raise _RefusedError(409, "Conflict", f'{plural} "{name}": uid differs', name=name)
            after = copy.deepcopy(body)
            if plural == "resourceslices":
                after = _slice_as_stored(after, before, self.features)
            kept = ("uid", "creationTimestamp", "generation")
            if before is None:
                after["metadata"].update(
                    uid=str(uuid.uuid4()),
                    creationTimestamp=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    generation=1,
                )
            else:
                after["metadata"].update({key: before["metadata"][key] for key in kept})
                if after.get("spec") != before.get("spec"):
                    after["metadata"]["generation"] += 1
            after["metadata"].pop("resourceVersion", None)
            if query.get("dryRun"):
                return after
            if before is not None:
                same = copy.deepcopy(before)
                same["metadata"].pop("resourceVersion")
                if same == after:
                    return copy.deepcopy(before)  # A write that changes nothing creates no new resource version.
            if before is not None and "deletionTimestamp" in before["metadata"]:
                after["metadata"]["deletionTimestamp"] = before["metadata"]["deletionTimestamp"]
                if not after["metadata"].get("finalizers"):
                    self._store(store, "DELETED", namespace, name, after)
                    return copy.deepcopy(after)
            self._store(store, "ADDED" if before is None else "MODIFIED", namespace, name, after)
            return copy.deepcopy(after)

    def _delete(
        self, plural: str, namespace: str, name: str, conditions: Mapping[str, str], query: Mapping[str, str]
    ) -> Object:
        with self._changed:
            store = self._stores.setdefault(plural, _Store())
            before = store.objects.get((namespace, name))
            if before is None:
                raise _missing(plural, name)
            for key, wanted in conditions.items():
                if before["metadata"][key] != wanted:
                    raise _RefusedError(409, "Conflict", f"Precondition failed: {key}", name=name)
            left = copy.deepcopy(before)
            if left["metadata"].get("finalizers"):
                if "deletionTimestamp" not in left["metadata"] and not query.get("dryRun"):
                    left["metadata"]["deletionTimestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                    self._store(store, "MODIFIED", namespace, name, left)
                return copy.deepcopy(left)
            if not query.get("dryRun"):
                self._store(store, "DELETED", namespace, name, left)
            # The response to a slice's deletion is the slice (ReturnDeletedObject,
            # registry/resource/resourceslice/storage.go).
            if plural == "resourceslices":
                return left
            return {"apiVersion": "v1", "kind": "Status", "status": "Success"}

    def _store(self, store: _Store, event: str, namespace: str, name: str, after: Object) -> None:
        self._version += 1
        after["metadata"]["resourceVersion"] = str(self._version)
        if event == "DELETED":
            del store.objects[namespace, name]
        else:
            store.objects[namespace, name] = after
        store.history.append((self._version, event, copy.deepcopy(after)))
        self._changed.notify_all()

    def _patch(
        self,
        plural: str,
        namespace: str,
        name: str,
        subresource: str,
        patch: Object,
        query: Mapping[str, str],
        kind: str,
    ) -> Object:
        with self._changed:
            before = self._stores.setdefault(plural, _Store()).objects.get((namespace, name))
            if before is None:
                if kind != "application/apply-patch+yaml":
                    raise _missing(plural, name)
                return self._write("POST", plural, namespace, name, patch, query)
            merged = _merge(copy.deepcopy(before), patch)
            whole = copy.deepcopy(before)
            if subresource == "status":
                whole["status"] = merged.get("status", {})
                # A patch of the status changes no metadata; its uid and resourceVersion are preconditions.
                whole["metadata"] |= {key: merged["metadata"].get(key) for key in ("uid", "resourceVersion")}
            else:
                whole = {**merged, **({"status": before["status"]} if "status" in before else {})}
            return self._write("PUT", plural, namespace, name, whole, query)

    # --- requests ---

    def _answer(self, request: LoggedRequest, content_type: str) -> tuple[int, Object | str]:
        try:
            return self._route(request, content_type)
        except _RefusedError as error:
            return error.code, error.status

    def _route(self, request: LoggedRequest, content_type: str) -> tuple[int, Object | str]:
        parts = request.path.strip("/").split("/")
        if parts == ["version"]:
            return 200, {"major": "1", "minor": "36", "gitVersion": "v1.36.3-fake"}
        served = [{"groupVersion": f"{GROUP}/{version}", "version": version} for version in self.versions]
        group = {"kind": "APIGroup", "name": GROUP, "versions": served}
        if parts == ["apis"]:
            return 200, {"kind": "APIGroupList", "groups": [group] if served else []}
        if parts == ["apis", GROUP]:
            return (200, group) if served else _no_page()
        if parts[:2] == ["apis", GROUP] and len(parts) == 3 and parts[2] in self.versions:
            names = [plural for plural, (group, _, _) in KINDS.items() if group == GROUP]
            return 200, {"kind": "APIResourceList", "resources": [{"name": name} for name in names]}
        if request.method == "GET" and "proxy" in (*parts[6:7], *(parts[4:5] if parts[2:3] == ["nodes"] else ())):
            return self.proxied(request.path)
        if request.method == "POST" and parts == ["apis", "authentication.k8s.io", "v1", "selfsubjectreviews"]:
            return 201, {**request.body, "status": {"userInfo": {"username": self.user}}}
        place = self._resource(parts)
        if place is None:
            return _no_page()
        version, plural, namespace, name, subresource = place
        method, body = request.method, request.body
        if plural == "resourceslices" and isinstance(body, dict) and method in ("POST", "PUT", "PATCH"):
            body = _from_version(copy.deepcopy(body), version)
        if method == "GET" and name:
            stored = self._stores.get(plural, _Store()).objects.get((namespace, name))
            if stored is None:
                raise _missing(plural, name)
            return 200, self._shown(stored, plural, version)
        if method == "GET":
            with self._changed:
                chosen, metadata = self._page(plural, namespace, request)
                items = [self._shown(chosen_body, plural, version) for chosen_body in chosen]
            return 200, {"kind": f"{KINDS[plural][1]}List", "metadata": metadata, "items": items}
        if method == "POST":
            return 201, self._shown(self._write("POST", plural, namespace, "", body, request.query), plural, version)
        if method == "PUT":
            return 200, self._shown(self._write("PUT", plural, namespace, name, body, request.query), plural, version)
        if method == "PATCH":
            done = self._patch(plural, namespace, name, subresource, body, request.query, content_type)
            return 200, self._shown(done, plural, version)
        if method == "DELETE" and name:
            conditions = (body or {}).get("preconditions") or {}
            left = self._delete(plural, namespace, name, conditions, request.query)
            return 200, left if left["kind"] == "Status" else self._shown(left, plural, version)
        return 405, "the server does not allow this method"

    def _page(self, plural: str, namespace: str, request: LoggedRequest) -> tuple[list[Object], Object]:
        """Return a page of a list, as storage/etcd3/store.go (GetList) and storage/continue.go of 1.36 do."""
        start, position = "", self._version
        place = request.path, f"{request.query.get('fieldSelector')} {request.query.get('labelSelector')}"
        if token := request.query.get("continue"):
            told = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
            start = told["start"]
            if told["rv"] != -1:  # A token with -1 continues the list at the newest resource version.
                position = told["rv"]
                if (*place, position) not in self._moments:
                    error = _RefusedError(410, "Expired", INCONSISTENT)
                    error.status["metadata"] = {"continue": _token(-1, start)}
                    raise error
        chosen = self._moments.get((*place, position)) or self._selected(plural, namespace, request.query)
        left = [body for body in chosen if _key(body) >= start]
        metadata: Object = {"resourceVersion": str(position)}
        limit = int(request.query.get("limit") or 0)
        if limit and len(left) > limit:
            self._moments[*place, position] = chosen
            metadata |= {
                "continue": _token(position, _key(left[limit - 1]) + "\0"),
                "remainingItemCount": len(left) - limit,
            }
            left = left[:limit]
        return left, metadata

    def _resource(self, parts: list[str]) -> tuple[str, str, str, str, str] | None:
        if parts[:2] == ["api", "v1"]:
            group, version, rest = "", "v1", parts[2:]
        elif parts[:2] == ["apis", GROUP] and len(parts) > 3 and parts[2] in self.versions:
            group, version, rest = GROUP, parts[2], parts[3:]
        elif parts[:1] == ["apis"] and parts[1:3] in ([RBAC, "v1"], [APPS, "v1"], [COORDINATION, "v1"]):
            group, version, rest = parts[1], "v1", parts[3:]
        else:
            return None
        namespace = ""
        if len(rest) > 2 and rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        if not rest or KINDS.get(rest[0], ("?", "", False))[0] != group:
            return None
        return version, rest[0], namespace, rest[1] if len(rest) > 1 else "", rest[2] if len(rest) > 2 else ""

    def _selected(self, plural: str, namespace: str, query: Mapping[str, str]) -> list[Object]:
        objects = self._stores.get(plural, _Store()).objects
        return [
            body
            for (where, _), body in sorted(objects.items(), key=lambda item: _key(item[1]))
            if namespace in ("", where)
            and _matches(body, query.get("fieldSelector", ""))
            and _labelled(body, query.get("labelSelector", ""))
        ]

    @staticmethod
    def _shown(body: Object, plural: str, version: str) -> Object:
        group, kind, _ = KINDS[plural]
        shown = copy.deepcopy(body)
        if plural == "resourceslices" and version == "v1beta1":
            for device in shown["spec"].get("devices") or ():
                basic = {key: device.pop(key) for key in list(device) if key != "name"}
                device["basic"] = basic
        return {**shown, "apiVersion": f"{group}/{version}" if group else version, "kind": kind}

    def _events(self, request: LoggedRequest, send: Callable[[Object], None]) -> None:
        place = self._resource(request.path.strip("/").split("/"))
        assert place is not None
        version, plural, namespace, _, _ = place
        selector, labels = request.query.get("fieldSelector", ""), request.query.get("labelSelector", "")
        position = int(request.query.get("resourceVersion") or 0)
        end = time.monotonic() + float(request.query.get("timeoutSeconds") or 300)
        with self._changed:
            generation, bookmark = self._generation, self._bookmark
            store = self._stores.setdefault(plural, _Store())
            oldest = self._oldest
        self._record(request, 200)
        # A watch from a future resource version is silent: Cacher.Watch (cacher.go, 1.36) does not check the version.
        if position < oldest:
            status = _RefusedError(410, "Expired", f"too old resource version: {position} ({oldest})").status
            send({"type": "ERROR", "object": status})
            return
        while True:
            out: list[Object] = []
            with self._changed:
                over = self._stopping or self._generation != generation or time.monotonic() >= end
                for number, event, body in store.history if self._generation == generation else ():
                    if number <= position:
                        continue
                    position = number
                    where = body["metadata"].get("namespace", "") if KINDS[plural][2] else ""
                    if namespace in ("", where) and _matches(body, selector) and _labelled(body, labels):
                        out.append({"type": event, "object": self._shown(body, plural, version)})
                due = self._bookmark > bookmark and self._bookmark_at > position
                if due and request.query.get("allowWatchBookmarks") == "true":
                    bookmark, position = self._bookmark, self._bookmark_at
                    metadata = {"resourceVersion": str(position)}
                    out.append({"type": "BOOKMARK", "object": {"kind": KINDS[plural][1], "metadata": metadata}})
                if not out and not over:
                    self._changed.wait(min(0.5, max(0.0, end - time.monotonic())))
            for message in out:
                send(message)
            if over:
                return

    def _record(self, request: LoggedRequest, code: int) -> None:
        with self.log_condition:
            self.log.append(LoggedRequest(request.method, request.path, request.query, request.body, code))
            self.log_condition.notify_all()


# --- HTTP -----------------------------------------------------------------------------------------


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], api: FakeApiServer) -> None:
        self.api = api
        self.sockets: set[socket.socket] = set()
        self.threads: set[threading.Thread] = set()
        self.lock = threading.Lock()
        super().__init__(address, _Handler)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with self.lock:
            self.sockets.add(request)
            self.threads.add(threading.current_thread())
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self.lock:
                self.sockets.discard(request)
                self.threads.discard(threading.current_thread())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing when a client disconnects."""

    def close_all(self) -> None:
        self.server_close()
        with self.lock:
            open_sockets, threads = set(self.sockets), set(self.threads)
        for open_socket in open_sockets:
            with contextlib.suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(5)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Http

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Print nothing, because FakeApiServer.log has the requests."""

    def _handle(self) -> None:
        api = self.server.api
        parts = urllib.parse.urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length) if length else b""
        body = json.loads(raw) if raw else None
        request = LoggedRequest(
            self.command, urllib.parse.unquote(parts.path), dict(urllib.parse.parse_qsl(parts.query)), body
        )
        fault = api._fault(request)  # noqa: SLF001
        if fault is not None:
            if fault.delay:
                with api._changed:  # noqa: SLF001
                    api._changed.wait_for(lambda: api._stopping, fault.delay)  # noqa: SLF001
            if fault.done:
                api._answer(request, self.headers.get("Content-Type", ""))  # noqa: SLF001
            if fault.code:
                api._record(request, fault.code)  # noqa: SLF001
                status = _RefusedError(fault.code, "Injected", fault.message).status
                self._send(fault.code, fault.body or status, fault.retry_after)
                return
            if not fault.delay or fault.done:
                api._record(request, 0)  # noqa: SLF001
                self.close_connection = True
                return
        if request.watch:
            self._stream(request)
            return
        code, answer = api._answer(request, self.headers.get("Content-Type", ""))  # noqa: SLF001
        api._record(request, code)  # noqa: SLF001
        self._send(code, answer)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle  # noqa: N815

    def _send(self, code: int, answer: Object | str, retry_after: int = 0) -> None:
        if isinstance(answer, str):
            content, media_type = answer.encode(), "text/plain"
        elif protobuf.MEDIA_TYPE in self.headers.get("Accept", ""):
            content, media_type = protobuf.encoded(answer), protobuf.MEDIA_TYPE
        else:
            content, media_type = json.dumps(answer).encode(), "application/json"
        self.send_response(code)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(content)))
        if retry_after:
            self.send_header("Retry-After", str(retry_after))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, request: LoggedRequest) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

        def send(event: Object) -> None:
            content = json.dumps(event).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))

        try:
            self.server.api._events(request, send)  # noqa: SLF001
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            pass
        self.close_connection = True


# --- objects --------------------------------------------------------------------------------------


def _missing(plural: str, name: str) -> _RefusedError:
    group = KINDS[plural][0]
    error = _RefusedError(404, "NotFound", f'{f"{plural}.{group}".rstrip(".")} "{name}" not found')
    error.status["details"] = {"name": name, "kind": plural, **({"group": group} if group else {})}
    return error


def _key(body: Object) -> str:
    """Return the key by which etcd sorts the objects of a kind."""
    metadata = body["metadata"]
    return f"{metadata['namespace']}/{metadata['name']}" if metadata.get("namespace") else str(metadata["name"])


def _token(version: int, start: str) -> str:
    text = json.dumps({"v": "meta.k8s.io/v1", "rv": version, "start": start})
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _no_page() -> tuple[int, str]:
    return 404, "404 page not found"


def _matches(body: Object, selector: str) -> bool:
    for term in filter(None, selector.split(",")):
        path, equal, wanted = re.split(r"(!=|==?)", term, maxsplit=1)
        value: Any = body
        for key in path.split("."):
            value = value.get(key, "") if isinstance(value, dict) else ""
        if (value == wanted) != (equal != "!="):
            return False
    return True


def _labelled(body: Object, selector: str) -> bool:
    """Return whether the labels match a selector of the forms `key`, `!key`, `key=value` and `key!=value`."""
    labels = body["metadata"].get("labels") or {}
    for term in filter(None, selector.split(",")):
        key, equal, wanted = [*re.split(r"(!=|==?)", term, maxsplit=1), "", ""][:3]
        if not equal and term.startswith("!"):
            right = term[1:] not in labels
        elif not equal:
            right = term in labels
        else:
            right = (labels.get(key) == wanted) != (equal == "!=")
        if not right:
            return False
    return True


def _merge(into: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    merged = dict(into) if isinstance(into, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key), value)
    return merged


def _from_version(body: Object, version: str) -> Object:
    """Convert a ResourceSlice to v1. Fields that its API version lacks are dropped, as by a decoder."""
    spec = body.get("spec")
    if not isinstance(spec, dict) or version != "v1beta1":
        return body
    spec["devices"] = [
        {"name": device.get("name", ""), **(device.get("basic") or {})} for device in spec.get("devices") or ()
    ]
    return body


def _slice_as_stored(body: Object, before: Object | None, features: frozenset[str]) -> Object:
    spec = body["spec"]
    old = before["spec"] if before else {}
    devices = spec.get("devices") or []
    if "taints" not in features and not any(device.get("taints") for device in old.get("devices") or ()):
        for device in devices:
            device.pop("taints", None)
    in_use = old.get("sharedCounters") or any(device.get("consumesCounters") for device in old.get("devices") or ())
    if "counters" not in features and not in_use:
        spec.pop("sharedCounters", None)
        for device in devices:
            device.pop("consumesCounters", None)
    in_use = any("allowMultipleAllocations" in device for device in old.get("devices") or ())
    if "sharing" not in features and not in_use:
        for device in devices:
            device.pop("allowMultipleAllocations", None)
            for capacity in (device.get("capacity") or {}).values():
                capacity.pop("requestPolicy", None)
    in_use = any(
        "ints" in one for device in old.get("devices") or () for one in (device.get("attributes") or {}).values()
    )
    if "lists" not in features and not in_use:
        for device in devices:
            for attribute in (device.get("attributes") or {}).values():
                attribute.pop("ints", None)
    for device in devices:
        for key in ("taints", "attributes", "capacity", "consumesCounters"):
            if not device.get(key):
                device.pop(key, None)
        for taint in device.get("taints") or ():
            taint.setdefault("timeAdded", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
        for capacity in (device.get("capacity") or {}).values():
            capacity["value"] = _canonical(capacity["value"])
    for counters in spec.get("sharedCounters") or ():
        for counter in counters["counters"].values():
            counter["value"] = _canonical(counter["value"])
    for key in ("devices", "sharedCounters"):
        if not spec.get(key):
            spec.pop(key, None)
    _validate(spec, old, body["metadata"]["name"])
    return body


def _canonical(value: int | str) -> str:
    """Return a quantity in the API server's form, with the largest suffix that leaves an integer."""
    number = parse_quantity(value)
    text = str(value)
    base, suffixes = (1024, ["Ki", "Mi", "Gi", "Ti"]) if text.endswith("i") else (1000, ["k", "M", "G", "T"])
    if number.denominator != 1:
        return f"{number * 1000}m" if (number * 1000).denominator == 1 else text
    best = str(number)
    for power, suffix in enumerate(suffixes, 1):
        if number and number % base**power == 0:
            best = f"{number // base**power}{suffix}"
    return best


def _validate(spec: Object, old: Object, name: str) -> None:
    causes: list[Mapping[str, str]] = []

    def wrong(place: str, message: str) -> None:
        causes.append({"field": place, "reason": "FieldValueInvalid", "message": message})

    devices = spec.get("devices") or []
    advanced = any(device.get("taints") or device.get("consumesCounters") for device in devices)
    most = 64 if advanced else 128
    if len(devices) > most:
        wrong("spec.devices", f"Too many: {len(devices)}: must have at most {most} items")
    if devices and spec.get("sharedCounters"):
        wrong("spec", "only one of `sharedCounters` or `devices` is allowed")
    if len(spec.get("sharedCounters") or ()) > 8:
        wrong("spec.sharedCounters", "must have at most 8 items")
    if len({device["name"] for device in devices}) < len(devices):
        wrong("spec.devices", "Duplicate value")
    if spec["pool"].get("resourceSliceCount", 0) <= 0:
        wrong("spec.pool.resourceSliceCount", "must be greater than zero")
    if spec["pool"].get("generation", 0) > 2**63 - 1:
        message = "json: cannot unmarshal number into Go struct field ResourcePool.spec.pool.generation of type int64"
        raise _RefusedError(400, "BadRequest", message)
    if spec["pool"].get("generation", 0) < 0:
        wrong("spec.pool.generation", "must be greater than or equal to zero")
    if sum(bool(spec.get(key)) for key in ("nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection")) != 1:
        wrong("spec", "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required")
    for key in ("driver", "nodeName"):
        if old and spec.get(key) != old.get(key):
            wrong(f"spec.{key}", "field is immutable")
    if old and spec["pool"]["name"] != old["pool"]["name"]:
        wrong("spec.pool.name", "field is immutable")
    for index, device in enumerate(devices):
        place = f"spec.devices[{index}]"
        names = [*(device.get("attributes") or {}), *(device.get("capacity") or {})]
        try:
            check_label(device["name"])
            for attribute in names:
                check_attribute_name(attribute)
        except NamingError as error:
            wrong(place, str(error))
        if len(names) > 32:
            wrong(place, "the total number of attributes and capacities must not exceed 32")
        for attribute in (device.get("attributes") or {}).values():
            if len(attribute) != 1 or len(str(attribute.get("string", ""))) > 64:
                wrong(f"{place}.attributes", "exactly one value must be specified")
        for capacity in (device.get("capacity") or {}).values():
            if "requestPolicy" in capacity and not device.get("allowMultipleAllocations"):
                wrong(f"{place}.capacity", "allowMultipleAllocations must be true")
        if len(device.get("consumesCounters") or ()) > 2:
            wrong(f"{place}.consumesCounters", "must have at most 2 items")
    if causes:
        said = ", ".join(f"{cause['field']}: {cause['message']}" for cause in causes)
        raise _RefusedError(422, "Invalid", f'ResourceSlice.resource.k8s.io "{name}" is invalid: {said}', causes, name)
