"""What tests of the resource definitions share: an API server that has them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from stele_local.cluster import LocalCluster, Settings
from stele_operator.kube import Kube, configuration
from tests.operator.cluster import install_crds


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def kube(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Kube]:
    async with LocalCluster(tmp_path_factory.mktemp("local"), Settings(machines=1)) as local:
        client = Kube(await configuration(str(local.kubeconfig)))
        await install_crds(client)
        yield client
        await client.close()
