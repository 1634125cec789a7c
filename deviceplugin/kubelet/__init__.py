"""What the kubelet of this node knows, and the evidence of which pods still hold which devices."""
