"""The actuator over a Kubernetes cluster: a Deployment of workers on standby, scaled as the planner wishes."""
