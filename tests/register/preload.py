"""What the agents' processes need, imported once by the server that forks them."""

import grpc.aio  # noqa: F401

import dra_bridge.node.bridge
import dra_bridge.node.driver_runtime  # noqa: F401
import tests.register.agent  # noqa: F401
