"""The host side: requests, scheduling, page accounting, the step loop and its clients. Imports no jax."""
