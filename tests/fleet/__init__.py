"""Many agents of the real code at one real API server: what they ask of it, and what commands for many nodes cost."""
