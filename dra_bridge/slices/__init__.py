"""ResourceSlices: `desired` is what the API server should have, `plan` finds the fewest writes, `Publisher` writes."""
