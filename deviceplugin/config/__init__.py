"""The user's file: YAML to frozen, typed values, or errors that say where and what would be right.

`types` holds the file format and its JSON schema, `reader` reads a file, `lock` is what a file may name. gRPC is not
imported.
"""

from deviceplugin.config.document import MAX_BYTES, ConfigError
from deviceplugin.config.lock import OPEN, Lock, needed
from deviceplugin.config.reader import load, parse
from deviceplugin.config.types import Config, MetricsConfig, ResourceConfig, schema

__all__ = [
    "MAX_BYTES",
    "OPEN",
    "Config",
    "ConfigError",
    "Lock",
    "MetricsConfig",
    "ResourceConfig",
    "load",
    "needed",
    "parse",
    "schema",
]
