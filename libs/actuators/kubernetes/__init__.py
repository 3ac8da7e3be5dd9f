"""The actuator for a Kubernetes cluster, which scales a Deployment of standby workers as the planner requests."""
