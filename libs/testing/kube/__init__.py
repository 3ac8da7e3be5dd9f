"""A real Kubernetes control plane, as KUBECONFIG names it, with the chart installed."""
