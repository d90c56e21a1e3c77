"""Compare the best plans of policies with each other and with the current deployment."""
