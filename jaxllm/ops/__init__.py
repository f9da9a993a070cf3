"""Array operations chosen by platform, with XLA implementations that run everywhere."""
