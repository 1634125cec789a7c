"""Reads the YAML config file: returns immutable, typed values, or raises errors that say how to correct the file."""

from deviceplugin.config.document import MAX_BYTES, ConfigError
from deviceplugin.config.lock import ADOPTED, OPEN, Lock, needed
from deviceplugin.config.reader import load, parse
from deviceplugin.config.types import Config, MetricsConfig, ResourceConfig, schema

__all__ = [
    "ADOPTED",
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
