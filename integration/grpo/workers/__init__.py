"""The engines of a run as actors: what rolls out, what trains, and what travels between them."""
