"""ResourceSlices: `desired` computes the wanted slices, `plan` the fewest writes, and `Publisher` writes the slices."""
