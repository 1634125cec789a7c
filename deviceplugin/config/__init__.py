"""The user's file: YAML to frozen, typed values, or errors that say where and what would be right.

`types` holds the file format, `load` and `parse` read a file, `schema` describes it to editors. gRPC is not imported.
"""

from deviceplugin.config.document import MAX_BYTES, MAX_VALUES
from deviceplugin.config.errors import ConfigError, Problem
from deviceplugin.config.json_schema import schema
from deviceplugin.config.reader import load, parse
from deviceplugin.config.rules import sides_conflict
from deviceplugin.config.types import (
    CommandProbeConfig,
    Config,
    DeviceEntry,
    DraConfig,
    HealthConfig,
    MetricsConfig,
    MountConfig,
    NvidiaConfig,
    PciConfig,
    ResourceConfig,
    SharingConfig,
    SimulatedConfig,
    UsbConfig,
    VersionAttribute,
)

__all__ = [
    "MAX_BYTES",
    "MAX_VALUES",
    "CommandProbeConfig",
    "Config",
    "ConfigError",
    "DeviceEntry",
    "DraConfig",
    "HealthConfig",
    "MetricsConfig",
    "MountConfig",
    "NvidiaConfig",
    "PciConfig",
    "Problem",
    "ResourceConfig",
    "SharingConfig",
    "SimulatedConfig",
    "UsbConfig",
    "VersionAttribute",
    "load",
    "parse",
    "schema",
    "sides_conflict",
]
