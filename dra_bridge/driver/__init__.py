"""The DRA driver: claims, their preparation, and registration with the kubelet."""

from dra_bridge.driver.claim_api import ClaimApi, ClusterClaims
from dra_bridge.driver.claim_files import Prepared, PreparedDevice
from dra_bridge.driver.claims import ClaimError, ClaimRef
from dra_bridge.driver.preparation import ClaimStatistics, Driver, RunningPods
from dra_bridge.driver.reconciliation import Reconciled
from dra_bridge.driver.registrar import Registrar
from dra_bridge.driver.served import ServedResource

__all__ = [
    "ClaimApi",
    "ClaimError",
    "ClaimRef",
    "ClaimStatistics",
    "ClusterClaims",
    "Driver",
    "Prepared",
    "PreparedDevice",
    "Reconciled",
    "Registrar",
    "RunningPods",
    "ServedResource",
]
