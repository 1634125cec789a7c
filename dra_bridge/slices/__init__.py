"""ResourceSlices: `desired` computes the wanted slices, `plan` finds the fewest writes, `Publisher` writes them."""
