"""A real Kubernetes node for the tests, and the tests that need it."""
