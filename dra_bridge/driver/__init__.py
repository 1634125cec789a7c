"""The DRA driver: claims, their preparation, and registration with the kubelet."""
