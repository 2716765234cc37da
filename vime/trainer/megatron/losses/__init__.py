"""From log-probs to a loss, and what is measured on the way."""
