"""ResourceSlices: what is published, and how it is kept so.

`desired` returns what the API server should have of this node's devices. `plan` compares that with what it has and
returns the fewest writes. `Publisher` keeps watching and writing.
"""
