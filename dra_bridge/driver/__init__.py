"""The DRA driver: prepares claims, and registers with the kubelet.

`Driver` is the entry point. `Registrar` serves the driver's gRPC API to the kubelet. Module `preparation` prepares and
unprepares claims.
"""

from dra_bridge.driver.claim_api import ClusterClaims as ClusterClaims
from dra_bridge.driver.claim_devices import ServedResource as ServedResource
from dra_bridge.driver.claims import ClaimError as ClaimError
from dra_bridge.driver.claims import ClaimRef as ClaimRef
from dra_bridge.driver.claims import Prepared as Prepared
from dra_bridge.driver.driver import Driver as Driver
from dra_bridge.driver.driver import DriverNode as DriverNode
from dra_bridge.driver.host import DriverHost as DriverHost
from dra_bridge.driver.host import RunningPods as RunningPods
from dra_bridge.driver.registrar import DriverDirectories as DriverDirectories
from dra_bridge.driver.registrar import Registrar as Registrar
from dra_bridge.driver.statistics import ClaimStatistics as ClaimStatistics
