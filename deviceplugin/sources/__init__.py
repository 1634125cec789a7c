"""From a resource of the config file to a source of its devices."""

from deviceplugin.sources.configured import ConfiguredSource, overlaps

__all__ = ["ConfiguredSource", "overlaps"]
