"""Defines the sources of the config file: a class for each kind of device entry, and a class for a whole resource."""

from deviceplugin.sources.configured import ConfiguredSource, overlaps

__all__ = ["ConfiguredSource", "overlaps"]
