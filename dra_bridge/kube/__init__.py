"""The client of the API server: HTTP, authentication, typed requests, watches."""

from dra_bridge.kube.api import CLUSTER_ROLE_BINDINGS as CLUSTER_ROLE_BINDINGS
from dra_bridge.kube.api import DAEMON_SETS as DAEMON_SETS
from dra_bridge.kube.api import DEVICE_CLASSES as DEVICE_CLASSES
from dra_bridge.kube.api import EVENTS as EVENTS
from dra_bridge.kube.api import NODES as NODES
from dra_bridge.kube.api import PODS as PODS
from dra_bridge.kube.api import RESOURCE_CLAIMS as RESOURCE_CLAIMS
from dra_bridge.kube.api import RESOURCE_SLICES as RESOURCE_SLICES
from dra_bridge.kube.api import SELF_SUBJECT_REVIEWS as SELF_SUBJECT_REVIEWS
from dra_bridge.kube.api import AccessError as AccessError
from dra_bridge.kube.api import ApiError as ApiError
from dra_bridge.kube.api import ClusterError as ClusterError
from dra_bridge.kube.api import ConflictError as ConflictError
from dra_bridge.kube.api import ForbiddenError as ForbiddenError
from dra_bridge.kube.api import InvalidError as InvalidError
from dra_bridge.kube.api import Kind as Kind
from dra_bridge.kube.api import NotFoundError as NotFoundError
from dra_bridge.kube.api import Object as Object
from dra_bridge.kube.api import UnavailableError as UnavailableError
from dra_bridge.kube.api import UnsupportedError as UnsupportedError
from dra_bridge.kube.api import VersionChangedError as VersionChangedError
from dra_bridge.kube.api import is_older as is_older
from dra_bridge.kube.client import Changed as Changed
from dra_bridge.kube.client import Cluster as Cluster
from dra_bridge.kube.client import Listed as Listed
