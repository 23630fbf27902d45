"""Training scripts run as they are, recorded."""
