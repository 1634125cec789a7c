"""The client of the API server: HTTP, authentication, typed requests, watches."""

from deviceplugin.backoff import Backoff
from dra_bridge.kube.client import Cluster
from dra_bridge.kube.errors import (
    AccessError,
    AlreadyExistsError,
    ApiError,
    Cause,
    ClusterError,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    NotFoundError,
    UnauthorizedError,
    UnavailableError,
    UnsupportedError,
    VersionChangedError,
    error_of,
)
from dra_bridge.kube.kinds import (
    DEVICE_CLASSES,
    EVENTS,
    NODES,
    PODS,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    Kind,
    Object,
)
from dra_bridge.kube.traffic import RequestStatistics
from dra_bridge.kube.watch import SILENCE, Changed, Listed, Listing

__all__ = [
    "DEVICE_CLASSES",
    "EVENTS",
    "NODES",
    "PODS",
    "RESOURCE_CLAIMS",
    "RESOURCE_SLICES",
    "SILENCE",
    "AccessError",
    "AlreadyExistsError",
    "ApiError",
    "Backoff",
    "Cause",
    "Changed",
    "Cluster",
    "ClusterError",
    "ConflictError",
    "ForbiddenError",
    "GoneError",
    "InvalidError",
    "Kind",
    "Listed",
    "Listing",
    "NotFoundError",
    "Object",
    "RequestStatistics",
    "UnauthorizedError",
    "UnavailableError",
    "UnsupportedError",
    "VersionChangedError",
    "error_of",
]
