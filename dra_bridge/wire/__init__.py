"""Stubs generated from `api/dra_bridge/wire` by `tox -e stubs`; never edited by hand."""
