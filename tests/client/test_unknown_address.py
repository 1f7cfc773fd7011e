"""Masters that have just started may not know where a node is. Clients then ask again; they do not give up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.client.small import small_cluster
from tests.client.test_scans import ONE, SCHEMA, rows


async def test_a_put_and_a_get_wait_until_an_address_is_known(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, ONE)
        day = rows()["day"][0].as_py()
        await table.put({"day": day, "id": 1})
        (place,) = table.locations.tablets
        for number in (2, 3):
            place.replicas = tuple(replace(each, address="", flight_address="") for each in place.replicas)
            await table.put({"day": day, "id": number})
            assert place.target().address
        place.replicas = tuple(replace(each, address="", flight_address="") for each in place.replicas)
        found = await table.get({"day": day, "id": 3})
        assert found is not None and found["id"] == 3
        place.replicas = tuple(replace(each, address="", flight_address="") for each in place.replicas)
        assert await table.scan().count() == 3
