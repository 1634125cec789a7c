"""A real Kubernetes node, and the tests that need a real node."""
