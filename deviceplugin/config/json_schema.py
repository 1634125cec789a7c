"""The JSON schema of the config file, made from its types."""

from __future__ import annotations

from typing import Any

import msgspec

from deviceplugin.config.types import Config


def schema() -> dict[str, Any]:
    """Return the file's JSON schema (draft 2020-12), for editors and for checks without this package.

    What it cannot say is checked by `parse` alone: resources named twice, two mounts at one place, a node of two
    groups, attributes that are the same with and without the driver's domain.
    """
    made = msgspec.json.schema(Config)
    definitions: dict[str, Any] = made["$defs"]
    for definition in definitions.values():
        for place in definition["properties"].values():
            _tidy(place)
    entry = definitions["DeviceEntry"]
    entry["oneOf"] = [{"required": [kind]} for kind in entry["properties"]]
    definitions["ResourceConfig"]["dependentRequired"] = {"dra": ["driver"]}
    definitions["MetricsConfig"]["dependentRequired"] = {"key": ["certificate"], "client_ca": ["certificate"]}
    config = definitions.pop("Config")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **config,
        "title": "The config file of deviceplugin and dra-bridge",
        "$defs": definitions,
    }


def _tidy(place: dict[str, Any]) -> None:
    """Make a key that may be left out look so: not null, and no default that says nothing."""
    options = [option for option in place.get("anyOf", []) if option != {"type": "null"}]
    if len(options) == 1:
        del place["anyOf"]
        place.update({**options[0], **place})
    if not isinstance(place.get("default"), (str, bool, int)):
        place.pop("default", None)
