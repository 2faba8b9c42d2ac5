"""Model pairs and sweeps, as YAML."""
