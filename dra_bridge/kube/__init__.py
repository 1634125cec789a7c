"""The client of the API server: HTTP, authentication, typed requests, watches."""
