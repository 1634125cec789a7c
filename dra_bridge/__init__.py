"""A bridge from device plugins to Dynamic Resource Allocation: the second door to the same devices."""
