"""The client of the API server: HTTP, authentication, typed requests, watches."""

from deviceplugin.backoff import Backoff
from dra_bridge.kube.client import Cluster
from dra_bridge.kube.connection import RequestStatistics
from dra_bridge.kube.errors import (
    AccessError,
    ApiError,
    ClusterError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    VersionChangedError,
)
from dra_bridge.kube.kinds import EVENTS, NODES, PODS, RESOURCE_CLAIMS, RESOURCE_SLICES, Kind, Object
from dra_bridge.kube.watch import Changed, Listed

__all__ = [
    "EVENTS",
    "NODES",
    "PODS",
    "RESOURCE_CLAIMS",
    "RESOURCE_SLICES",
    "AccessError",
    "ApiError",
    "Backoff",
    "Changed",
    "Cluster",
    "ClusterError",
    "ConflictError",
    "ForbiddenError",
    "InvalidError",
    "Kind",
    "Listed",
    "NotFoundError",
    "Object",
    "RequestStatistics",
    "UnavailableError",
    "UnsupportedError",
    "VersionChangedError",
]
