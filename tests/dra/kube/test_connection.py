"""The client reads its configuration for the API server once for all requests that wait for it."""

from __future__ import annotations

import asyncio

from dra_bridge.kube import AccessError
from dra_bridge.kube.auth import Access
from dra_bridge.kube.connection import Connection
from dra_bridge.kube.kubeconfig import KubeConfigError


async def test_requests_that_wait_share_the_failure_to_read_the_configuration() -> None:
    """If a read of the configuration fails, all waiting requests fail with its error; the next request reads anew."""
    reads = 0

    async def configuration() -> Access:
        nonlocal reads
        reads += 1
        await asyncio.sleep(0)
        raise KubeConfigError("there is no kubeconfig")

    connection = Connection(configuration, 1.0, 1.0)
    for expected in (1, 2):
        requests = (connection.send("GET", "/version") for _ in range(3))
        errors = await asyncio.gather(*requests, return_exceptions=True)
        assert [type(error) for error in errors] == [AccessError] * 3
        assert {str(error) for error in errors} == {"cannot reach an API server: there is no kubeconfig"}
        assert reads == expected
