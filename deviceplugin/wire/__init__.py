"""Stubs generated from `api/deviceplugin/wire` by `tox -e stubs`; never edited by hand."""
