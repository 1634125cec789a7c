"""Many real agents at one real API server: their requests, and the costs of commands for many nodes."""
