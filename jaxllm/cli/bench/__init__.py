"""`jaxllm bench`: benchmarks that print JSON, and how near they come to the hardware's measured limits."""
